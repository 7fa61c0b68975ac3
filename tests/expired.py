"""A credential that has expired: it was issued for a day, two days ago."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from tidegate.certs import authority
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity


class _Earlier(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
        return datetime.now(UTC) - timedelta(days=2)


def issue_expired(by: Authority, identity: Identity, folder: Path) -> Path:
    """Returns the folder."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(authority, "datetime", _Earlier)
        by.issue(identity, folder, days=1)
    return folder
