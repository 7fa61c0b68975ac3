"""The documented place of the ledger. The code is in `tidegate.lr`."""

from __future__ import annotations

from tidegate.lr.progress import LrLedger, LrRules

__all__ = ["LrLedger", "LrRules"]
