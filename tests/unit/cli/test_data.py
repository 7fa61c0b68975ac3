"""A job on wrong data is refused before anything starts. The message names the line or the reward."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from cli.__main__ import main
from tests.unit.cli.configs import small, small_file
from tests.unit.cli.configs_on_data import RIGHT, function, on_data
from tidegate.config.files import load_config
from tidegate.config.job_config import ConfigError, JobConfig, parse_config
from tidegate.job import load_job
from tidegate.launcher.claim import CannotStart, Start, claim_folder, saved_config
from tidegate.launcher.data_check import with_checked_data

WRONG: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "a line that is no JSON": ([RIGHT, '{"prompt": "two"'], {}, "train.jsonl:2: not JSON at column 17"),
    "a record without an answer": ([RIGHT, {"prompt": "two"}], {}, "train.jsonl:2: no 'answer' (data.answer_key)"),
    "a prompt that is too long": (
        [RIGHT, RIGHT | {"prompt": "two " * 20}],
        {},
        "train.jsonl:2: the prompt has 21 tokens, more than the limit of 20",
    ),
    "a prompt over the config's own limit": (
        [RIGHT],
        {"max_prompt_tokens": 3},
        "train.jsonl:1: the prompt has 4 tokens, more than the limit of 3",
    ),
    "a word that the tokenizer does not know": (
        [RIGHT, RIGHT | {"prompt": "two and five"}],
        {},
        "train.jsonl:2: text 'two and five' has a word outside the vocabulary",
    ),
    "an answer that is an object": ([RIGHT | {"answer": {"a": 1}}], {}, "train.jsonl:1: the answer is {'a': 1}"),
    "an answer that is null": (
        [RIGHT, RIGHT | {"answer": None}],
        {},
        "train.jsonl:2: 'answer' (data.answer_key) is null",
    ),
    "an answer that no response can equal": (
        [RIGHT, RIGHT | {"answer": ["five", "six"]}],
        {},
        "train.jsonl:2: no response can equal the answer: text 'five' has a word outside the vocabulary",
    ),
    "a reward that raises on the right answer": (
        [RIGHT],
        function("failing.py:raises"),
        "reward failing.py:raises on sample 'four' of the trial before the start (TMP/train.jsonl:1) raised KeyError: "
        "'units' at TMP/failing.py:2 in raises; mend it to return a finite number for every text, or set rewards.0",
    ),
    "a reward that returns an object": (
        [RIGHT],
        function("failing.py:returns"),
        "returned {'score': 1}, which is no number but of type dict",
    ),
    "no data": ([RIGHT], {"train": "nowhere.jsonl"}, "no data at "),
    "a chat template that is none": ([RIGHT], {"chat_template": "words.json.jinja"}, "words.json.jinja cannot be read"),
    "a tokenizer without a chat template": ([RIGHT], {"chat_template": "tokenizer"}, "the tokenizer has no template"),
    "a checksum of other data": ([RIGHT], {"checksum": "abc"}, "but data.checksum is abc: use the data"),
    "a reward that does not import": ([RIGHT], function("grade:score"), "grade:score cannot be imported: ModuleNotFou"),
    "a reward that is not there": ([RIGHT], function("grading:scroe"), "grading.py has no function 'scroe'"),
    "a reward that is no function": (
        [RIGHT],
        function("grading:NUMBER"),
        "grading:NUMBER is a int and cannot be called",
    ),
    "a reward that needs more than there is": (
        [RIGHT | {"level": 1}, RIGHT],
        function("grading:score"),
        "train.jsonl:2 has no such column",
    ),
    "a reward without a name for its function": ([RIGHT], function("grading"), "path='grading' must name a function"),
    "an unknown key names the nearest": (
        [RIGHT],
        {"prompt_kye": "a"},
        "unknown key 'data.prompt_kye'; the nearest known",
    ),
    "an unknown key of a reward names the nearest": (
        [RIGHT],
        {"rewards": [{"name": "exact_match", "wieght": 1}]},
        "unknown key 'rewards.0.wieght'; the nearest known key is 'weight'",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_data_and_rewards_end_with_exit_code_2_and_start_nothing(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, changes, want = WRONG[case]
    path = small_file(tmp_path, **on_data(tmp_path, rows, **changes))
    assert main(["run", str(path)]) == 2
    said = capfd.readouterr()
    assert want.replace("TMP", str(tmp_path)) in said.err
    assert "Traceback" not in said.err
    assert said.out == ""
    assert not (tmp_path / "jobs").exists()


SECTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "neither task nor data": ({"data": None, "rewards": []}, "neither task nor data is given: give task.name"),
    "both task and data": ({"task": {"name": "countdown"}}, "both task and data are given"),
    "rewards without data": ({"task": {"name": "countdown"}, "data": None}, "rewards are given without data"),
    "data without rewards": ({"rewards": []}, "rewards is empty: list at least one"),
    "rewards that are no list": ({"rewards": "exact_match"}, "rewards must be a list such as - name: exact_match"),
    "rewards of no weight": ({"rewards": [{"name": "exact_match", "weight": 0}]}, "every weight is 0"),
    "a reward that compares with nothing": (
        {"data": {"train": "train.jsonl"}},
        "rewards.0 (exact_match) compares with the right answer: set data.answer_key",
    ),
    "a function's key on another reward": (
        {"rewards": [{"name": "exact_match", "path": "a:b"}]},
        "rewards.0 (exact_match): path and import_from belong to a reward named function",
    ),
    "a warm-up without demonstrations": (
        {"actor": {"learning_rate": 1e-3, "warm_up": {"steps": 3}}},
        "actor.warm_up.steps=3: the warm-up imitates a built-in task's demonstrations, and data has none: set it to 0",
    ),
    "prompts that leave no room": (
        {"data": {"train": "train.jsonl", "answer_key": "answer", "max_prompt_tokens": 21}},
        "data.max_prompt_tokens=21 and algorithm.max_new_tokens=60 make 81, more than model.max_seq_len=80",
    ),
}


@pytest.mark.parametrize("case", SECTIONS)
def test_sections_that_do_not_fit_each_other_say_how_to_mend_it(case: str, tmp_path: Path) -> None:
    changes, want = SECTIONS[case]
    raw = small(tmp_path, **on_data(tmp_path, [RIGHT])) | changes
    with pytest.raises(ConfigError, match=re.escape(want)):
        parse_config(raw)


EVALUATION: dict[str, tuple[list[Any], dict[str, Any], str]] = {
    "a line that is no JSON": ([RIGHT, "nothing"], {}, "test.jsonl:2: not JSON at column 1"),
    "a record without an answer": ([{"prompt": "two"}], {}, "test.jsonl:1: no 'answer' (data.answer_key)"),
    "an answer that is an object": ([RIGHT | {"answer": {"a": 1}}], {}, "test.jsonl:1: the answer is {'a': 1}"),
    "a prompt that leaves its responses no room": (
        [RIGHT | {"prompt": "two " * 9}],
        {"max_new_tokens": 72},
        "test.jsonl:1: the prompt has 10 tokens, more than the limit of 8",
    ),
    "no data": ([], {"data": "nowhere"}, "no data at "),
    "a folder without the split": ([RIGHT], {"data": ".", "split": "validation"}, "no files of the split validation"),
    "a checksum of other data": ([RIGHT], {"checksum": "abc"}, "but evaluation.checksum is abc: use the data"),
}


@pytest.mark.parametrize("case", EVALUATION)
def test_wrong_data_of_the_evaluation_is_refused_before_anything_starts(
    case: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    rows, changes, want = EVALUATION[case]
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    (tmp_path / "test.jsonl").write_text(text)
    section = {"every": 1, "data": "test.jsonl", **changes}
    path = small_file(tmp_path, **on_data(tmp_path, [RIGHT]), evaluation=section)
    assert main(["run", str(path)]) == 2
    assert want in capfd.readouterr().err
    assert not (tmp_path / "jobs").exists()


def loaded(tmp_path: Path, rows: list[Any], **data: Any) -> JobConfig:
    return load_config(small_file(tmp_path, **on_data(tmp_path, rows, **data)))


def test_paths_are_relative_to_the_configs_folder_and_survive_json(tmp_path: Path) -> None:
    config = loaded(tmp_path, [RIGHT], chat_template="chat.jinja", **function("grading:score"))
    assert config.data is not None
    assert config.data.train == str(tmp_path / "train.jsonl")
    assert config.data.chat_template == str(tmp_path / "chat.jinja")
    assert config.rewards[0].import_from == str(tmp_path)
    assert JobConfig.from_json(config.to_json()) == config


def test_the_evaluations_data_is_relative_to_the_configs_folder_and_known_by_its_checksum(tmp_path: Path) -> None:
    (tmp_path / "test-00000-of-00001.jsonl").write_text(json.dumps(RIGHT) + "\n")
    config = load_config(
        small_file(tmp_path, **on_data(tmp_path, [RIGHT, RIGHT]), evaluation={"every": 1, "data": "."})
    )
    assert config.evaluation is not None
    assert config.evaluation.data == str(tmp_path)
    checked = asyncio.run(with_checked_data(load_job(config))).config
    assert checked.data is not None
    assert checked.evaluation is not None
    assert len({checked.data.checksum, checked.evaluation.checksum, ""}) == 3


def test_the_check_imports_no_reward_function_into_its_own_process(tmp_path: Path) -> None:
    job = load_job(loaded(tmp_path, [RIGHT | {"level": 1}], **function("grading:score")))
    asyncio.run(with_checked_data(job))
    assert "grading" not in sys.modules


def test_a_started_job_is_held_to_the_data_that_it_started_with(tmp_path: Path) -> None:
    job = asyncio.run(with_checked_data(load_job(loaded(tmp_path, [RIGHT]))))
    with claim_folder(job, Start.FRESH, now_unix_s=0.0) as claim:
        saved = saved_config(claim.folder)
    assert saved is not None
    assert saved.data is not None
    assert saved.data.checksum
    again = asyncio.run(with_checked_data(load_job(loaded(tmp_path, [RIGHT]))))
    with claim_folder(again, Start.RESUME, now_unix_s=0.0):
        pass
    changed = asyncio.run(with_checked_data(load_job(loaded(tmp_path, [RIGHT, RIGHT]))))
    with (
        pytest.raises(CannotStart, match=r"cannot go on with data.checksum=\w+ \(was \w+\)"),
        claim_folder(changed, Start.RESUME, now_unix_s=0.0),
    ):
        pass


def test_a_resumed_job_may_have_another_limit_on_failed_rewards(tmp_path: Path) -> None:
    job = load_job(loaded(tmp_path, [RIGHT]))
    with claim_folder(job, Start.FRESH, now_unix_s=0.0):
        pass
    other = load_job(loaded(tmp_path, [RIGHT], rewards=[{"name": "exact_match", "max_failed": 0.9}]))
    with claim_folder(other, Start.RESUME, now_unix_s=0.0):
        pass


def test_the_own_data_example_passes_the_check(tmp_path: Path) -> None:
    path = Path(__file__).resolve().parents[3] / "examples" / "own_data" / "job.yaml"
    job = asyncio.run(with_checked_data(load_job(load_config(path))))
    assert job.config.data is not None
    assert job.config.data.checksum
