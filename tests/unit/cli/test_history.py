"""The history of a job, from its events: the lineage, its figures, and the times of its iterations."""

from __future__ import annotations

from pathlib import Path

from tidegate.launcher.event_file import EventFile
from tidegate.launcher.history import History, history_of, iteration_seconds, read_history, with_history
from tidegate.v1 import control_pb2, events_pb2, types_pb2


def report(
    iteration: int,
    role: types_pb2.Role.ValueType,
    /,
    *,
    incarnation: int = 1,
    num_generated: int = 0,
    num_trained: int = 0,
    num_filtered: int = 0,
    **metrics: float,
) -> events_pb2.Event:
    made = events_pb2.Event(incarnation=incarnation, iteration=iteration, role=role)
    body = made.iteration_reported
    body.generated.num_samples, body.trained.num_samples = num_generated, num_trained
    if num_filtered:
        body.filtered.add(reason="zero_std", num_samples=num_filtered)
    body.metrics.update(metrics)
    return made


def iteration(
    number: int, *, incarnation: int = 1, reward: float = 0.5, num_trained: int = 6
) -> list[events_pb2.Event]:
    return [
        report(number, types_pb2.ROLE_ROLLOUT, incarnation=incarnation, num_generated=8, reward_mean=reward),
        report(
            number, types_pb2.ROLE_ACTOR, incarnation=incarnation, num_trained=num_trained, num_filtered=2, loss=0.1
        ),
    ]


def evaluation(version: int, *, incarnation: int = 1, reward: float) -> events_pb2.Event:
    made = events_pb2.Event(incarnation=incarnation)
    made.evaluation_reported.version, made.evaluation_reported.num_prompts = version, 16
    made.evaluation_reported.metrics["reward_mean"] = reward
    return made


def lineage(history: History, status: control_pb2.GetJobResponse) -> list[tuple[int, int]]:
    return [(row.iteration, row.incarnation) for row in with_history(status, history).iterations]


def event(
    body: object,
    at_s: float,
    *,
    incarnation: int = 1,
    iteration: int = 0,
    role: types_pb2.Role.ValueType = types_pb2.ROLE_ACTOR,
) -> events_pb2.Event:
    made = events_pb2.Event(incarnation=incarnation, iteration=iteration, role=role, occurred_unix_ns=int(at_s * 1e9))
    field = {"WeightsLoaded": made.weights_loaded, "IterationReported": made.iteration_reported}[type(body).__name__]
    field.SetInParent()
    return made


def test_an_account_sums_the_reports_of_the_components() -> None:
    (row,) = history_of(iteration(0)).iterations
    assert (row.num_generated, row.num_trained, row.num_filtered, row.num_lost, row.num_duplicates) == (8, 6, 2, 0, 0)
    assert dict(row.metrics) == {"reward_mean": 0.5, "loss": 0.1}


def test_samples_that_are_missing_or_too_many_are_told() -> None:
    assert [row.num_lost for row in history_of(iteration(0, num_trained=5)).iterations] == [1]
    assert [row.num_duplicates for row in history_of(iteration(0, num_trained=7)).iterations] == [1]


def test_an_iteration_that_only_some_reported_has_no_account() -> None:
    assert history_of(iteration(0)[:1]).iterations == ()


def test_an_iteration_that_was_done_again_counts_once_by_its_later_account() -> None:
    history = history_of([*iteration(0), *iteration(1, reward=0.2), *iteration(1, incarnation=2, reward=0.9)])
    whole = with_history(control_pb2.GetJobResponse(iteration=2), history)
    assert [(row.iteration, row.metrics["reward_mean"]) for row in whole.iterations] == [(0, 0.5), (1, 0.9)]


def test_what_comes_after_the_next_iteration_does_not_count() -> None:
    history = history_of([*iteration(0), *iteration(1), evaluation(1, reward=0.3), evaluation(2, reward=0.4)])
    whole = with_history(control_pb2.GetJobResponse(iteration=1), history)
    assert [row.iteration for row in whole.iterations] == [0]
    assert [row.version for row in whole.evaluations] == [1]


def test_iterations_that_are_older_than_the_state_come_from_the_events() -> None:
    history = history_of([*iteration(0), *iteration(1), *iteration(2)])
    own = control_pb2.IterationSummary(iteration=2, incarnation=2)
    status = control_pb2.GetJobResponse(iteration=3, iterations=[own])
    assert lineage(history, status) == [(0, 1), (1, 1), (2, 2)]
    assert list(status.iterations) == [own], "the report itself stays as it was"


def test_a_job_without_events_has_the_rows_of_its_state() -> None:
    status = control_pb2.GetJobResponse(iteration=1, iterations=[control_pb2.IterationSummary(iteration=0)])
    assert with_history(status, History()) == status


def test_an_evaluation_that_is_reported_again_keeps_its_first_result() -> None:
    told = [evaluation(0, reward=0.1), evaluation(0, reward=0.2), evaluation(1, reward=0.3)]
    again = evaluation(1, incarnation=2, reward=0.4)
    whole = with_history(control_pb2.GetJobResponse(iteration=1), history_of([*told, again]))
    assert [(row.version, row.metrics["reward_mean"]) for row in whole.evaluations] == [(0, 0.1), (1, 0.4)]


def test_a_file_of_events_has_the_history_of_all_of_them(tmp_path: Path) -> None:
    told = [*iteration(0), events_pb2.Event(failed=events_pb2.Failed(message="no matter")), *iteration(1)]
    file = EventFile(tmp_path / "events.jsonl")
    for sequence, each in enumerate(told, start=1):
        file.append(sequence, each)
    assert read_history(tmp_path / "events.jsonl") == history_of(told)
    assert read_history(tmp_path / "none.jsonl") == History()


def test_an_iteration_lasts_from_the_report_before_it_or_from_the_weights_it_began_with() -> None:
    loaded, reported = events_pb2.WeightsLoaded(), events_pb2.IterationReported()
    history = [
        event(loaded, 10.0),
        event(reported, 12.0, iteration=0),
        event(loaded, 12.5, iteration=1),
        event(reported, 15.0, iteration=1),
        event(loaded, 30.0, incarnation=2, iteration=1),
        event(reported, 31.0, incarnation=2, iteration=1),
    ]
    assert iteration_seconds(history) == {0: 2.0, 1: 1.0}


def test_gpus_that_load_weights_within_the_first_iteration_do_not_begin_it_again() -> None:
    """Recorded under `tide`: a copy of the inference came after 4 seconds."""
    loaded, reported = events_pb2.WeightsLoaded(), events_pb2.IterationReported()
    history = [
        event(loaded, 10.0, role=types_pb2.ROLE_ROLLOUT),
        event(loaded, 10.5, role=types_pb2.ROLE_INFERENCE),
        event(loaded, 14.5, role=types_pb2.ROLE_INFERENCE),
        event(reported, 40.5),
    ]
    assert iteration_seconds(history) == {0: 30.0}
