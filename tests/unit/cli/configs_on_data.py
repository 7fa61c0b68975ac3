"""The small config, changed to one on data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.unit.cli.configs import small
from tidegate.tasks.tokenizer import build_tokenizer

RIGHT = {"prompt": "two and two", "answer": "four"}


def on_data(
    tmp_path: Path, rows: list[Any], *, rewards: Any = ({"name": "exact_match"},), **data: Any
) -> dict[str, Any]:
    """The changes that make the small config one on data, whose files lie beside it."""
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (tmp_path / "train.jsonl").write_text(text)
    (tmp_path / "grading.py").write_text("def score(response, level):\n    return 1.0\n\nNUMBER = 3\n")
    (tmp_path / "failing.py").write_text(
        "def raises(response):\n    return {}['units']\n\ndef returns(response):\n    return {'score': 1}\n"
    )
    build_tokenizer(["two", "and", "four"]).save(tmp_path / "words.json")
    return {
        "task": None,
        "data": {"train": "train.jsonl", "answer_key": "answer", **data},
        "rewards": list(rewards),
        "model": {**small(tmp_path)["model"], "tokenizer": "words.json"},
    }


def function(path: str) -> dict[str, Any]:
    return {"rewards": [{"name": "function", "path": path}]}
