"""The documented place of the ledger's schedule. The code is in `tidegate.lr`."""

from __future__ import annotations

from tidegate.lr.schedule import Decay, LrSchedule

__all__ = ["Decay", "LrSchedule"]
