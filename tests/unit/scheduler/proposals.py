"""Proposals that a test makes in place of a policy."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.policy import Proposal
from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.values import Placed
from tidegate.types import Role


@dataclass
class ProposalMaker:
    """Proposes home while no iteration is open, and in an iteration what a test sets.

    The actor trains nothing unless `trains` is set, so that the iteration stays open.
    """

    placement: dict[Role, Placed | None] = field(default_factory=dict)
    trains: bool = False

    def __call__(self, state: ClusterState) -> Proposal:
        if state.spec is None or state.iteration is None or state.phase is not Phase.RUNNING:
            return Proposal({} if state.spec is None else dict(state.spec.placement), "home")
        return Proposal({**state.spec.placement, **self.placement}, "as a test proposes", trains=self.trains)
