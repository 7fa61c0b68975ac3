"""How processes of a node are started, talked to, watched and ended."""

from __future__ import annotations
