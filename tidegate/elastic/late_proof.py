"""Proves a switch beside the first micro-batches in the new layout, while the old layout's tensors are kept.

Order:
1. Each rank of the new layout sums both ends in a thread, while it trains.
2. Before anything else reads or changes the state, the ranks exchange their sums. Each compares them: the switch holds,
   or it does not.
3. They exchange that they have compared. Only then does any of them give its old tensors back.

So where a rank has given its old tensors back, every other one, living or dead, knew before that the switch holds. A
member that loses a peer before step 3 learns in the next epoch whether any member knows it. If none does, all have
their old tensors, and the state is in the old layout again.

It needs no memory beyond what a member keeps of its last layout anyway. No rank may leave with the switch: its tensors
would be kept from those who get its GPU. What a switch carries of an open minibatch is compared before the switch,
since the next portion changes it.

Invariants:
- All members of the next epoch have the state in one layout. [test_late_proof: a_death_before_the_proof]
- Nothing but uncommitted gradients is written before step 3. [test_late_proof: wrong_element]
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from tidegate.elastic.check.certificate import CertificateMismatch, certify, decode_all, encode_all, sum_part
from tidegate.elastic.epoch.world import PeerLost, World
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.reshard_preparation import CARRIED_KINDS, OnPoint, PreparedReshard
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state.location import StateLocation


class LateProof:
    """One member's part in the proof of one switch. Its sums begin at once."""

    def __init__(self, prepared: PreparedReshard, world: World, settings: ElasticSettings, on_point: OnPoint) -> None:
        self.prepared = prepared
        self.holds = False
        """Whether this member has compared all ranks' sums and found them equal."""
        self.digest = ""
        """A digest of the logical state, once the switch holds."""
        self._world = world
        self._level = settings.certificate
        self._on_point = on_point
        self._executor = ThreadPoolExecutor(1, "proof")
        self._sums = self._executor.submit(self._sum)

    @property
    def is_of_rank(self) -> bool:
        """Whether this member is a rank of the new layout. Others have nothing to compare."""
        return self._world.me in self.prepared.target.mesh.ranks

    def settle(self) -> None:
        """Steps 2 and 3, for the ranks of the new layout. Raises PeerLost where the switch does not hold, too."""
        source, target = self.prepared.source.mesh, self.prepared.target.mesh
        self._on_point("proving")
        gathered = self._world.gather(target.ranks, self._sums.result())
        sums = {rank: of for payload in gathered.values() for rank, of in decode_all(payload).items()}
        try:
            self.digest = certify(self._level, sums, source, target).digest
        except CertificateMismatch as error:
            # All ranks find the same. As after a death they go on from the old layout, in the next epoch.
            raise PeerLost(f"the switch to {target.layout} is undone: CertificateMismatch: {error}") from error
        self.holds = True
        self._on_point("compared")
        self._world.barrier(target.ranks)
        self._on_point("proved")

    def close(self) -> None:
        """Wait until this member's sums have read the tensors."""
        self._executor.shutdown()

    def _sum(self) -> bytes:
        duty, kinds = self.prepared.duty, frozenset(StateKind) - CARRIED_KINDS
        sums = sum_part(self._level, duty.part, duty.own, self.prepared.target.tensors(), kinds=kinds)
        return encode_all({duty.part.rank: sums})


def is_known_to_hold(world: World, location: StateLocation | None, proof: LateProof | None) -> bool:
    """Whether any member of a new epoch knows that the switch of `proof` holds. All members call it, also without one.

    `location`: where this member has the state, the new layout while a proof is open. Raises PeerLost.
    """
    is_known = location is not None and (proof is None or proof.holds)
    mine = _name(location).encode() if location is not None and is_known else b""
    known = world.gather(world.membership.members, mine).values()
    return proof is not None and _name(proof.prepared.target).encode() in known


def _name(location: StateLocation) -> str:
    return f"{location.mesh!r} of epoch {location.epoch}"
