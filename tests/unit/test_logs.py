"""Log lines: JSON, keys in order, no secrets, one form for Tidegate's lines and those of libraries."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog

from tidegate.logs import configure_logging


@pytest.fixture
def log_path(tmp_path: Path) -> Iterator[Path]:
    """Sets up logging to a file, and restores the former set-up afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    for handler in handlers:
        root.removeHandler(handler)  # pytest's own: configure_logging would close them
    path = tmp_path / "logs" / "actor.jsonl"
    configure_logging("actor@n0", path=path)
    yield path
    for handler in root.handlers[:]:
        root.removeHandler(handler)
        handler.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    structlog.reset_defaults()


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_line_is_one_object_with_its_keys_in_a_fixed_order(log_path: Path) -> None:
    structlog.get_logger("tidegate.test").bind(zeta=1).info("happened", alpha=2.5, middle=["x"])
    (line,) = lines(log_path)
    assert list(line) == ["time", "level", "logger", "source", "event", "alpha", "middle", "zeta"]
    assert {key: line[key] for key in line if key != "time"} == {
        "level": "info",
        "logger": "tidegate.test",
        "source": "actor@n0",
        "event": "happened",
        "alpha": 2.5,
        "middle": ["x"],
        "zeta": 1,
    }


def test_a_librarys_record_has_the_same_form(log_path: Path) -> None:
    logging.getLogger("nats").warning("lost %s", "server")
    (line,) = lines(log_path)
    assert [line[key] for key in ("level", "logger", "source", "event")] == [
        "warning",
        "nats",
        "actor@n0",
        "lost server",
    ]


def test_no_secret_is_written_wherever_it_stands(log_path: Path) -> None:
    structlog.get_logger("tidegate.test").info(
        "connect nats://me:hid@hidden@host:1/ as ops@example",
        redis_password="hidden",
        config={"api_key": "hidden", "urls": ["redis://:hidden@host:2", Path("plain")], "token": "1.4"},
    )
    (line,) = lines(log_path)
    assert "hid" not in log_path.read_text()
    assert line["event"] == "connect nats://host:1/ as ops@example"
    assert line["redis_password"] == "[removed]"
    assert line["config"] == {"api_key": "[removed]", "urls": ["redis://host:2", "plain"], "token": "1.4"}


def test_an_exception_keeps_its_traceback(log_path: Path) -> None:
    try:
        raise RuntimeError("redis://u:hidden@host refused")
    except RuntimeError:
        structlog.get_logger("tidegate.test").exception("failed")
    (line,) = lines(log_path)
    assert "RuntimeError: redis://host refused" in str(line["exception"])


def test_a_nan_or_infinite_figure_leaves_the_line_valid_json(log_path: Path) -> None:
    structlog.get_logger("tidegate.test").info("update", loss=float("nan"))
    text = log_path.read_text()
    assert json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))["loss"] == "nan"


def test_lines_below_the_level_are_left_out(log_path: Path) -> None:
    structlog.get_logger("tidegate.test").debug("noise")
    assert lines(log_path) == []


def test_an_unknown_level_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"log level 'LOUD' is not known; choose one of .*WARNING"):
        configure_logging("actor@n0", level="LOUD")


def test_a_full_disk_costs_the_log_lines_and_is_told_once(log_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = structlog.get_logger("test")
    log.info("before")
    with full_disk(beyond_bytes=1 << 16):
        for _ in range(3):
            log.info("too long", text="x" * (1 << 17))
    assert capsys.readouterr().err == (
        f"tidegate: lines of the log {log_path} cannot be written: [Errno 27] File too large\n"
    )
    log.info("after")
    assert capsys.readouterr().err == ""
    assert log_path.read_text().splitlines()[-1].endswith('"event": "after"}')


def test_a_full_disk_that_has_the_file_of_stderr_too_breaks_nothing(
    log_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "stderr").open("w", buffering=1) as stderr, full_disk(beyond_bytes=0):
        monkeypatch.setattr("sys.stderr", stderr)
        for _ in range(2):
            structlog.get_logger("test").info("not kept")
        monkeypatch.undo()
    structlog.get_logger("test").info("after")
    assert log_path.read_text().splitlines()[-1].endswith('"event": "after"}')


def test_asyncios_warning_of_each_connection_with_tls_that_ends_is_left_out(log_path: Path) -> None:
    logging.getLogger("asyncio").warning("returning true from eof_received() has no effect when using ssl")
    logging.getLogger("asyncio").warning("something else")
    assert [json.loads(line)["event"] for line in log_path.read_text().splitlines()] == ["something else"]


@contextmanager
def full_disk(*, beyond_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond this size."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (beyond_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
