"""How long the jobs of these tests train, and on what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.chaos.collected import Collected
from tests.chaos.oracles import owners, tokens
from tests.chaos.record import EventRows
from tests.chaos.run import spans_of
from tests.chaos.variants import Training
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
    assert_each_gpu_had_one_owner(folder)


def assert_each_gpu_had_one_owner(folder: Path) -> None:
    """No token was granted to two components, and no two of them worked on a GPU at a time."""
    events = EventRows(folder / "events.jsonl")
    events.read()
    found = Collected(
        training=Training(0, 0, 0),
        reference=None,
        attempts=(),
        strikes=(),
        journal=(),
        events=events.rows,
        result=None,
        sightings=(),
        progress_s=(),
        spans=list(spans_of(folder)),
    )
    assert found.spans
    assert any("gpus_acquired" in row for row in found.events)
    assert [*tokens(found), *owners(found)] == []


def summary_of(folder: Path) -> dict[str, Any]:
    """What a job that has ended wrote of itself."""
    return dict(parse_json((folder / "result.json").read_bytes())["summary"])
