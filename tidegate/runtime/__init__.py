"""Starts, calls, watches and ends the processes of a node."""

from __future__ import annotations
