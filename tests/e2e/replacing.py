"""A job that replaces groups without spread, on records of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.e2e.jobs import small_job
from tidegate.tasks.tokenizer import build_tokenizer

ITERATIONS, PROMPTS, GROUP_SIZE, MAX_EXTRA = 3, 4, 4, 60
COLOURS = ("red", "green", "blue")
GRADING = '''
def begins(response, answer):
    """Whether the response begins with the answer."""
    return float(response.split()[:1] == [answer])
'''


def replacing_job(folder: Path, **changes: Any) -> dict[str, Any]:
    """A job on two nodes. About half of its groups have no spread."""
    rows = [{"question": f"say {COLOURS[n % 3]}", "answer": COLOURS[n % 3]} for n in range(20)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "grading.py").write_text(GRADING)
    build_tokenizer(["say", *COLOURS]).save(folder / "tokenizer.json")
    raw = small_job(
        "dynamic",
        data={"train": "train.jsonl", "prompt_key": "question", "answer_key": "answer"},
        rewards=[{"name": "function", "path": "grading:begins", "timeout_s": 60}],
        model__tokenizer="tokenizer.json",
        algorithm__iterations=ITERATIONS,
        algorithm__prompts_per_iteration=PROMPTS,
        algorithm__group_size=GROUP_SIZE,
        algorithm__max_new_tokens=6,
        algorithm__filter_zero_std=True,
        algorithm__max_extra_prompts=MAX_EXTRA,
        actor__warm_up={},
        **changes,
    )
    del raw["task"]
    return raw
