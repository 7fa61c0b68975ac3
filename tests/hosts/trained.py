"""How long the jobs of these tests train, and on what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.e2e.lineage import expected_draws, trained_draws
from tidegate.json_text import parse_json

ITERATIONS = 12


def assert_all_was_trained_once(
    folder: Path, summary: dict[str, Any], want_checksum: str, *, iterations: int = ITERATIONS
) -> None:
    draws = expected_draws(iterations=iterations, prompts=8, group_size=4)
    assert trained_draws(folder / "journal.jsonl") == draws
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, draws.total())
    assert summary["weights_checksum"] == want_checksum


def summary_of(folder: Path) -> dict[str, Any]:
    """What a job that has ended wrote of itself."""
    return dict(parse_json((folder / "result.json").read_bytes())["summary"])
