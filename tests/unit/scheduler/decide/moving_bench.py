"""A job whose GPUs a test moves: its first iteration stays open, and proposals replace those of a policy."""

from __future__ import annotations

from services.scheduler.state.cluster_state import ClusterState, Phase
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.drive import Drive, booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import gpu, spec
from tests.unit.scheduler.proposals import ProposalMaker
from tidegate.types import GpuId, Layout, Role

ACTOR = (gpu("n0", 0), gpu("n1", 0))
ROLLOUT = (gpu("n0", 1), gpu("n1", 1), gpu("n1", 3))
INFERENCE = (gpu("n0", 2), gpu("n1", 2))


def engines(*gpus: GpuId) -> Placed:
    return Placed(gpus, Layout(dp=len(gpus)))


HOME = spec().placement


def running(job: JobSpec | None = None) -> tuple[Drive, ProposalMaker]:
    """A job whose first iteration is open, with all events delivered, and training on hold."""
    proposed = ProposalMaker()
    drive = booted(FakeCluster(job or spec()))
    drive.propose = proposed
    drive.run_until(lambda state: state.iteration is not None and len(state.iteration.opened) == len(Role))
    settle(drive)
    return drive, proposed


def deliver_all(drive: Drive) -> None:
    while drive.cluster.outbox:
        drive.deliver(drive.cluster.outbox.pop(0))


def settle(drive: Drive) -> None:
    """Carry out the proposal as far as possible without a wait."""
    drive.decide()
    deliver_all(drive)
    while any(lead is not None and (lead.resize or lead.suspension) for lead in drive.cluster.leads.values()):
        assert drive.cluster.work()
        deliver_all(drive)


def propose(drive: Drive, proposed: ProposalMaker, **placement: Placed | None) -> ClusterState:
    proposed.placement = {Role(role): placed for role, placed in placement.items()}
    settle(drive)
    return drive.state


def gpus_of(state: ClusterState, role: Role) -> tuple[GpuId, ...]:
    return tuple(grant.gpu for grant in state.components[role].grants)


def finishes(drive: Drive, proposed: ProposalMaker) -> None:
    """The job ends as if nothing had moved: no sample is lost, the incarnation is the first, all GPUs are free."""
    proposed.placement, proposed.trains = {}, True
    drive.decide()
    state = drive.run()
    assert (state.phase, state.incarnation, state.message) == (Phase.FINISHED, 1, "all 2 iterations are done")
    assert not any(summary.num_lost or summary.num_duplicates for summary in state.summaries)
    assert not any(gate.is_held for gate in drive.cluster.gates.values())


OPEN_CHANGES: dict[str, dict[str, Placed | None]] = {
    "fewer engines": {"rollout": engines(ROLLOUT[0])},
    "no engines": {"rollout": None},
    "no inference": {"inference": None},
    "a suspended actor": {"actor": None},
    "a smaller actor": {"actor": Placed(ACTOR[:1], Layout())},
}


def ready(drive: Drive, proposed: ProposalMaker, **placement: Placed | None) -> None:
    """The lead has its command, and has done nothing yet."""
    proposed.placement = {Role(role): placed for role, placed in placement.items()}
    drive.decide()
    deliver_all(drive)
    assert drive.state.transitions
