"""The paths in a config that every machine of a job needs."""

from __future__ import annotations

from tests.unit.config.valid_config import VALID, on_data
from tidegate.config.job_config import parse_config
from tidegate.config.named_paths import named_paths


def test_paths_are_named_by_their_keys_and_those_of_the_launcher_are_left_out() -> None:
    rewards = [
        {"name": "exact_match"},
        {"name": "function", "path": "/code/score.py:score", "import_from": "/code"},
        {"name": "function", "path": "package.score:score", "import_from": "/more"},
    ]
    raw = on_data(
        data={"train": "/data/train", "answer_key": "answer", "chat_template": "tokenizer"},
        rewards=rewards,
        evaluation={"every": 2, "data": "/data/test"},
        runtime={"gate_root": "/gates"},
    )
    assert named_paths(parse_config(raw)) == {
        "data.train": "/data/train",
        "evaluation.data": "/data/test",
        "rewards.1.import_from": "/code",
        "rewards.1.path": "/code/score.py",
        "rewards.2.import_from": "/more",
    }
    template = {"train": "/data/train", "answer_key": "answer", "chat_template": "/data/chat.jinja"}
    assert named_paths(parse_config(on_data(data=template)))["data.chat_template"] == "/data/chat.jinja"
    assert named_paths(parse_config(VALID)) == {}
