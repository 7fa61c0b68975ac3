"""A finished job whose GPUs moved: its folder, with a log of moves and a timeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.unit.cli.configs import small_config
from tidegate.job import JobFolder
from tidegate.launcher.claim import write_private
from tidegate.launcher.outcome import End, Outcome
from tidegate.moves_log import MovesLog
from tidegate.timeline import Window, write_trace
from tidegate.types import GpuId
from tidegate.v1 import control_pb2, types_pb2

START_MS = 1_700_000_000_000
"""The beginning of the attempt, by the clock of the store."""
SITUATION = {
    "sequences": 64,
    "unfinished": 12,
    "groups": 16,
    "groups_ready": 7,
    "minibatches_done": 1,
    "minibatches": 4,
    "rollout_tokens_per_s": 1234.5,
    "gpus": {"rollout": 1, "actor": 1, "inference": 1, "free": 0, "moving": 0},
}


def decision(at_ms: int, iteration: int, *planned: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {
        "kind": "decision",
        "at_ms": START_MS + at_ms,
        "incarnation": 1,
        "iteration": iteration,
        "reason": f"tide: minibatch {iteration} is next",
        "placement": {"actor": 2, "rollout": 0, "inference": 1},
        "trains": True,
        "planned": list(planned),
        **more,
    }


def resize(name: str, *, comes: list[str], leaves: list[str]) -> dict[str, Any]:
    return {
        "transition": f"small/1/{name}",
        "role": "actor",
        "change": "resize",
        "comes": comes,
        "leaves": leaves,
        "layout": "dp2",
        "reason": "the actor grows",
    }


def step(at_ms: int, name: str, **states: list[str]) -> dict[str, Any]:
    return {"kind": "step", "at_ms": START_MS + at_ms, "transition": f"small/1/{name}", "states": states}


def closed(at_ms: int, name: str, outcome: str) -> dict[str, Any]:
    return {"kind": "closed", "at_ms": START_MS + at_ms, "transition": f"small/1/{name}", "outcome": outcome}


def iteration(kind: str, at_ms: int, number: int) -> dict[str, Any]:
    return {"kind": kind, "at_ms": START_MS + at_ms, "incarnation": 1, "iteration": number}


LINES = (
    iteration("opened", 100, 0),
    decision(
        200,
        0,
        resize("t4", comes=["n0/1"], leaves=[]),
        situation=SITUATION,
        forecast_end_ms=START_MS + 4200,
        alternatives=[
            {"what": "the trainer starts in 0 s on 2 GPUs", "end_s": 4.0, "is_chosen": True},
            {"what": "the trainer stays on 1 GPU", "end_s": 6.5, "is_chosen": False},
        ],
    ),
    step(210, "t4", acquiring=["n0/1"]),
    step(600, "t4", committed=["n0/1"]),
    closed(700, "t4", "committed"),
    iteration("reported", 4700, 0),
    iteration("opened", 5000, 1),
    decision(5200, 1, resize("t5", comes=[], leaves=["n0/2"])),
    step(5300, "t5", draining=["n0/2"]),
)


def moved_job(tmp_path: Path) -> JobFolder:
    config = small_config(tmp_path)
    folder = JobFolder.of(config)
    attempt = folder.attempt()
    attempt.logs.mkdir(parents=True)
    attempt.timeline.mkdir()
    write_private(folder.config, config.to_json())
    (attempt.timeline / "actor@n0.jsonl").write_text(
        '{"gpu": "n0/0", "state": "training", "start_ns": 2000000000, "end_ns": 5000000000, "work": {"iteration": 0}}\n'
    )
    window = Window(1_000_000_000, 9_000_000_000)
    gpus = [GpuId("n0/0"), GpuId("n0/1"), GpuId("n0/2")]
    write_trace(attempt.timeline, attempt.trace, gpus=gpus, window=window, start_unix_ns=START_MS * 1_000_000)
    MovesLog(folder.moves).append(LINES)
    status = control_pb2.GetJobResponse(job="small", iteration=2, num_iterations=2, incarnation=1)
    status.components.add(role=types_pb2.ROLE_ACTOR, state="down", lead="actor@n0")
    status.iterations.add(iteration=0, num_generated=4, num_trained=4, metrics={"reward_mean": 0.5})
    Outcome(End.FINISHED, "all done", seed=0, wall_s=8.0, job=status, seconds={0: 4.6}).write(folder.result)
    return folder
