"""Where each component is when no policy decides: where a person put it, else where the config places it. Pure.

GPUs that cannot be had are in it too: `decide.homes` leaves them out.
"""

from __future__ import annotations

from dataclasses import replace

from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.values import JobSpec
from tidegate.types import Role


def home_spec(state: ClusterState, spec: JobSpec) -> JobSpec:
    """The job with each component at its home. GPUs in no home stand by for the actor, except drained ones."""
    placement = {role: state.home(role) or spec.placement[role] for role in Role}
    closed = {*state.manual.drained, *(gpu for placed in placement.values() for gpu in placed.gpus)}
    slots = dict.fromkeys((*spec.slots(Role.ACTOR), *spec.gpus))
    return replace(spec, placement=placement, standby=tuple(gpu for gpu in slots if gpu not in closed))
