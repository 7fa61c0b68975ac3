"""The reduced gradients and sums of portions whose update is not made yet, on one rank, outside of Megatron's buffers.

- A rank has the gradients of the ranges that its optimizer owns, in fp32, and the sums of all ranks.
- They take memory from the first reshard that carries them until the update, or until they are dropped.
- Where tensors are in shared memory, they are in a file of their own there. Members tell each other its places.

Invariant: decoding gives exactly the sums and places that were encoded, sums that are not finite too.
[test_carried: decoded_sums_and_places_equal]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from pydantic import ConfigDict, TypeAdapter

from tidegate.elastic.model.memory import Arena, Place, SharedArena
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.state import catalogue
from tidegate.elastic.state.location import discard

Gradients = Mapping[str, torch.Tensor]
"""By logical parameter: a flat tensor of the range that the rank's optimizer owns."""


@dataclass(slots=True)
class CarriedGradients:
    """One rank's share, in an arena of its own."""

    arena: Arena
    gradients: Gradients
    sums: tuple[float, ...] = ()
    """The sums over all ranks on which the portions ran. Each rank that has carried gradients has the same."""

    def tensors(self) -> Tensors:
        return {(name, StateKind.GRADIENT): tensor for name, tensor in self.gradients.items()}

    def announcement(self) -> Announcement:
        places = {}
        if isinstance(self.arena, SharedArena):
            places = {name: self.arena.place(tensor) for name, tensor in self.gradients.items()}
        return Announcement(self.sums, places)

    def discard(self) -> None:
        """Give the memory back for good. No member may read it any more."""
        if isinstance(self.arena, SharedArena):
            discard(self.arena)
        else:
            self.arena.release()


@dataclass(frozen=True, slots=True)
class Announcement:
    """What the other members need to know of a rank's carried gradients."""

    sums: tuple[float, ...]
    places: Mapping[str, Place] = field(default_factory=dict)
    """By parameter, in shared memory; empty where gradients are sent."""

    def by_key(self) -> dict[TensorKey, Place]:
        return {(name, StateKind.GRADIENT): place for name, place in self.places.items()}


_WIRED = TypeAdapter(
    tuple[tuple[float, ...], dict[str, catalogue.WiredPlace]], config=ConfigDict(ser_json_inf_nan="constants")
)


def encode(announcement: Announcement) -> bytes:
    places = {name: catalogue.wired_place(place) for name, place in announcement.places.items()}
    return _WIRED.dump_json((announcement.sums, places))


def decode(payload: bytes) -> Announcement:
    """Inverse of `encode`. Raises pydantic's ValidationError, or ValueError, on anything else."""
    sums, places = _WIRED.validate_json(payload)
    return Announcement(sums, {name: catalogue.read_place(place) for name, place in places.items()})
