"""The metrics of a job's events, their iterations, and the rows after a restart."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.tracking.job_events import ACTOR, GRANTS, INFERENCE, ROLLOUT, begun, evaluation, event, report, rows
from tidegate.tracking.metrics import Row
from tidegate.v1 import events_pb2, types_pb2


def test_the_actors_report_becomes_a_row_with_its_metrics_samples_rates_and_gpus() -> None:
    got = rows(*begun(), event(6.0, ACTOR, report(num_duplicates_dropped=2)))
    assert got == [
        Row(
            step=0,
            incarnation=1,
            unix_s=106.0,
            values={
                "seconds/train": 5.0,
                "iteration/reward_mean": 0.5,
                "iteration/loss": 0.01,
                "iteration/response_tokens_mean": 20.0,
                "samples/trained": 12,
                "samples/filtered": 4,
                "samples/discarded": 0,
                "samples/duplicates_dropped": 2,
                "seconds/iteration": 5.0,
                "throughput/samples_per_s": 16 / 5,
                "throughput/response_tokens_per_s": 16 * 20 / 5,
                "gpus/actor": 4,
                "gpus/rollout": 3,
                "resizes/count": 0,
                "resizes/seconds": 0.0,
                "resizes/moved_bytes": 0,
            },
        )
    ]


def test_the_stretches_of_an_iteration_follow_one_another_and_add_up_to_its_seconds() -> None:
    got = rows(
        *begun(),
        event(4.0, ROLLOUT, events_pb2.IterationReported()),
        event(4.5, INFERENCE, events_pb2.IterationReported()),
        event(6.0, ACTOR, report()),
        event(6.5, ACTOR, events_pb2.CheckpointSaved()),
        event(6.75, ACTOR, events_pb2.WeightsPublished()),
        event(7.0, INFERENCE, events_pb2.WeightsLoaded()),
        event(8.0, ROLLOUT, events_pb2.WeightsLoaded()),
        event(10.0, ROLLOUT, events_pb2.IterationReported(), iteration=1),
        event(13.0, ACTOR, report(), iteration=1),
    )
    seconds = {
        (row.step, name.partition("/")[2]): value
        for row in got
        for name, value in row.values.items()
        if name.startswith("seconds/")
    }
    first = {"generate": 3.0, "train": 2.0, "iteration": 5.0, "save": 0.5, "publish": 0.25, "load": 1.25}
    want = {(0, name): value for name, value in first.items()}
    assert seconds == want | {(1, "generate"): 2.0, (1, "train"): 3.0, (1, "iteration"): 7.0}
    assert sum(first[name] for name in ("save", "publish", "load")) + 2.0 + 3.0 == 7.0


def test_resizes_are_in_the_row_of_the_next_report_once() -> None:
    reshard = types_pb2.ReshardReport(moved_bytes=1000, seconds={"plan": 0.25, "move": 0.5})
    smaller = events_pb2.LayoutCommitted(grants=GRANTS[:2], reshard=reshard)
    got = rows(
        *begun(),
        event(2.0, ACTOR, smaller),
        event(3.0, ACTOR, smaller),
        event(4.0, ACTOR, report()),
        event(5.0, ACTOR, report(), iteration=1),
    )
    names = ("resizes/count", "resizes/seconds", "resizes/moved_bytes", "gpus/actor")
    assert [[row.values[name] for name in names] for row in got] == [[2, 1.5, 2000, 2], [0, 0.0, 0, 2]]


def test_an_incarnation_begins_anew_and_a_late_event_of_an_older_incarnation_gives_no_row() -> None:
    got = rows(
        *begun(),
        event(6.0, ACTOR, report()),
        *begun(incarnation=2, at_s=20.0),
        event(25.0, ACTOR, report(), iteration=1),
        event(26.0, ACTOR, report(), incarnation=2),
    )
    assert [(row.step, row.incarnation, row.values["seconds/iteration"]) for row in got] == [(0, 1, 5.0), (0, 2, 5.0)]


def test_a_report_that_comes_twice_gives_one_row() -> None:
    assert len(rows(*begun(), event(6.0, ACTOR, report()), event(6.5, ACTOR, report()))) == 1


def test_an_evaluation_is_a_row_of_the_iteration_that_samples_from_its_version_once() -> None:
    figures = {"reward_mean": 0.5, "countdown/mean": 0.25, "countdown/pass@4": 0.75, "response_tokens_mean": 9.0}
    got = rows(
        *begun(), *(evaluation(at_s, version, figures) for at_s, version in ((4.0, 0), (9.0, 2), (9.5, 2), (12.0, 3)))
    )
    want = {f"evaluation/{name}": value for name, value in figures.items()}
    assert [(row.step, row.unix_s, row.values) for row in got] == [(0, 104, want), (2, 109, want), (3, 112, want)]


def test_a_restart_repeats_the_evaluation_of_the_weights_it_begins_with_and_later_ones_follow_as_they_come() -> None:
    got = rows(
        *begun(),
        *(evaluation(4.0 + version, version, {"reward_mean": version / 10}) for version in range(4)),
        *begun(incarnation=2, at_s=20.0),
        event(24.0, ROLLOUT, events_pb2.IterationReported(), iteration=2, incarnation=2),
        evaluation(30.0, 3, {"reward_mean": 0.3}, incarnation=2),
    )
    assert [(row.step, row.incarnation, row.values.get("evaluation/reward_mean")) for row in got] == [
        *((version, 1, version / 10) for version in range(4)),
        (2, 2, 0.2),
        (3, 2, 0.3),
    ]
    assert got[4].values["seconds/generate"] == 3.0


def test_metrics_of_other_components_have_the_components_name() -> None:
    got = rows(*begun(), event(4.0, ROLLOUT, events_pb2.IterationReported(metrics={"tokens_per_s": 9.0})))
    assert got[0].values == {"seconds/generate": 3.0, "rollout/tokens_per_s": 9.0}


@pytest.mark.parametrize(
    "body", [events_pb2.Progress(phase="train", num_done=1), events_pb2.Backlog(), events_pb2.CommandAnswered()]
)
def test_most_events_give_no_row(body: Any) -> None:
    assert rows(event(1.0, ACTOR, body)) == []
