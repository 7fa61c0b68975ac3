"""When the output of a run says why its job has no GPUs."""

from __future__ import annotations

from tidegate.launcher.gpu_wait import LONG_S, GpuWait
from tidegate.v1 import control_pb2, types_pb2


def status(reason: str, *, num_gpus: int = 0, phase: str = "starting") -> control_pb2.GetJobResponse:
    grants = [types_pb2.Grant(gpu=f"n0/{index}") for index in range(num_gpus)]
    actor = control_pb2.ComponentStatus(role=types_pb2.ROLE_ACTOR, grants=grants)
    return control_pb2.GetJobResponse(job="small", phase=phase, last_reason=reason, components=[actor])


def lacking(*roles: types_pb2.Role.ValueType) -> control_pb2.GetJobResponse:
    """A report of a job whose actor and rollout have GPUs, but for these."""
    report = control_pb2.GetJobResponse(job="small", phase="running", last_reason="held")
    for role in (types_pb2.ROLE_ACTOR, types_pb2.ROLE_ROLLOUT):
        report.components.add(role=role, grants=[] if role in roles else [types_pb2.Grant(gpu="n0/0")])
    return report


def said(*reports: tuple[float, control_pb2.GetJobResponse]) -> list[str | None]:
    wait = GpuWait()
    return [wait.message(report, now_s=now_s) for now_s, report in reports]


def test_a_short_wait_is_not_said() -> None:
    assert said((0.0, status("a")), (LONG_S - 0.1, status("a")), (LONG_S, status("b", num_gpus=1))) == [None] * 3


def test_a_long_wait_is_said_with_the_schedulers_reason() -> None:
    held = "0 of 1 GPUs of the actor are free (n0/0 is owned by job big)"
    assert said((5.0, status(held)), (5.0 + LONG_S, status(held))) == [None, f"no GPUs for actor since 10 s: {held}"]


def test_a_reason_is_said_once_and_again_when_it_has_changed() -> None:
    reports = [(place * LONG_S, status(reason)) for place, reason in enumerate("aaabb")]
    assert [text and text[-1] for text in said(*reports)] == [None, "a", None, "b", None]


def test_a_wait_begins_anew_after_the_component_had_gpus() -> None:
    reports = [
        (0.0, status("a")),
        (LONG_S, status("a", num_gpus=1)),
        (LONG_S + 1, status("a")),
        (2 * LONG_S, status("a")),
    ]
    assert said(*reports) == [None] * 4


def test_a_job_that_ends_gives_its_gpus_back_and_waits_for_none() -> None:
    assert said((0.0, status("a")), (LONG_S, status("a", phase="stopping"))) == [None, None]


def test_a_second_component_waits_from_its_own_start() -> None:
    actor, rollout = types_pb2.ROLE_ACTOR, types_pb2.ROLE_ROLLOUT
    reports = [(0.0, lacking(actor)), (8.0, lacking(actor, rollout)), (LONG_S, lacking(rollout))]
    assert said(*reports, (8.0 + LONG_S, lacking(rollout)))[2:] == [None, "no GPUs for rollout since 10 s: held"]
    both = [(0.0, lacking(actor)), (5.0, lacking(actor, rollout)), (LONG_S, lacking(actor, rollout))]
    assert said(*both, (2 * LONG_S, lacking(actor, rollout)))[2:] == [
        "no GPUs for actor since 10 s: held",
        "no GPUs for actor since 20 s, rollout since 15 s: held",
    ]


def test_a_component_whose_gpus_a_policy_gave_to_others_waits_from_when_it_wants_them_back() -> None:
    lent, wanted = lacking(types_pb2.ROLE_ROLLOUT), lacking(types_pb2.ROLE_ROLLOUT)
    lent.components[1].state, wanted.components[1].state = "lent", "down"
    reports = [(0.0, lent), (2 * LONG_S, lent), (2 * LONG_S + 1, wanted), (3 * LONG_S, wanted)]
    assert said(*reports) == [None] * 4
    assert said(*reports, (3 * LONG_S + 1, wanted))[-1] == "no GPUs for rollout since 10 s: held"
