"""The documented import path of `World` and `Membership`. Their code is in `epoch.world`."""

from __future__ import annotations

from tidegate.elastic.epoch.world import Membership, World

__all__ = ["Membership", "World"]
