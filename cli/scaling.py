"""`tidegate scale`: asks a live job for another number of GPUs of its components, or another layout of its actor.

Invariant: a request that no job like this could grant is bad usage, and its message names what works.
[test_scaling: an_impossible_request_is_bad_usage]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cli.manual_moves import Manner, asked, control_of_job
from tidegate.codec import encode_layout
from tidegate.types import Layout, Role
from tidegate.v1 import control_pb2


@dataclass(frozen=True, slots=True)
class Wish:
    """`sizes`: numbers of GPUs by role, in copies like the present ones. `layout`: the actor's, in place of its size.
    `gpus`: the actor's, in rank order."""

    sizes: Mapping[Role, int] = field(default_factory=dict)
    layout: Layout | None = None
    gpus: tuple[str, ...] = ()


async def scale(job: str, wish: Wish, output_dir: Path, manner: Manner) -> int:
    """BadUsage: the components can never be so. NotMoved: they did not get there."""
    request = control_pb2.ScaleJobRequest(
        job=job,
        layout=encode_layout(wish.layout) if wish.layout else None,
        gpus=wish.gpus,
        dry_run=manner.is_dry,
        actor=wish.sizes.get(Role.ACTOR),
        rollout=wish.sizes.get(Role.ROLLOUT),
        inference=wish.sizes.get(Role.INFERENCE),
    )
    async with control_of_job(output_dir, job) as (folder, control):
        move = (await control.ScaleJob(request)).move
    return await asked("scale", folder, move, manner)
