"""Submitted jobs for the tests of a cluster."""

from __future__ import annotations

from typing import Any

from tests.e2e.jobs import small_job
from tidegate.cluster.submissions import Submission, Treatment
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.types import JobId, NodeId

NODES = {NodeId("n0"): 8}


def config_of(job: str, nodes: dict[str, int], actor: str, rollout: str, inference: str, **changes: Any) -> JobConfig:
    raw = small_job(job, **changes)
    placement = {"actor": actor, "rollout": rollout, "inference": inference}
    raw["cluster"] = {"nodes": nodes, "component_placement": placement}
    raw["actor"]["layout"] = {"tp": 1, "dp": len(actor.split(","))}
    return parse_config(raw)


def of_size(job: str, num_gpus: int) -> JobConfig:
    """A job on so many GPUs of one node: one for the actor, one for inference, and engines."""
    engines = ",".join(str(index) for index in range(2, num_gpus))
    return config_of(job, {"a": num_gpus}, "0", engines, "1")


def submitted(job: str, num_gpus: int = 4, *, priority: int = 0, at_ms: int = 1000) -> Submission:
    """Its config is one that nobody reads."""
    command = f"tidegate submit {job}.yaml"
    return Submission(JobId(job), "digest", Treatment.FRESH, priority, at_ms, command, (num_gpus,))
