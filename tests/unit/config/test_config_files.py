"""A job's config as a file: its text is YAML without repeated keys, and its paths begin at its folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.config.valid_config import valid_with
from tidegate.config.files import load_config
from tidegate.config.job_config import ConfigError, parse_config

FILES = {
    "an empty file": ("# nothing yet\n", r"job.yaml is empty: write the keys of a job"),
    "a plain string": ("hello\n", r"job.yaml must hold keys and values such as job:, found 'hello'$"),
    "a key twice at the top": (
        "job: a\nseed: 1\njob: b\n",
        r"key 'job' occurs twice, in lines 1 and 3: keep one$",
    ),
    "a key twice in a section": (
        "job: a\nactor:\n  layout: {tp: 1}\n  learning_rate: 1\n  layout: {tp: 2}\n",
        r"job.yaml: key 'layout' occurs twice, in lines 3 and 5",
    ),
    "a key twice in one line": ("actor: {tp: 1, tp: 2}\n", r"key 'tp' occurs twice, in lines 1 and 1"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_file_that_holds_no_config_is_refused_with_its_fault(case: str, tmp_path: Path) -> None:
    text, message = FILES[case]
    (path := tmp_path / "job.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(path)


def test_a_key_that_a_merge_brings_may_be_written_again(tmp_path: Path) -> None:
    raw = valid_with("inference", {"layout": {"dp": 1}})
    text = yaml.safe_dump(raw).replace("learning_rate: 0.001", "<<: {learning_rate: 1.0}\n  learning_rate: 0.001")
    (path := tmp_path / "job.yaml").write_text(text)
    assert load_config(path) == parse_config(raw)


def test_a_config_file_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere.yaml: No such file or directory; give the path"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_config_file_that_is_not_yaml_is_named(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("job: [unclosed")
    with pytest.raises(ConfigError, match=r"bad.yaml is not YAML: line 1, column 15: [^\n]*; correct it there$"):
        load_config(path)


def test_a_config_file_that_is_no_text_is_named_with_the_place(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"job: \x94")
    with pytest.raises(ConfigError, match=r"binary.yaml is not YAML: byte 6 \(0x94\) is no text in UTF-8; correct"):
        load_config(path)


def test_a_tokenizer_path_is_relative_to_the_configs_folder(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(valid_with("model.tokenizer", "words.json")))
    assert load_config(path).model.tokenizer == str(tmp_path / "words.json")
    path.write_text(yaml.safe_dump(valid_with("model", {"path": "../models/small", "max_seq_len": 64})))
    assert load_config(path).model.path == str(tmp_path.parent / "models" / "small")


def test_the_path_of_sglangs_interpreter_is_relative_to_the_configs_folder_and_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(valid_with("rollout.sglang", {"python": "bin/python"})))
    assert load_config(path).rollout.sglang.python == str(tmp_path / "bin" / "python")
