"""The membership epochs that one actor worker joins and leaves, one after another.

The first member of an epoch serves its store on the socket that the instance bound for it. A process serves one store,
for as long as it lives.

Invariants:
- A worker leaves its epoch before it joins the next. It leaves alone and at once: by then, only failed members can
  still wait for it. [test_worker: and_train_in_the_next_epoch]
- A worker in no epoch sends nothing to its peers. [test_worker: members_that_lost_a_peer]
"""

from __future__ import annotations

from torch._C._distributed_c10d import TCPStore

from tidegate.elastic.epoch.rendezvous import connect_store, serve_store
from tidegate.elastic.epoch.world import Membership, World, peers_needed
from tidegate.runtime.slot_place import SlotPlace
from tidegate.runtime.worker import CallRefused, WorkerChannel
from tidegate.v1 import workers_pb2 as wire


class Epochs:
    def __init__(self, channel: WorkerChannel) -> None:
        self._listener = channel.store_listener
        self._served: TCPStore | None = None
        self._world: World | None = None
        self._reason_for_none = "it has not joined one"

    @property
    def world(self) -> World:
        """The world of the present epoch. Raises CallRefused where there is no epoch."""
        if self._world is None:
            raise CallRefused(f"this worker is in no epoch ({self._reason_for_none}): send JoinWorld to all first")
        return self._world

    def enter(self, wired: wire.JoinWorld, place: SlotPlace) -> World:
        """Leave the present epoch and join this one, with tensors on the place's device.

        Raises PeerLost when a member does not come or nobody serves the store. Raises CallRefused for an epoch that is
        not later than the present one."""
        seat, membership = wired.rendezvous, Membership(wired.epoch, tuple(wired.members))
        if self._world is not None and wired.epoch <= self._world.membership.epoch:
            raise CallRefused(
                f"epoch {wired.epoch} does not follow {self._world.membership.epoch}, this worker's present epoch"
            )
        self.leave(f"not all members came to epoch {wired.epoch}")
        with peers_needed(f"reaching the store of epoch {wired.epoch}"):
            store = self._serve(seat) if seat.rank == 0 else _connected(seat)
        self._world = World.join(
            membership,
            me=membership.members[seat.rank],
            store=store,
            device=place.device,
            slot_device=place.slot_device,
            interface=place.interface,
            timeout_s=seat.timeout_s,
        )
        return self._world

    def leave(self, why: str) -> None:
        """Leave the epoch without waiting for the others. A peer that waits for this worker sees an error."""
        self._reason_for_none = why
        if self._world is not None:
            self._world.leave(abort=True)
            self._world = None

    def _serve(self, seat: wire.Rendezvous) -> TCPStore:
        if self._served is None:
            if self._listener is None:
                raise CallRefused("this worker was started without a socket for a store; make another member the first")
            self._served = serve_store(self._listener.detach(), timeout_s=seat.timeout_s, host=seat.host)
        return self._served


def _connected(seat: wire.Rendezvous) -> TCPStore:
    return connect_store(seat.port, timeout_s=seat.timeout_s, host=seat.host)
