"""One actor worker's way through the membership epochs.

The first member of an epoch serves its store on the socket that the instance bound for it. Invariants: a process serves
one store, for as long as it lives; an epoch is left before the next one is joined, alone and at once, for nobody waits
for anything of it then but who has failed; in no epoch, nothing is asked of others.
"""

from __future__ import annotations

import torch
from torch._C._distributed_c10d import TCPStore

from tidegate.elastic.epoch.rendezvous import connect_store, serve_store
from tidegate.elastic.epoch.world import Membership, World, peers_needed
from tidegate.runtime.worker import CallRefused, WorkerChannel
from tidegate.v1 import workers_pb2 as wire


class Epochs:
    """See the module."""

    def __init__(self, channel: WorkerChannel) -> None:
        self._listener = channel.store_listener
        self._served: TCPStore | None = None
        self._world: World | None = None
        self._why_none = "it has not joined one"

    @property
    def world(self) -> World:
        """The present epoch's. Raises CallRefused in none."""
        if self._world is None:
            raise CallRefused(f"this worker is in no epoch, for {self._why_none}: send JoinWorld to all first")
        return self._world

    def enter(self, wired: wire.JoinWorld, device: torch.device) -> World:
        """Raises PeerLost when not all come, or whoever is to serve the store is gone; CallRefused for an epoch that is
        not later than the last."""
        seat, membership = wired.rendezvous, Membership(wired.epoch, tuple(wired.members))
        if self._world is not None and wired.epoch <= self._world.membership.epoch:
            raise CallRefused(f"epoch {wired.epoch} is not after {self._world.membership.epoch}, where this worker is")
        self.leave(f"not all came to epoch {wired.epoch}")
        with peers_needed(f"reaching the store of epoch {wired.epoch}"):
            store = self._serve(seat) if seat.rank == 0 else _connected(seat)
        self._world = World.join(
            membership, me=membership.members[seat.rank], store=store, device=device, timeout_s=seat.timeout_s
        )
        return self._world

    def leave(self, why: str) -> None:
        """In no epoch, alone: whoever waits for this worker there hears of it."""
        self._why_none = why
        if self._world is not None:
            self._world.leave(abort=True)
            self._world = None

    def _serve(self, seat: wire.Rendezvous) -> TCPStore:
        if self._served is None:
            if self._listener is None:
                raise CallRefused("this worker was started without a socket for a store; another must be first")
            self._served = serve_store(self._listener.detach(), timeout_s=seat.timeout_s, host=seat.host)
        return self._served


def _connected(seat: wire.Rendezvous) -> TCPStore:
    return connect_store(seat.port, timeout_s=seat.timeout_s, host=seat.host)
