"""Whatever bytes are in the files of a job's folder: a value, or the reader's error. No reader leaves the folder."""

from __future__ import annotations

import json
import os
from fractions import Fraction
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cli.jobs import log_line
from cli.selection import Selection
from services.actor.checkpoints import Checkpoint, CheckpointDamaged, CheckpointError, CheckpointStore, files_of
from services.actor.ledger import ClosedIteration, LedgerError, SampleLedger
from tests.properties.fuzzing import ODD_TEXTS, WORDS, damaged_bytes, damaged_json, fuzzed, value_or_refusal
from tests.unit.run_directory import run_directory
from tidegate.attempts import attempts_in, begin_attempt, end_attempt
from tidegate.checkpoint_manifest import MANIFEST, manifest_text, read_manifest
from tidegate.checkpoint_names import place_of
from tidegate.checksums import WrittenFile, file_checksum
from tidegate.config.job_config import ConfigError
from tidegate.job import JobFolder
from tidegate.launcher.checkpoint import newest_checkpoint
from tidegate.launcher.control import NotRunning, read_endpoint
from tidegate.launcher.event_file import BadRecord, EventFile, read_events, read_record, room_after
from tidegate.launcher.lock import lock_record
from tidegate.launcher.outcome import End, Outcome
from tidegate.lr.checkpoint import decoded, encoded
from tidegate.lr.errors import CheckpointRefused, ForeignCheckpoint
from tidegate.lr.progress import LrLedger, LrRules, OnSkip
from tidegate.lr.schedule import Decay, LrSchedule
from tidegate.moves_log import read_moves
from tidegate.pace.steps import PacedSteps
from tidegate.recorded import NotRecorded, recorded
from tidegate.timeline import Window, fill, read_releases, read_spans
from tidegate.types import Layout
from tidegate.v1 import control_pb2

LEDGER = SampleLedger(1, closed=(ClosedIteration(0, 4, 1, 0), ClosedIteration(1, 4, 0, 2)), num_trained=8)
"""Of a checkpoint between two iterations."""
RULES = LrRules(logical_minibatch=6, on_skip=OnSkip.HOLD)
HALF_WAY = (
    LrLedger(LrSchedule(3e-4, budget=2400, warm_up=Fraction(25, 2), decay=Decay.COSINE, minimum=1e-5), RULES)
    .emptied(0, 1)
    .opened(1, 7)
    .committed_update(1, "a", [0, 3])
    .skipped_update(1, "b", [6, 1])
)
DEEP = b"[" * 100_000


def json_of(path: Path) -> Any:
    return json.loads(path.read_text())


def test_the_ledgers_that_are_damaged_below_are_sound() -> None:
    assert SampleLedger.from_json(LEDGER.to_json()) == LEDGER
    assert decoded(encoded(HALF_WAY)) == HALF_WAY


@fuzzed
@given(damaged_json([json.loads(LEDGER.to_json())]))
def test_a_sample_ledger_of_any_bytes_adds_up_or_is_refused(text: bytes) -> None:
    ledger = value_or_refusal(SampleLedger.from_json, text.decode(errors="replace"), LedgerError)
    assert ledger is None or SampleLedger.from_json(ledger.to_json()) == ledger


@fuzzed
@given(damaged_json([json.loads(encoded(HALF_WAY))]))
def test_a_learning_rate_ledger_of_any_bytes_adds_up_or_is_refused(text: bytes) -> None:
    ledger = value_or_refusal(decoded, text.decode(errors="replace"), CheckpointRefused, ForeignCheckpoint)
    assert ledger is None or decoded(encoded(ledger)) == ledger


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """A folder with one sound checkpoint, and beside it a file that is not the job's."""
    (tmp_path / "secret").write_bytes(b"weights")
    store = CheckpointStore(tmp_path / "all", keep=2)
    (path := store.begin() / "rank00000.safetensors").write_bytes(b"weights")
    file = WrittenFile(path.name, path.stat().st_size, file_checksum(path))
    ledger = SampleLedger(1, closed=(ClosedIteration(0, 4, 0, 0),), num_trained=4)
    store.commit(Checkpoint(1, 1, Layout(dp=2), ledger, (file,), HALF_WAY))
    return tmp_path / "all"


@fuzzed
@given(data=st.data())
def test_a_checkpoint_with_any_manifest_is_read_or_refused(checkpoints: Path, data: st.DataObject) -> None:
    folder, sound = checkpoints / "inc001-it000001", checkpoints / "sound.json"
    if not sound.exists():
        (folder / MANIFEST).rename(sound)
    # Without its checksum, as earlier releases wrote it, more damage gets past it.
    fields = {key: value for key, value in json_of(sound).items() if key != "checksum"}
    (folder / MANIFEST).write_bytes(data.draw(damaged_json([fields, json_of(sound)])))
    store = CheckpointStore(checkpoints, keep=2)
    found = value_or_refusal(store.load, folder.name, CheckpointError)
    assert found is None or found.ledger.num_trained >= 0
    value_or_refusal(files_of, folder, CheckpointError)
    value_or_refusal(newest_checkpoint, checkpoints, ConfigError)


@pytest.mark.parametrize("name", ["../../secret", "/etc/hosts", "..", "", "a\0b", 5, None])
def test_a_manifest_that_names_a_file_elsewhere_is_damaged(checkpoints: Path, name: Any) -> None:
    folder = checkpoints / "inc001-it000001"
    manifest = read_manifest(folder)
    manifest["files"][0]["file"] = name
    (folder / MANIFEST).write_text(manifest_text(manifest))
    with pytest.raises(CheckpointDamaged, match="damaged manifest"):
        CheckpointStore(checkpoints, keep=2).load("inc001-it000001")


@pytest.mark.parametrize("name", ["../all/inc001-it000001", "/", "", "inc001-it000001/.", "inc\u0661-it1", "a\0b"])
def test_a_name_that_is_no_checkpoints_is_refused(checkpoints: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match="no name of a checkpoint; complete: inc001-it000001"):
        CheckpointStore(checkpoints, keep=2).load(name)


@given(st.sampled_from(WORDS) | st.from_regex(r"inc[0-9]{1,20}-it\d{1,20}", fullmatch=True))
def test_any_name_is_a_place_or_none(name: str) -> None:
    place = place_of(name)
    assert place is None or name == f"inc{name[3 : name.index('-')]}-it{name.rpartition('it')[2]}"


OUTCOME = Outcome(
    end=End.FINISHED,
    message="all 2 iterations are done",
    seed=3,
    wall_s=1.5,
    job=control_pb2.GetJobResponse(job="demo", iterations=[control_pb2.IterationSummary(metrics={"reward_mean": 0.5})]),
    timeline="t.json",
    seconds={0: 1.0},
    pace=PacedSteps(10, 1, 0.5),
)


@pytest.fixture
def folder(tmp_path: Path) -> JobFolder:
    return JobFolder(tmp_path)


def outcome_json() -> Any:
    with TemporaryDirectory() as folder:
        OUTCOME.write(path := Path(folder) / "result.json")
        return json_of(path)


@fuzzed
@given(content=damaged_json([outcome_json()]))
def test_a_result_of_any_bytes_is_read_or_refused(folder: JobFolder, content: bytes) -> None:
    folder.result.write_bytes(content)
    outcome = value_or_refusal(Outcome.read, folder.result, ValueError)
    if outcome is not None:
        assert outcome.reason is not None
        assert isinstance(outcome.wall_s, float)


@fuzzed
@given(content=damaged_json([{"control": "127.0.0.1:4000", "pid": 3, "credential": "/dev/shm/none"}]))
def test_an_endpoint_of_any_bytes_is_read_or_is_none(folder: JobFolder, content: bytes) -> None:
    folder.endpoint.write_bytes(content)
    assert value_or_refusal(read_endpoint, folder, NotRunning) is None, "its credential is nowhere"


@fuzzed
@given(content=damaged_json([{"boot": 1764100000, "pid": 3}]))
def test_a_locks_record_of_any_bytes_has_numbers_or_is_empty(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "launcher.lock").write_bytes(content)
    fd = os.open(path, os.O_RDONLY)
    try:
        assert all(value >= 0 for value in lock_record(fd).values())
    finally:
        os.close(fd)


@fuzzed
@given(content=damaged_json([{"attempt": 1, "began": "2026-01-01"}]))
def test_an_attempt_ends_whatever_its_record_holds(tmp_path: Path, content: bytes) -> None:
    attempts = attempts_in(tmp_path)
    attempt = attempts[0] if attempts else begin_attempt(tmp_path, config={}, record={}, now_unix_s=0)
    attempt.record.write_bytes(content)
    end_attempt(attempt, {"end": "finished"}, now_unix_s=1)
    assert json_of(attempt.record)["end"] == "finished"


def of_lines(*originals: Any) -> st.SearchStrategy[bytes]:
    """Lines of JSON, some damaged, and the last one perhaps cut off."""
    whole = [json.dumps(each).encode() for each in originals]
    line = st.sampled_from(whole) | damaged_json(originals)
    return st.lists(line, max_size=4).map(b"\n".join).flatmap(lambda text: st.sampled_from([text, text + b"\n"]))


EVENT_ROW = {
    "stream_sequence": "7",
    "event": {"id": "actor@n0/1/1", "job": "demo", "source": "actor@n0", "boot": "1", "progress": {"num_done": "3"}},
}


@fuzzed
@given(content=of_lines(EVENT_ROW))
@example(content=DEEP + b"\n")
def test_events_of_any_bytes_are_read_or_refused(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "events.jsonl").write_bytes(content)
    rows = list(read_events(path))
    assert EventFile(path).sequence >= 0
    assert room_after(path, attempt=2) > 0
    whole = value_or_refusal(lambda given: list(read_record(given)), path, BadRecord)
    assert whole is None or len(whole) <= len(rows)


@fuzzed
@given(content=of_lines({"kind": "decided", "at_ms": 5, "reason": "none"}))
@example(content=DEEP)
def test_moves_of_any_bytes_are_read_without_the_broken_lines(tmp_path: Path, content: bytes) -> None:
    (path := tmp_path / "moves.jsonl").write_bytes(content)
    assert all("kind" in line and "at_ms" in line for line in read_moves(path))


SPAN = {"gpu": "n0/0", "state": "training", "start_ns": 10, "end_ns": 20, "work": {"iteration": 1}}


@fuzzed
@given(content=of_lines(SPAN, {"gpu": "n0/0", "released_ns": 30}))
@example(content=b'{"gpu":"n0/0","state":"x","start_ns":Infinity,"end_ns":2}')
@example(content=DEEP)
def test_spans_of_any_bytes_fill_their_window(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "actor@n0.jsonl").write_bytes(content)
    spans, releases, window = read_spans(tmp_path), read_releases(tmp_path), Window(0, 100)
    for gpu, found in spans.items():
        filled = fill(found, window, released_ns=releases.get(gpu, ()))
        assert sum(span.end_ns - span.start_ns for span in filled) == window.wall_ns


LOG_LINE = {"time": "2026-01-01T00:00:00Z", "level": "info", "source": "actor", "event": "started", "gpu": "n0/0"}


@fuzzed
@given(of_lines(LOG_LINE).map(lambda text: text.decode(errors="replace")))
@example(DEEP.decode())
@example('{"time": "0001-01-01"}')
def test_log_lines_of_any_text_are_shown(text: str) -> None:
    for line in text.splitlines():
        assert isinstance(log_line(line), str)
        assert isinstance(Selection(since_unix_s=1.0).has_line(line), bool)


RECORDS = ("result.json", "events.jsonl", "journal.jsonl", "config.json", "samples/inc001-it000000.jsonl")


@fuzzed
@given(data=st.data())
def test_a_run_directory_with_any_bytes_in_a_file_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    run = tmp_path / "job" if (tmp_path / "job").exists() else run_directory(tmp_path)
    name = data.draw(st.sampled_from([*RECORDS, "latest/timeline/actor@n0.jsonl"]))
    path = run / name
    sound = path.read_bytes()
    rows = [] if name.startswith("config") else [json.loads(line) for line in sound.splitlines()]
    damaged = damaged_json(rows) if rows else damaged_bytes([sound])
    line = data.draw(damaged | st.sampled_from(ODD_TEXTS))
    path.write_bytes(line if len(rows) <= 1 else sound + line + b"\n")
    try:
        value_or_refusal(recorded, run, NotRecorded)
    finally:
        path.write_bytes(sound)
