"""A credential that has expired: it was issued for a day, two days ago. Some have read it while it was good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs import authority
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity


class _Earlier(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime.now(UTC) - timedelta(days=2)


def issue_expired(by: Authority, identity: Identity, folder: Path) -> Path:
    """Returns the folder."""
    with _two_days_ago():
        by.issue(identity, folder, days=1)
    return folder


def read_before_its_end(folder: Path) -> Credentials:
    with _two_days_ago():
        return Credentials(folder)


@contextmanager
def _two_days_ago() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(authority, "datetime", _Earlier)
        yield
