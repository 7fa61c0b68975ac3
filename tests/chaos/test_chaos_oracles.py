"""The driver's oracles: each finds a planted fault, and none finds one in a run that is right."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests.chaos.collected import Attempt, Collected, Sighting, Span, Strike
from tests.chaos.oracles import ORACLES, verdicts
from tests.chaos.variants import GROUP_SIZE, Training

TRAINING = Training(iterations=2, prompts=2, minibatches=2)
CHECKSUM = "8b44ad50cea78e3d"
MS = 1_000_000


def _update(incarnation: int, iteration: int, minibatch: int) -> dict[str, Any]:
    prompt = iteration * TRAINING.prompts + minibatch
    samples = [f"{incarnation}.{iteration}.{prompt}.{draw}" for draw in range(GROUP_SIZE)]
    return {"update": f"{incarnation}.{iteration}.{minibatch}", "committed": True, "samples": samples}


def _iteration(number: int) -> dict[str, Any]:
    return {"iteration": number, "num_trained": str(TRAINING.prompts * GROUP_SIZE)}


def _acquired(source: str, gpu: str, counter: int) -> dict[str, Any]:
    return {
        "id": f"{source}/{gpu}/{counter}",
        "source": source,
        "gpus_acquired": {"grants": [{"gpu": gpu, "token": {"term": "1", "counter": str(counter)}}]},
    }


def right() -> Collected:
    """A run that was killed in its second iteration, and resumed."""
    return Collected(
        training=TRAINING,
        reference=CHECKSUM,
        attempts=[
            Attempt((), 0.0, 40.0, -9, None, ""),
            Attempt(("--resume",), 45.0, 85.0, 0, "finished", ""),
        ],
        strikes=[Strike("Kill", 39.0, 39.5, True, "SIGKILL to launcher (1)")],
        journal=[_update(1, 0, 0), _update(1, 0, 1), _update(1, 1, 0), _update(2, 1, 0), _update(2, 1, 1)],
        events=[_acquired("actor@n0", "n0/0", 1), _acquired("rollout@n0", "n0/0", 2)],
        result={
            "summary": {
                "weights_checksum": CHECKSUM,
                "samples_trained": 16,
                "samples_generated": 16,
                "lost": 0,
                "duplicates": 0,
            },
            "job": {"iterations": [_iteration(0), _iteration(1)]},
        },
        sightings=[
            Sighting(0.01, {"n0/0": (1, 1)}, 0.05),
            Sighting(0.06, {"n0/0": (1, 2)}, 2.0),
        ],
        progress_s=[10.0, 20.0, 30.0, 60.0, 80.0],
        spans=[Span("n0/0", "actor", 0, 50 * MS, "training"), Span("n0/0", "rollout", 60 * MS, 90 * MS, "generating")],
    )


def _doubled(found: Collected) -> Collected:
    return replace(found, journal=[*found.journal, _update(2, 1, 1)])


def _lost(found: Collected) -> Collected:
    journal = copy.deepcopy(list(found.journal))
    journal[0]["samples"].pop()
    return replace(found, journal=journal)


def _older_iteration_after_newer(found: Collected) -> Collected:
    return replace(found, journal=[_update(3, 0, 0), _update(3, 0, 1), _update(2, 1, 0), _update(2, 1, 1)])


def _other_weights(found: Collected) -> Collected:
    return replace(found, reference="0" * 16)


def _two_at_work(found: Collected) -> Collected:
    return replace(found, spans=[*found.spans, Span("n0/0", "inference", 0, 80 * MS, "computing_log_probs")])


def _at_work_without_the_token(found: Collected) -> Collected:
    return replace(found, spans=[found.spans[0], Span("n0/0", "actor", 90 * MS, 120 * MS, "training")])


def _token_goes_back(found: Collected) -> Collected:
    return replace(found, sightings=[*found.sightings, Sighting(3.0, {"n0/0": (1, 1)}, 3.0)])


def _token_of_two(found: Collected) -> Collected:
    return replace(found, events=[*found.events, _acquired("inference@n0", "n0/0", 2)])


def _gap(found: Collected) -> Collected:
    attempts = [found.attempts[0], replace(found.attempts[1], end_s=185.0)]
    return replace(found, attempts=attempts)


def _hang(found: Collected) -> Collected:
    return replace(found, attempts=[replace(found.attempts[0], is_hung=True), found.attempts[1]])


def _stop_for_nothing(found: Collected) -> Collected:
    return replace(found, strikes=[replace(found.strikes[0], may_stop=False)])


def _second_resume(found: Collected) -> Collected:
    failed = Attempt(("--resume",), 45.0, 50.0, 1, "failed", "go on with it: --resume")
    return replace(found, attempts=[found.attempts[0], failed, replace(found.attempts[1], begin_s=51.0)])


def _traceback(found: Collected) -> Collected:
    first = replace(found.attempts[0], exit_code=1, end="failed", said="Traceback (most recent call last) ... --resume")
    return replace(found, attempts=[first, found.attempts[1]])


def _wrong_total(found: Collected) -> Collected:
    assert found.result is not None
    result = copy.deepcopy(dict(found.result))
    result["summary"]["samples_trained"] = 15
    return replace(found, result=result)


def _wrong_iteration(found: Collected) -> Collected:
    assert found.result is not None
    return replace(found, result=dict(found.result) | {"job": {"iterations": [_iteration(1)]}})


def _wrong_row(found: Collected) -> Collected:
    assert found.result is not None
    rows = [_iteration(0) | {"num_trained": "7"}, _iteration(1)]
    return replace(found, result=dict(found.result) | {"job": {"iterations": rows}})


def _no_answer(found: Collected) -> Collected:
    return replace(found, strikes=[replace(found.strikes[0], wrong="tidegate scale ended with -11")])


def _process_left(found: Collected) -> Collected:
    return replace(found, attempts=[replace(found.attempts[0], left_behind=("process 7",)), found.attempts[1]])


PLANTED: dict[str, tuple[Callable[[Collected], Collected], set[str], str]] = {
    "a doubled sample": (_doubled, {"samples", "summary"}, "4 samples are trained more than once: 1.3.0"),
    "a lost sample": (_lost, {"samples", "summary"}, "1 samples are lost: 0.0.3"),
    "an iteration on weights of an older one": (_older_iteration_after_newer, {"samples"}, "a later incarnation"),
    "other weights": (_other_weights, {"weights"}, "those of the undisturbed run"),
    "two components at work on a GPU": (_two_at_work, {"owners"}, "n0/0: actor (training) and inference"),
    "work without the token": (
        _at_work_without_the_token,
        {"owners"},
        "n0/0: actor (training) for 30 ms after a token of rollout has passed",
    ),
    "a token that goes back": (_token_goes_back, {"tokens"}, "the gate of n0/0 went back"),
    "a token of two components": (_token_of_two, {"tokens"}, "was granted to rollout and to inference"),
    "a gap": (_gap, {"progress"}, "start 1 stood still for 105 s"),
    "a hang": (_hang, {"progress"}, "start 0 did not end"),
    "a stop for nothing": (_stop_for_nothing, {"resumes"}, "start 0 ended with -9 (None) for no fault"),
    "a second resume": (_second_resume, {"resumes"}, "start 1 ended with 1 (failed) for no fault"),
    "a traceback": (_traceback, {"resumes"}, "start 0 ended with a traceback"),
    "a wrong total": (_wrong_total, {"summary"}, "samples_trained=15, the lineage 16"),
    "a wrong number of an iteration": (
        _wrong_row,
        {"summary"},
        "the summary has 7 trained samples of iteration 0, the lineage 8",
    ),
    "an iteration that the summary lacks": (_wrong_iteration, {"summary"}, "the summary has the iterations [1] of 2"),
    "a command without an answer": (_no_answer, {"answers"}, "ended with -11"),
    "a process that is left": (_process_left, {"leftovers"}, "start 0 left process 7"),
}


def test_a_right_run_is_right_for_every_oracle() -> None:
    assert verdicts(right()) == {name: [] for name in ORACLES}


@pytest.mark.parametrize("planted", PLANTED)
def test_an_oracle_finds(planted: str) -> None:
    damaged, want_oracles, want_words = PLANTED[planted]
    found = {name: faults for name, faults in verdicts(damaged(right())).items() if faults}
    assert found.keys() == want_oracles
    assert any(want_words in fault for faults in found.values() for fault in faults), found


def test_every_oracle_has_a_planted_fault() -> None:
    assert {name for _, names, _ in PLANTED.values() for name in names} == set(ORACLES)


def test_time_under_a_fault_is_no_gap() -> None:
    held = Strike("Pause", 90.0, 150.0, False, "stopped")
    found = replace(_gap(right()), strikes=[*right().strikes, held])
    assert verdicts(found)["progress"] == []


def test_a_refused_start_is_explained_by_damage_between_two_runs_alone() -> None:
    damage = Strike("Damage", 39.0, 40.5, True, "config.json is cut", may_refuse=True)
    found = replace(_second_resume(right()), strikes=[damage])
    assert verdicts(found)["resumes"] == []
    later = replace(found, attempts=[*found.attempts[:2], replace(found.attempts[1], begin_s=52.0, end_s=55.0)])
    assert any("start 2" in fault for fault in verdicts(later)["resumes"])


def test_fewer_iterations_are_right_where_records_were_lost() -> None:
    found = replace(_wrong_iteration(right()), may_lose_records=True)
    assert found.result is not None
    half = dict(found.result["summary"]) | {"samples_trained": 8, "samples_generated": 8}
    assert verdicts(replace(found, result=dict(found.result) | {"summary": half}))["summary"] == []
