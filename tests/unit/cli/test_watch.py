"""`--watch` shows a command's output again as it changes."""

from __future__ import annotations

import asyncio
import io
import sys

import pytest

from cli.top import CLEAR
from cli.watch import watch


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


class Over(Exception):
    pass


def shown(pages: list[str], *, between: str = "") -> None:
    """Watches a command that prints these pages, one at each look."""
    left = iter(pages)

    async def look() -> int:
        try:
            print(next(left))
        except StopIteration:
            raise Over from None
        return 0

    with pytest.raises(Over):
        asyncio.run(watch(look, between=between, beat_s=0.0))


def test_what_has_not_changed_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    shown(["one job", "one job", "two jobs", "two jobs", "one job"])
    assert capsys.readouterr().out == "one job\ntwo jobs\none job\n"


def test_documents_that_follow_each_other_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    shown(["jobs: 1", "jobs: 1", "jobs: 2", "jobs: 3"], between="---\n")
    assert capsys.readouterr().out == "jobs: 1\n---\njobs: 2\n---\njobs: 3\n"


def test_on_a_terminal_each_page_replaces_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    shown(["one job", "one job", "two jobs"])
    assert screen.getvalue() == f"{CLEAR}one job\n{CLEAR}two jobs\n"
