"""A job's attempts: each has its number, folder and record, and stays readable at whatever moment a run dies."""

from __future__ import annotations

import json
from pathlib import Path

import yaml

from tidegate.attempts import AttemptFolder, attempts_in, begin_attempt, end_attempt, newest_attempt


def begun(root: Path, *, config: dict[str, object] | None = None) -> AttemptFolder:
    return begin_attempt(root, config=config or {"job": "small"}, record={"start": "fresh"}, now_unix_s=1.5)


def test_attempts_are_numbered_from_one_and_latest_leads_to_the_newest(tmp_path: Path) -> None:
    for number, name in enumerate(("001", "002", "003"), start=1):
        attempt = begun(tmp_path)
        assert (attempt.number, attempt.root) == (number, tmp_path / "attempts" / name)
        assert (tmp_path / "latest").resolve() == attempt.root
        assert newest_attempt(tmp_path) == attempt
    assert [attempt.number for attempt in attempts_in(tmp_path)] == [1, 2, 3]


def test_before_the_first_start_the_newest_attempt_is_the_folder_of_the_first(tmp_path: Path) -> None:
    assert attempts_in(tmp_path) == []
    assert newest_attempt(tmp_path).root == begun(tmp_path).root


def test_attempts_beyond_999_keep_counting(tmp_path: Path) -> None:
    (tmp_path / "attempts" / "999").mkdir(parents=True)
    (tmp_path / "attempts" / "1000").mkdir()
    (tmp_path / "attempts" / "notes").mkdir()
    assert begun(tmp_path).number == 1001


def test_attempts_do_not_depend_on_the_link_latest(tmp_path: Path) -> None:
    begun(tmp_path)
    second = begun(tmp_path)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest").symlink_to("attempts/001")
    assert newest_attempt(tmp_path) == second
    assert begun(tmp_path).number == 3
    assert (tmp_path / "latest").resolve().name == "003"


def test_an_attempt_cut_off_at_its_start_keeps_its_number(tmp_path: Path) -> None:
    (tmp_path / "attempts" / "001").mkdir(parents=True)
    (tmp_path / "latest.partial").symlink_to("attempts/001")
    assert begun(tmp_path).number == 2


def test_an_end_cut_off_in_mid_write_leaves_the_record_readable(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    attempt.record.with_name("attempt.json.partial").write_text('{"attempt": 1, "end')
    assert "ended" not in json.loads(attempt.record.read_text())
    end_attempt(attempt, {"end": "finished"}, now_unix_s=61.0)
    assert json.loads(attempt.record.read_text())["end"] == "finished"


def test_a_record_says_when_an_attempt_began_and_then_how_it_ended(tmp_path: Path) -> None:
    attempt = begun(tmp_path)
    began = {"attempt": 1, "began": "1970-01-01T00:00:01.500+00:00", "start": "fresh"}
    assert json.loads(attempt.record.read_text()) == began
    end_attempt(attempt, {"end": "finished"}, now_unix_s=61.0)
    want = {**began, "ended": "1970-01-01T00:01:01.000+00:00", "end": "finished"}
    assert json.loads(attempt.record.read_text()) == want


def test_the_config_that_people_read_has_every_key_and_no_password(tmp_path: Path) -> None:
    attempt = begun(tmp_path, config={"job": "small", "servers": {"nats_url": "nats://me:secret@host:4222"}})
    assert yaml.safe_load(attempt.config.read_text()) == {"job": "small", "servers": {"nats_url": "nats://host:4222"}}
