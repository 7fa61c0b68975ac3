"""The trained samples, from a job's journal. The code is its own: it shares none with the ledger."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any


def rows(journal: Path) -> list[dict[str, Any]]:
    """One row for each optimizer update, in the order of commits. A line that still grows is left out."""
    return [json.loads(line) for line in journal.read_text().split("\n")[:-1]]


def lineage(journal: Path) -> list[dict[str, Any]]:
    """The updates that lead to the final weights. Each iteration counts in the last incarnation that began it."""
    last: dict[int, int] = {}
    for row in rows(journal):
        incarnation, iteration, _ = map(int, row["update"].split("."))
        last[iteration] = max(last.get(iteration, 0), incarnation)
    return [row for row in rows(journal) if last[int(row["update"].split(".")[1])] == int(row["update"].split(".")[0])]


def trained_draws(journal: Path) -> Counter[tuple[int, int, int]]:
    """How often each (iteration, prompt, draw) is in the lineage."""
    ids = [sample.split(".")[1:] for row in lineage(journal) if row["committed"] for sample in row["samples"]]
    return Counter((int(iteration), int(prompt), int(draw)) for iteration, prompt, draw in ids)


def expected_draws(*, iterations: int, prompts: int, group_size: int) -> Counter[tuple[int, int, int]]:
    """Each draw of the job, once."""
    return Counter(
        (iteration, iteration * prompts + prompt, draw)
        for iteration in range(iterations)
        for prompt in range(prompts)
        for draw in range(group_size)
    )


def without_incarnation(journal: Path) -> list[tuple[str, list[str]]]:
    """The lineage as (update, samples), comparable between runs that restarted and runs that did not."""
    return [
        (row["update"].partition(".")[2], [sample.partition(".")[2] for sample in row["samples"]])
        for row in lineage(journal)
    ]
