"""An invariant that a module head states names the test that holds it: `[test_planner: every_element_is_covered]`.

The part before the colon is the stem of a test file. The part behind it occurs in the name of exactly one test there.
A reference on a line of its own below a list holds for the whole list.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = re.compile(r"\[(test_\w+):\s+(\w+)\]")
STATED = re.compile(r"^Invariants?\b[^:\n]*:(.*?)(?:\n\n|\Z)", re.MULTILINE | re.DOTALL)
TESTED = (
    "services/scheduler",
    "services/actor/ledger.py",
    "tidegate/elastic",
    "tidegate/gate",
    "tidegate/lr",
    "tidegate/ownership",
)
"""The folders and files in which every stated invariant names its test."""
CODE = [path for top in ("services", "tidegate", "simulator", "cli") for path in sorted((ROOT / top).rglob("*.py"))]


def functions_by_file() -> dict[str, list[str]]:
    """The names of the tests in each file, by the file's stem."""
    found: dict[str, list[str]] = {}
    for path in (ROOT / "tests").rglob("test_*.py"):
        names = re.findall(r"^ *(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE)
        found.setdefault(path.stem, []).extend(names)
    return found


def head(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text())) or ""


def references() -> list[tuple[str, str, str]]:
    """(module, file stem, part of the test's name)."""
    return [(str(path.relative_to(ROOT)), *found) for path in CODE for found in REFERENCE.findall(head(path))]


def untested(text: str) -> list[str]:
    """The invariants of a module head that name no test."""
    found = []
    for stated in STATED.findall(text):
        if not re.fullmatch(REFERENCE, stated.strip().splitlines()[-1]):
            items = [item for item in re.split(r"(?:^|\n)- ", stated) if item.strip()]
            found += [" ".join(item.split()) for item in items if not REFERENCE.search(item)]
    return found


def faults() -> list[str]:
    tests, wrong = functions_by_file(), []
    for module, stem, part in references():
        matches = [name for name in tests.get(stem, []) if part in name]
        if len(matches) != 1:
            wrong.append(f"{module}: [{stem}: {part}] names {len(matches)} tests of {stem}.py, not one")
    return wrong


def test_every_reference_to_a_test_names_exactly_one() -> None:
    assert faults() == []


def test_every_invariant_of_what_moves_gpus_and_counts_samples_names_its_test() -> None:
    tested = [path for path in CODE if str(path.relative_to(ROOT)).startswith(TESTED)]
    missing = [f"{path.relative_to(ROOT)}: {text}" for path in tested for text in untested(head(path))]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Says what.\n\nInvariant: one owner. [test_x: one_owner]\n", []),
        ("Says what.\nInvariant: one owner.\n\nMore: text.", ["one owner."]),
        ("Invariants:\n- One owner. [test_x: one_owner]\n- Tokens\n  only grow.\n", ["Tokens only grow."]),
        ("Invariants of a plan:\n- One owner.\n- Tokens grow.\n[test_x: refused_when_made]\n\nMore.", []),
        ("Nothing is stated here.", []),
    ],
)
def test_an_invariant_without_a_reference_is_found(text: str, want: list[str]) -> None:
    assert untested(text) == want


@pytest.mark.parametrize(("text", "want"), [("[test_x: two_words]", [("test_x", "two_words")]), ("[test_x]", [])])
def test_a_reference_has_a_file_and_a_part_of_a_name(text: str, want: list[tuple[str, str]]) -> None:
    assert REFERENCE.findall(text) == want
