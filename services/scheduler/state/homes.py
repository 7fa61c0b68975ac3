"""Where each component is when no policy decides: where a person put it, else where the config places it. Pure.

GPUs that cannot be had are in it too: `decide.homes` leaves them out.

Invariant: no GPU is in two homes. A split comes into force whole. [test_manual_moves: homes_share_no_gpu]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.values import JobSpec, Placed
from tidegate.types import Role

DONORS = (Role.ROLLOUT, Role.INFERENCE)
"""The components that give up replicas while they work, for others too. The actor gives up GPUs only when it resizes.
"""


def home_spec(state: ClusterState, spec: JobSpec) -> JobSpec:
    """The job with each component at its home. GPUs in no home stand by for the actor, except drained ones."""
    placement = {role: state.home(role) or spec.placement[role] for role in Role}
    closed = {*state.manual.drained, *(gpu for placed in placement.values() for gpu in placed.gpus)}
    slots = dict.fromkeys((*spec.slots(Role.ACTOR), *spec.gpus))
    return replace(spec, placement=placement, standby=tuple(gpu for gpu in slots if gpu not in closed))


def split_in_force(state: ClusterState, split: Mapping[Role, Placed]) -> ClusterState:
    """The state in which every component is at home where the split puts it. A later split that is asked for stays."""
    manual, iteration = state.manual, state.iteration
    asked = {} if manual.split == split else manual.split
    homes = {role: split[role] for role in DONORS}
    held = (state.incarnation, iteration.plan.iteration) if iteration is not None else None
    return replace(state, moved=split[Role.ACTOR], manual=replace(manual, split=asked, homes=homes, held=held))
