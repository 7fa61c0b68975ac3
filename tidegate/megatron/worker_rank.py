"""The Megatron worlds that one worker joins and leaves, one after another, on the device of its slot.

The worlds of the actor belong to the elastic library.

Invariants:
- The store uses the socket that the instance bound, so nothing listens on another address. A process serves one store,
  for as long as it lives.
- A world reads no key of an earlier one: its keys begin with its name. [test_standby: joins_another_world]
- A worker leaves its world alone and at once, and keeps no connection of it. [test_standby: leaves_no_descriptor]
"""

from __future__ import annotations

import gc

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from tidegate.codec import decode_layout
from tidegate.elastic.epoch.rendezvous import connect_store, serve_store
from tidegate.megatron import parallel
from tidegate.megatron.gpt_chunks import drop_cached_positions
from tidegate.runtime.slot_place import SlotPlace
from tidegate.runtime.worker import CallRefused, WorkerChannel
from tidegate.v1 import types_pb2
from tidegate.v1 import workers_pb2 as wire


class WorkerWorlds:
    """See the module head. `name` is the present world's, empty in none."""

    def __init__(self, channel: WorkerChannel) -> None:
        self.name = ""
        self._listener = channel.store_listener
        self._served: TCPStore | None = None
        self._num_joined = 0

    def join(
        self, name: str, wired: wire.Rendezvous, layout: types_pb2.Layout, *, place: SlotPlace, seed: int
    ) -> parallel.ParallelRanks:
        """Leave the present world and join this one. Raises ValueError where layout and number of ranks differ.

        The caller has dropped what it built in the present world.
        """
        self.leave()
        self._num_joined += 1
        # A world of one may have the name of an earlier one: another lead does not know it.
        keys = f"world/{name}" if wired.world_size > 1 else f"world/{name}/{self._num_joined}"
        rendezvous = parallel.Rendezvous(
            rank=wired.rank,
            world_size=wired.world_size,
            port=wired.port,
            timeout_s=wired.timeout_s,
            host=wired.host,
            interface=place.interface,
            slot_device=place.slot_device,
            store=PrefixStore(keys, self._store(wired)),
        )
        ranks = parallel.start(rendezvous, decode_layout(layout), device=place.device, seed=seed)
        self.name = name
        return ranks

    def leave(self) -> None:
        if not self.name:
            return
        self.name = ""
        # Connections stay open as long as anything holds their groups: modules, which are in cycles, for instance.
        drop_cached_positions()
        gc.collect()
        parallel.stop()

    def _store(self, wired: wire.Rendezvous) -> Store:
        if wired.rank != 0:
            return connect_store(wired.port, timeout_s=wired.timeout_s, host=wired.host)
        if self._served is None:
            if self._listener is None:
                raise CallRefused("this worker was started without a socket for a store; make another member the first")
            self._served = serve_store(self._listener.detach(), timeout_s=wired.timeout_s, host=wired.host)
        return self._served
