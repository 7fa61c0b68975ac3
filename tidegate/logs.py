"""Logging: one JSON object a line, keys in a fixed order, no secrets. A `__main__` sets it up once, never an import.

- A line starts with `time`, `level`, `logger`, `source`, `event`. Its other keys follow by name, so that two runs can
  be compared line by line.
- Records of libraries that use the standard library's logging have the same form.
- The values of keys that name a secret are removed, and the user and password of any URL, wherever they stand.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog
from structlog.typing import EventDict, Processor

_FIRST_KEYS = ("time", "level", "logger", "source", "event")
_SECRET_KEY = re.compile(r"passw(or)?d|secret|credential|authorization|api_?key|private_?key", re.IGNORECASE)
_URL_CREDENTIALS = re.compile(r"(?<=://)[^/?#\s\"']+@")
_REMOVED = "[removed]"


def configure_logging(source: str, *, path: Path | None = None, level: str = "INFO") -> None:
    """Sends all logs of this process to the file, or to stderr, and replaces any former set-up.

    `source` is the instance ("actor@n0") and stands in every line. ValueError for an unknown level.
    """
    levels = logging.getLevelNamesMapping()
    if level not in levels:
        raise ValueError(f"log level {level!r} is not known; choose one of {', '.join(sorted(levels))}")
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
        structlog.processors.format_exc_info,
        _named(source),
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )
    if path is None:
        handler: logging.Handler = logging.StreamHandler(sys.stderr)
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _LogFile(path, encoding="utf-8")
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, _without_secrets, _as_line],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    root.setLevel(levels[level])
    logging.getLogger("asyncio").addFilter(_is_no_end_of_tls)


def _is_no_end_of_tls(record: logging.LogRecord) -> bool:
    """asyncio warns of each connection with TLS that ends, since its own StreamReaderProtocol answers as for one
    without."""
    return not record.getMessage().startswith("returning true from eof_received()")


class _LogFile(logging.FileHandler):
    """A full disk costs the log lines, and nothing else. Stderr is told once, if it takes it, until a line can be
    written again."""

    _fails = False
    _is_told = False

    def emit(self, record: logging.LogRecord) -> None:
        self._fails = False
        super().emit(record)
        self._is_told = self._fails

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._fails = True
        if not self._is_told:
            # A service's stderr is a file too, mostly on the same disk.
            with suppress(OSError):
                print(f"tidegate: lines of the log {self.baseFilename} cannot be written: {error}", file=sys.stderr)


def without_credentials(value: Any) -> Any:
    """A JSON value without the user and password of any URL in its texts, at any depth."""
    match value:
        case str():
            return _URL_CREDENTIALS.sub("", value)
        case Mapping():
            return {key: without_credentials(inner) for key, inner in value.items()}
        case list() | tuple():
            return [without_credentials(inner) for inner in value]
        case _:
            return value


def _named(source: str) -> Processor:
    def name(logger: Any, method: str, line: EventDict) -> EventDict:
        line["source"] = source
        return line

    return name


def _without_secrets(logger: Any, method: str, line: EventDict) -> EventDict:
    return {key: _REMOVED if _SECRET_KEY.search(key) else _clean(value) for key, value in line.items()}


def _clean(value: Any) -> Any:
    match value:
        case str():
            return _URL_CREDENTIALS.sub("", value)
        case dict():
            return {
                str(key): _REMOVED if _SECRET_KEY.search(str(key)) else _clean(inner) for key, inner in value.items()
            }
        case list() | tuple() | set() | frozenset():
            return [_clean(inner) for inner in value]
        case float() if not math.isfinite(value):
            return str(value)  # JSON has no such number
        case int() | float() | None:
            return value
        case _:
            return _clean(str(value))


def _as_line(logger: Any, method: str, line: EventDict) -> str:
    first = {key: line.pop(key) for key in _FIRST_KEYS if key in line}
    return json.dumps(first | dict(sorted(line.items())), ensure_ascii=False)
