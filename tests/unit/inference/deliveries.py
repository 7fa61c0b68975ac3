"""Deliveries of groups for what holds them."""

from __future__ import annotations

from dataclasses import dataclass

from tidegate.v1 import samples_pb2


@dataclass(frozen=True)
class Delivered:
    """A delivery that is only held."""

    group: samples_pb2.SampleGroup
    num_deliveries: int = 1

    async def ack(self) -> None:
        raise AssertionError("the hand settles nothing")

    async def in_progress(self) -> None:
        raise AssertionError("the hand settles nothing")

    async def nak(self, *, delay_s: float = 0.0) -> None:
        raise AssertionError("the hand settles nothing")

    async def dead_letter(self, reason: str) -> None:
        raise AssertionError("the hand settles nothing")
