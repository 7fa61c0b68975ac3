"""A world of one thread: the other members' payloads are written down beforehand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

from tidegate.elastic.epoch.world import Membership, World

Answers = Callable[[bytes], Mapping[int, bytes]]
"""The other members' payloads, given this member's own."""


class FakeWorld:
    """Member `me` among members that answer as `others` says. `sent` has this member's payloads."""

    def __init__(self, me: int, others: Answers) -> None:
        self.me = me
        self.sent: list[bytes] = []
        self._others = others
        self.membership = Membership(1, tuple(sorted({me, *others(b"")})))

    def gather(self, members: tuple[int, ...], payload: bytes) -> dict[int, bytes]:
        assert members == self.membership.members
        self.sent.append(payload)
        payloads = {self.me: payload, **self._others(payload)}
        return {member: payloads[member] for member in members}

    def as_world(self) -> World:
        return cast("World", self)
