"""The node's gate: a library on a folder that says which process may use which GPU now."""

from __future__ import annotations

from tidegate.gate.gate import Gate, GateClosed, GateDamaged, GateHold
from tidegate.ownership.records import GateState, StaleToken

__all__ = ["Gate", "GateClosed", "GateDamaged", "GateHold", "GateState", "StaleToken"]
