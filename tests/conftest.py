"""The common start of every test, also when pytest is started without make."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests import effort
from tests.parts import dealt

# Set it before the first import of torch, whose sums depend on the number of threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in every run. A slow shared machine must not make a test fail.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def level_of_logging() -> Iterator[None]:
    """A command that a test runs in this process sets it, for tests after it too."""
    root = logging.getLogger()
    level = root.level
    yield
    root.setLevel(level)


@pytest.fixture
def umask_022() -> Iterator[None]:
    """The usual umask, under which others may read what is made."""
    before = os.umask(0o022)
    yield
    os.umask(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", metavar="K/N", help="run the K-th of N parts of what is collected")
    parser.addoption("--full", action="store_true", help="properties are long tests, with all their examples")


def pytest_configure(config: pytest.Config) -> None:
    effort.IS_FULL = config.getoption("--full")


def pytest_itemcollected(item: pytest.Item) -> None:
    if effort.IS_FULL and item.nodeid.startswith("tests/properties/"):
        item.add_marker(pytest.mark.long)


LONG_TIMEOUT_S = 900.0
"""The limit of a long test that names none: such a test takes minutes beside two others on two cores."""
JOB_TIMEOUT_S = 300.0
"""The limit of a test of tests/e2e that names none. It counts the fixture's job too, and a slow machine takes 80 s for
a job beside two others.
"""


# Run last, because -m and -k have then removed the tests that they leave out.
@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("timeout"):
            continue
        if item.get_closest_marker("long"):
            item.add_marker(pytest.mark.timeout(LONG_TIMEOUT_S))
        elif item.nodeid.startswith("tests/e2e/"):
            item.add_marker(pytest.mark.timeout(JOB_TIMEOUT_S))
    part: str | None = config.getoption("--part")
    if part is None:
        return
    try:
        kept = dealt(items, part)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error
    ids = {item.nodeid for item in kept}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in ids])
    items[:] = kept
