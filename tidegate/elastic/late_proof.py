"""Proves a switch beside the first micro-batches in the new layout, while the old layout's tensors are kept.

Order:
1. Each rank of the new layout sums both ends in a thread, while it trains.
2. Before anything else reads or changes the state, the ranks compare their sums and vote. The decision is in the
   epoch's store.
3. After the decision the old tensors are given back; or the state is in the old layout again, as it was.

It needs no memory beyond what a member keeps of its last layout anyway. No rank may leave with the switch: its tensors
would be kept from those who get its GPU. What a switch carries of an open minibatch is compared before the switch,
since the next portion changes it.

Invariants:
- All members of the epoch, dead ones too, have one outcome. [test_late_proof: a_death_before_the_proof]
- Nothing but uncommitted gradients is written before the decision. [test_late_proof: wrong_element]
"""

from __future__ import annotations

from concurrent.futures import Future
from threading import Thread

from tidegate.elastic.check.certificate import certify, decode_all, encode_all, sum_part
from tidegate.elastic.epoch.decision import Outcome, StoreDecision
from tidegate.elastic.epoch.world import World
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.reshard_preparation import CARRIED_KINDS, OnPoint, PreparedReshard
from tidegate.elastic.settings import ElasticSettings

PROOF_POINTS = ("proving", "proved")
"""The points of a proof in their order, for `OnPoint`."""


class LateProof:
    """One member's part in the proof of one switch. Its sums begin at once."""

    def __init__(self, prepared: PreparedReshard, world: World, settings: ElasticSettings, on_point: OnPoint) -> None:
        self.prepared = prepared
        self.digest = ""
        """A digest of the logical state, once the proof holds. Empty on a member outside of the new layout."""
        self._world = world
        self._level = settings.certificate
        self._on_point = on_point
        self._decision = StoreDecision(
            world.store,
            f"{prepared.name}/proof",
            me=world.me,
            participants=prepared.target.mesh.ranks,
            timeout_s=settings.timeout_s,
        )
        self._sums: Future[bytes] = Future()
        self._thread = Thread(target=self._sum, name="late proof", daemon=True)
        self._thread.start()

    def settle(self) -> Outcome:
        """Compare with the other ranks of the new layout, and decide. All members call it; those outside of the layout
        wait for the ranks."""
        if self._world.me in self.prepared.target.mesh.ranks:
            self._on_point("proving")
            try:
                self._compare()
            except Exception as error:  # noqa: BLE001 - the vote tells the others, and the outcome tells this member
                self._decision.vote(f"{type(error).__name__}: {error}")
            else:
                self._decision.vote()
        outcome = self._decision.outcome()
        self.close()
        self._on_point("proved")
        return outcome

    def withdraw(self) -> Outcome:
        """Decide without waiting for anyone: the old layout, unless it is decided."""
        self._decision.vote("it left the epoch before the proof")
        self.close()
        return self._decision.outcome()

    def close(self) -> None:
        """Wait until this member's sums have read the tensors."""
        self._thread.join()

    def _compare(self) -> None:
        source, target = self.prepared.source.mesh, self.prepared.target.mesh
        gathered = self._world.gather(target.ranks, self._sums.result())
        sums = {rank: of for payload in gathered.values() for rank, of in decode_all(payload).items()}
        self.digest = certify(self._level, sums, source, target).digest

    def _sum(self) -> None:
        duty, kinds = self.prepared.duty, frozenset(StateKind) - CARRIED_KINDS
        try:
            tensors = self.prepared.target.tensors()
            found = sum_part(self._level, duty.part, duty.own, tensors, kinds=kinds)
            self._sums.set_result(encode_all({duty.part.rank: found}))
        except BaseException as error:  # noqa: BLE001 - raised where the result is used
            self._sums.set_exception(error)
