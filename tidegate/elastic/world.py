"""The documented place of `World` and `Membership`, which are made in `epoch.world`."""

from __future__ import annotations

from tidegate.elastic.epoch.world import Membership, World

__all__ = ["Membership", "World"]
