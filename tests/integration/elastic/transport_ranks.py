"""The rank processes of the transport tests. The cutter cuts both ends, and bits stand for values.

Every element of every tensor has its own bit pattern (2-byte elements as far as patterns suffice). Targets are filled
with the pattern of padding before, so that a write to a wrong place is seen.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.integration.elastic.world_ranks import join, open_store
from tests.ranks import RankContext, Results
from tests.unit.elastic import cutter
from tidegate.elastic.carry.hybrid import HybridTransport
from tidegate.elastic.carry.peer_to_peer import PeerToPeer
from tidegate.elastic.carry.shared_memory import SharedMemory
from tidegate.elastic.carry.transport import NO_STAND_INS, StandIns, Transport
from tidegate.elastic.epoch.world import PeerLost, World
from tidegate.elastic.model.memory import ArenaReader, Place, SharedArena
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import DistributedOptimizer, StateKind
from tidegate.elastic.plan.plan import Part
from tidegate.elastic.plan.planner import Planner
from tidegate.types import Layout

SHAPE = GptShape(
    num_layers=4,
    hidden_size=64,
    ffn_hidden_size=192,
    num_heads=4,
    num_kv_heads=4,
    head_dim=16,
    vocab_size=2001,
    padded_vocab_size=2016,
    tied_embeddings=True,
    qkv_bias=True,
    itemsize=2,
)
PARAMETERS = gpt_parameters(SHAPE)
_TYPES = {2: (torch.bfloat16, torch.int16), 4: (torch.float32, torch.int32)}

Tensors = dict[TensorKey, torch.Tensor]


@dataclass(frozen=True)
class Switch:
    source: State
    target: State
    hosts: Mapping[int, str]

    @property
    def ranks(self) -> set[int]:
        return {*self.source.mesh.ranks, *self.target.mesh.ranks}

    def part(self, rank: int) -> Part:
        return Planner(PARAMETERS, self.source, self.target, hosts=self.hosts).part(rank)


class Model:
    """The bits of the whole model, and those of one rank."""

    def __init__(self) -> None:
        self._whole = cutter.whole_tensors(PARAMETERS)

    def of(self, state: State, rank: int) -> cutter.Tensors:
        return cutter.world(state, PARAMETERS, self._whole).get(rank, {})


def switch_of(ends: Any, hosts: Mapping[int, str]) -> Switch:
    """Each end is (the layout's sizes, ranks)."""
    source, target = ends
    return Switch(_state(*source), _state(*target), hosts)


def _state(layout: dict[str, int], ranks: list[int]) -> State:
    sizes = Layout(**layout)
    mesh = Mesh(sizes, tuple(ranks), even_chunks(SHAPE.num_layers, pp=sizes.pp, vpp=sizes.vpp))
    return State(mesh, DistributedOptimizer(cutter.shares(mesh, PARAMETERS, per_bucket=5)))


def itemsize_of(kind: StateKind) -> int:
    return SHAPE.itemsize if kind is StateKind.WEIGHT else 4


def placed(arena: SharedArena, bits: cutter.Tensors, *, is_filled: bool) -> Tensors:
    return tensors_of(bits, is_filled=is_filled, empty=arena.empty)


def _empty(size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(size, dtype=dtype)


def tensors_of(
    bits: cutter.Tensors, *, is_filled: bool, empty: Callable[[int, torch.dtype], torch.Tensor] = _empty
) -> Tensors:
    """Tensors of these sizes, with these bits or with the pattern of padding."""
    tensors: Tensors = {}
    for key, values in bits.items():
        dtype, integers = _TYPES[itemsize_of(key[1])]
        tensors[key] = empty(values.size, dtype)
        wrapped = torch.from_numpy(values.astype(f"i{integers.itemsize}"))
        tensors[key].view(integers).copy_(wrapped if is_filled else torch.full_like(wrapped, cutter.PADDING))
    return tensors


def assert_bits(tensors: Tensors, want: cutter.Tensors) -> None:
    for key, values in want.items():
        _, integers = _TYPES[itemsize_of(key[1])]
        got = tensors[key].view(integers).numpy()
        np.testing.assert_array_equal(got, values.astype(got.dtype), err_msg=str(key))


def encoded(places: Mapping[TensorKey, Place]) -> bytes:
    return "\n".join(
        f"{name} {kind} {place.offset_bytes} {place.num_elements} {place.path}"
        for (name, kind), place in places.items()
    ).encode()


def decoded(payload: bytes) -> dict[TensorKey, Place]:
    places = {}
    for line in payload.decode().splitlines():
        name, kind, offset, size, path = line.split(" ", 4)
        dtype, _ = _TYPES[itemsize_of(StateKind(kind))]
        places[name, StateKind(kind)] = Place(path, int(offset), int(size), dtype)
    return places


class Host:
    """This rank's arenas and transports in one world."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.everyone = world.membership.members
        self.reader = ArenaReader()
        self._num_arenas = 0

    def arena(self) -> SharedArena:
        self._num_arenas += 1
        return SharedArena(self.folder / f"{self.world.me}-{self._num_arenas}")

    def places(self, arena: SharedArena, tensors: Tensors) -> dict[int, dict[TensorKey, Place]]:
        mine = {key: arena.place(tensor) for key, tensor in tensors.items()}
        return {rank: decoded(places) for rank, places in self.world.gather(self.everyone, encoded(mine)).items()}

    def transport(self, kind: str, switch: Switch, places: Mapping[int, Mapping[TensorKey, Place]]) -> Transport:
        shared = SharedMemory(places, self.reader)
        peers = PeerToPeer(
            self.world.group(self.everyone),
            self.everyone,
            hosts=switch.hosts,
            memory_bytes=1 << 14 if kind == "small batches" else 1 << 21,
        )
        if kind == "shared memory":
            return shared
        return HybridTransport(shared, peers, switch.hosts) if kind == "hybrid" else peers


def every_switch(
    context: RankContext, *, switches: list[Any], transports: list[str], hosts: list[str], folder: str
) -> Results:
    """Do each switch over each transport. Returns the bytes that this rank received with one of them."""
    world = join(context, open_store(context), epoch=1, members=tuple(range(context.world_size)))
    host, model = Host(world, Path(folder)), Model()
    received_bytes = 0
    for ends in switches:
        switch = switch_of(ends, dict(enumerate(hosts)))
        held, want = model.of(switch.source, world.me), model.of(switch.target, world.me)
        arena = host.arena()
        sources = placed(arena, held, is_filled=True)
        places = host.places(arena, sources)
        part = switch.part(world.me) if world.me in switch.ranks else None
        for kind in transports:
            targets = placed(host.arena(), want, is_filled=False)
            world.barrier(host.everyone)
            if part is not None:
                host.transport(kind, switch, places).run(part, sources, targets)
            assert_bits(targets, want)
            assert_bits(sources, held)
        received_bytes += part.received_bytes if part is not None else 0
    world.leave()
    return {"received_bytes": np.array(received_bytes)}


def a_rank_is_dead(context: RankContext, *, switch: Any, folder: str) -> Results:
    """A rank beyond the world's held a part of the source. Rank 0 has its tensors, in an arena that it left."""
    world = join(context, open_store(context), epoch=1, members=tuple(range(context.world_size)))
    host, model, dead = Host(world, Path(folder)), Model(), context.world_size
    resize = switch_of(switch, {rank: "near" if rank in (0, 1, dead) else "far" for rank in range(dead + 1)})
    arena, leftover = host.arena(), host.arena()
    sources = placed(arena, model.of(resize.source, world.me), is_filled=True)
    lost = placed(leftover, model.of(resize.source, dead), is_filled=True)
    places = host.places(arena, sources) | {dead: host.places(leftover, lost)[0]}
    stand_ins: StandIns = {dead: (resize.part(dead), lost)} if world.me == 0 else NO_STAND_INS
    peers = PeerToPeer(world.group(host.everyone), host.everyone, served_by={dead: 0}, memory_bytes=1 << 16)
    hybrid = HybridTransport(SharedMemory(places, host.reader), peers, resize.hosts)
    want = model.of(resize.target, world.me)
    carriers: tuple[Transport, ...] = (peers, hybrid)
    for carrier in carriers:
        targets = placed(host.arena(), want, is_filled=False)
        carrier.run(resize.part(world.me), sources, targets, stand_ins=stand_ins)
        assert_bits(targets, want)
    world.leave()
    return {"sent_bytes_of_the_dead_rank": np.array(resize.part(dead).sent_bytes)}


def a_sender_dies(context: RankContext, *, switch: Any, folder: str) -> Results:
    """Rank 0 is killed before it sends anything. The others return whether they lost a peer."""
    world = join(context, open_store(context), epoch=1, members=tuple(range(context.world_size)))
    host, model, resize = Host(world, Path(folder)), Model(), switch_of(switch, {})
    sources = placed(host.arena(), model.of(resize.source, world.me), is_filled=True)
    targets = placed(host.arena(), model.of(resize.target, world.me), is_filled=False)
    world.barrier(host.everyone)
    if world.me == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        PeerToPeer(world.group(host.everyone), host.everyone).run(resize.part(world.me), sources, targets)
    except PeerLost:
        assert_bits(sources, model.of(resize.source, world.me))
        world.leave(abort=True)
        return {"is_lost": np.array(True)}
    return {"is_lost": np.array(False)}
