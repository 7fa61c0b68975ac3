"""The iterations in a run directory, and the directories that cannot be used for calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.unit.run_directory import LENGTHS, picture, run_directory, spans, update
from tidegate.recorded import Minibatch, NotRecorded, joined, recorded


def test_each_iteration_is_read_with_its_lengths_and_times(tmp_path: Path) -> None:
    run = recorded(run_directory(tmp_path))
    assert (run.prompt_tokens, run.kv_capacity_tokens) == (5, 900)
    first, second = run.iterations
    assert first.lengths == ((3, 4), (5, 6), (7, 8), (9, 10))
    assert (first.seconds, first.generating_s, first.inferring_s) == (1.5, 0.05, 0.008)
    assert first.minibatches == (Minibatch(18 + 20, 0.006), Minibatch(34 + 20, 0.005))
    assert (second.seconds, second.generating_s, second.inferring_s) == (2.5, 0.03, 0.008)
    assert second.minibatches == (Minibatch(6 + 20, 0.009), Minibatch(14 + 20, 0.001))


REFUSED: dict[str, tuple[str, str | bytes, str]] = {
    "a run that was cancelled": (
        "result.json",
        json.dumps({"end": "cancelled", "seconds": {}}),
        "of a run that ended cancelled: calibrate from a finished run",
    ),
    "a run that began again": (
        "journal.jsonl",
        update(1, 0, 0) + update(2, 0, 0),
        "has 2 incarnations, as it was interrupted or trained on later, and times of the last one alone",
    ),
    "a run without pictures": (
        "events.jsonl",
        picture(0, LENGTHS[0]),
        "has the lengths of 1 of 2 iterations of 8 samples: calibrate from a run of this version",
    ),
    "a result that was cut off": (
        "result.json",
        '{"end": "fini',
        "result.json is no JSON: Unterminated string starting at: line 1 column 9",
    ),
    "a journal that was cut off": (
        "journal.jsonl",
        update(1, 0, 0) + '{"upd\n',
        "journal.jsonl:2 is no JSON: Unterminated string starting at: line 1 column 2",
    ),
    "a sample that is no text": (
        "samples/inc001-it000000.jsonl",
        b'{"num_prompt_tokens": 4}\n\xff\n',
        r"inc001-it000000.jsonl:2 is no JSON: 'utf-8' codec can't decode byte 0xff",
    ),
    "a journal without a step": ("journal.jsonl", "", "journal.jsonl has no optimizer step: run the job anew"),
    "a journal without a step of an iteration": (
        "journal.jsonl",
        update(1, 0, 0),
        "journal.jsonl has no optimizer step of 1 of 2 iterations, 1 first: run the job anew",
    ),
    "a journal of lists": ("journal.jsonl", "[1]\n", "journal.jsonl:1 is no JSON object; it was changed: run the job"),
    "a result of nothing": ("result.json", "null", "result.json is no JSON object; it was changed: run the job anew"),
    "values of another kind": ("result.json", '{"end": "finished", "seconds": []}', "is not of this release: list ind"),
    "a config that is no text": (
        "config.json",
        b"\xff\xfe",
        "config.json is damaged, or of another release .'utf-8' codec can't decode byte 0xff",
    ),
    "a config of another release": (
        "config.json",
        '{"jub": "x"}',
        "config.json is damaged, or of another release .* calibrate by the release that ran the job",
    ),
    "events of another release": (
        "events.jsonl",
        '{"event": {"generation": {"mood": "fine"}}}\n',
        'events.jsonl: .*has no field named "mood"',
    ),
    "a result of another release": (
        "result.json",
        '{"seconds": {}}',
        "a record lacks 'end'; calibrate by the release that ran the job",
    ),
    "a slot that was killed": (
        "latest/timeline/rollout@n1.jsonl",
        spans("n1/2", ("loading_weights", 9, 10), ("generating", 12, 60)),
        "a slot's timeline has no iteration 1; its process was killed: run the job anew",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_run_that_cannot_be_calibrated_from_is_refused_with_the_remedy(case: str, tmp_path: Path) -> None:
    name, text, want = REFUSED[case]
    folder = run_directory(tmp_path)
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(NotRecorded, match=f"(?s){want}"):
        recorded(folder)


def test_a_sample_with_a_line_separator_in_its_text_is_one_line(tmp_path: Path) -> None:
    folder = run_directory(tmp_path)
    rows = '{"num_prompt_tokens": 4, "text": "a\u2028b"}\n{"num_prompt_tokens": 6}\n'
    (folder / "samples" / "inc001-it000000.jsonl").write_text(rows)
    assert recorded(folder).prompt_tokens == 5


def test_runs_of_one_config_count_together_and_others_are_refused(tmp_path: Path) -> None:
    run = recorded(run_directory(tmp_path))
    other = replace(run, config=run.config.model_copy(update={"seed": 9, "job": "again"}), prompt_tokens=7)
    both = joined([run, other])
    assert (both.prompt_tokens, both.iterations) == (6, run.iterations * 2)
    rollout = run.config.rollout.model_copy(update={"max_running_requests": 5})
    strange = replace(run, config=run.config.model_copy(update={"rollout": rollout}))
    with pytest.raises(
        NotRecorded, match="the runs differ in their section `rollout`: calibrate from runs of one conf"
    ):
        joined([run, strange])


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotRecorded, match=r"holds no finished run: .*run the job, and calibrate from it"):
        recorded(tmp_path)
