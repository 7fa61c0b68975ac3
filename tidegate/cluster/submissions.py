"""The record of a job that was submitted to a cluster, and its JSON. Pure.

    queued -> placed -> running -> ended        and back to queued where a start was interrupted

`config` names the text of the config in the store: records are read each second, and configs are large. It stays as it
was submitted, with GPUs counted from 0. `gpus` are those of the cluster that the job has, in the order of those of the
config (`tidegate.cluster.placement`).

Invariants:
- A job has GPUs while it is placed or running, and only then. [test_submissions: has_gpus_only_while]
- Decoding an encoded record gives an equal one; another text is refused. [test_submissions: survives_its_json]
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from tidegate.json_text import parse_json, typed, whole_number
from tidegate.types import GpuId, JobId, job_id


class SubmissionState(StrEnum):
    QUEUED = "queued"
    PLACED = "placed"
    """It has GPUs, and the agent is asked to start it."""
    RUNNING = "running"
    """The agent has told that this start of it runs."""
    ENDED = "ended"


class Treatment(StrEnum):
    """How the first start treats a folder that is there already."""

    FRESH = "fresh"
    RESUME = "resume"
    FORCE = "force"


@dataclass(frozen=True, slots=True)
class Submission:
    """`starts` counts how often it was placed, under earlier submissions too, and names the present start.
    `interruptions`: how many of its starts in a row were interrupted while their agent lived. `end` says how it ended:
    one of a run's ends. `is_cleared`: it has nothing in NATS and Redis any more. `priority`: higher ones first.
    `leaves`: why its start is interrupted, so that it goes on elsewhere; empty: it is not."""

    job: JobId
    config: str
    treatment: Treatment
    priority: int
    submitted_unix_ms: int
    command: str
    """The words that submitted it, without flags and without the passwords of URLs. For messages."""
    needs: tuple[int, ...]
    """Its GPUs on each node of its config. Those of a node stay together."""
    state: SubmissionState = SubmissionState.QUEUED
    gpus: tuple[GpuId, ...] = ()
    starts: int = 0
    interruptions: int = 0
    is_cancelled: bool = False
    is_cleared: bool = False
    end: str = ""
    message: str = ""
    leaves: str = ""
    node_bytes: int = 0
    """The host memory that it needs on each of its nodes."""
    reason: str = ""
    """Why a person cancelled it, where he said so."""
    resumes_unix_ms: int = 0
    """While it waits after an interruption: when it goes on, by the store's clock."""
    iteration: int = 0
    """Where its last interruption left it."""

    def __post_init__(self) -> None:
        if bool(self.gpus) != self.is_placed:
            raise ValueError(f"job {self.job} is {self.state} and has {len(self.gpus)} GPUs: only a placed one has any")

    @property
    def is_placed(self) -> bool:
        return self.state in (SubmissionState.PLACED, SubmissionState.RUNNING)

    @property
    def num_gpus(self) -> int:
        return sum(self.needs)

    def with_reason(self, what: str) -> str:
        return f"{what}: {self.reason}" if self.reason else what

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def parse(cls, text: bytes) -> Submission:
        """ValueError."""
        fields = typed(dict, parse_json(text), "a submission")
        try:
            return cls._of(fields)
        except KeyError as error:
            raise ValueError(f"a submission has no {error}") from error

    @classmethod
    def _of(cls, fields: dict[str, Any]) -> Submission:
        texts = {name: typed(str, fields[name], name) for name in ("config", "command", "end", "message")}
        gpus = tuple(GpuId(typed(str, gpu, "a GPU")) for gpu in typed(list, fields["gpus"], "gpus"))
        needs = tuple(whole_number(count, "a count of needs") for count in typed(list, fields["needs"], "needs"))
        return cls(
            job=job_id(typed(str, fields["job"], "job")),
            treatment=Treatment(fields["treatment"]),
            priority=typed(int, fields["priority"], "priority"),
            submitted_unix_ms=whole_number(fields["submitted_unix_ms"], "submitted_unix_ms"),
            state=SubmissionState(fields["state"]),
            gpus=gpus,
            needs=needs,
            starts=whole_number(fields["starts"], "starts"),
            interruptions=whole_number(fields["interruptions"], "interruptions"),
            is_cancelled=typed(bool, fields["is_cancelled"], "is_cancelled"),
            is_cleared=typed(bool, fields["is_cleared"], "is_cleared"),
            # Records of earlier releases have none.
            leaves=typed(str, fields.get("leaves", ""), "leaves"),
            node_bytes=whole_number(fields.get("node_bytes", 0), "node_bytes"),
            reason=typed(str, fields.get("reason", ""), "reason"),
            resumes_unix_ms=whole_number(fields.get("resumes_unix_ms", 0), "resumes_unix_ms"),
            iteration=whole_number(fields.get("iteration", 0), "iteration"),
            **texts,
        )
