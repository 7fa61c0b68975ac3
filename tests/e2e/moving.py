"""A small job whose policy moves its GPUs, and the states that its transitions reach, by its log of moves."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psutil

from cli.moves import Move, moves_of
from tests.e2e.jobs import RunningJob, calm_job
from tests.e2e.lineage import expected_draws
from tidegate.types import GpuId, Role, node_of

POLICIES: dict[str, dict[str, Any]] = {
    "static": {},
    "collocated": {"scheduler__policy": "static", "scheduler__static__collocated": True},
    "rlinf": {"scheduler__policy": "rlinf", "scheduler__rlinf__use_pre_process_policy": True},
    # An engine that comes still finds something to generate, on a fast machine too.
    "slow": {
        "scheduler__policy": "rlinf",
        "scheduler__rlinf__use_pre_process_policy": True,
        "rollout__max_running_requests": 2,
    },
    # After a minibatch the actor grows by what an engine gave, however fast this machine is.
    "growing": {
        "scheduler__policy": "rlinf",
        "scheduler__rlinf__use_pre_process_policy": False,
        "scheduler__rlinf__use_wait_before_last_iter_policy": False,
    },
    "dynarl": {"scheduler__policy": "dynarl"},
    # Its forecasts are of modelled slots: what it finds worth a move does not depend on this machine's load.
    "tide": {
        "cluster__pace": {"time_scale": 0.003, "tokens_per_token": 1024, "responses_per_response": 8},
        "scheduler__policy": "tide",
        "scheduler__tide__least_gain_s": 0.0,
        "scheduler__tide__lead_s": 0.0,
    },
}
ITERATIONS, PROMPTS, GROUP_SIZE = 3, 16, 4
DRAWS = expected_draws(iterations=ITERATIONS, prompts=PROMPTS, group_size=GROUP_SIZE)


TWO_BY_TWO: dict[str, Any] = {
    "cluster__nodes": {"n0": 2, "n1": 2},
    "cluster__component_placement": {"actor": "0", "rollout": "1-2", "inference": "3"},
    "actor__layout": {},
    "actor__num_logical_shards": 4,
    "actor__micro_batch_size": 4,
    # Several waves of responses: a policy has time to move GPUs while they are made.
    "rollout__max_running_requests": 4,
    "scheduler__decide_every_s": 0.1,
}
"""Two slots on each of two nodes, and an actor whose updates have the same bits on any number of them."""


def moving_job(policy: str, **changes: Any) -> dict[str, Any]:
    """A job whose weights depend on no placement. Dotted keys change it."""
    sizes: dict[str, Any] = {
        "algorithm__iterations": ITERATIONS,
        "algorithm__prompts_per_iteration": PROMPTS,
        "algorithm__group_size": GROUP_SIZE,
        "algorithm__n_minibatches": 4,
    }
    return calm_job("moving", **(TWO_BY_TWO | sizes | POLICIES[policy] | changes))


@dataclass(frozen=True)
class Moment:
    """A state of a GPU that a component's transition moves, or the transition's outcome; `planned`: it was decided.

    `change`: start, stop, suspend, resume or resize. `iteration`: the first iteration that counts.
    """

    role: Role
    change: str
    state: str
    iteration: int = 0

    def __str__(self) -> str:
        return f"the {self.role}'s {self.change} is {self.state}"


async def reached(job: RunningJob, moment: Moment) -> Move:
    """The first transition that is there. AssertionError when the job ends without."""
    found: list[Move] = []

    def holds() -> bool:
        found[:] = [each for each in moves_of(job.folder).moves if _is_at(each, moment)]
        return bool(found)

    await job.until_seen(holds)
    return found[0]


def _is_at(move: Move, moment: Moment) -> bool:
    is_of = (move.role, move.change) == (moment.role, moment.change) and (move.iteration or 0) >= moment.iteration
    seen = {"planned", move.outcome}.union(*(states for _, states in move.steps))
    return is_of and moment.state in seen


def moved(job: RunningJob) -> set[GpuId]:
    """The GPUs that more than one component has acquired."""
    roles: dict[str, set[str]] = {}
    for event in job.events:
        body = event.WhichOneof("body")
        if body in ("gpus_acquired", "layout_committed"):
            for grant in getattr(event, body).grants:
                roles.setdefault(grant.gpu, set()).add(event.source.partition("@")[0])
    return {GpuId(gpu) for gpu, of in roles.items() if len(of) > 1}


Struck = Callable[[RunningJob, Move], psutil.Process]
"""The process to kill in a transition. AssertionError where it does not run yet."""


async def kill(job: RunningJob, moment: Moment, struck: Struck) -> None:
    """Kills the process once the moment is reached and the process runs."""
    move = await reached(job, moment)

    def is_killed() -> bool:
        with suppress(AssertionError, psutil.NoSuchProcess):
            struck(job, move).kill()
            return True
        return False

    await job.until_seen(is_killed)


def its_worker(job: RunningJob, move: Move) -> psutil.Process:
    """The worker, or the standby, of the moving component on the first moving GPU."""
    return job.worker(move.gpus[0], role=move.role)


def its_lead(job: RunningJob, move: Move) -> psutil.Process:
    elected = [each for each in job.events if each.HasField("lead_elected") and each.source.startswith(f"{move.role}@")]
    return job.service(f"services.{move.role}", elected[-1].source.partition("@")[2])


def its_fork_server(job: RunningJob, move: Move) -> psutil.Process:
    return job.service("tidegate.runtime.forkserver", node_of(GpuId(move.gpus[0])))


def service(module: str) -> Struck:
    """A service, or a server, of which the job has one."""
    return lambda job, move: job.service(module)


def worker(role: Role, gpu: str) -> Struck:
    return lambda job, move: job.worker(gpu, role=role)
