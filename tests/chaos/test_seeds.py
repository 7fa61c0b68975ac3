"""The plans that once found something: each must end right now.

A plan is in `found/NAME.json`, as the log of the driver had it, with the words of what it found.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.chaos.oracles import verdicts
from tests.chaos.plan import Plan, read_plan
from tests.chaos.references import reference_weights
from tests.chaos.run import run

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

FOUND = sorted((Path(__file__).parent / "found").glob("*.json"))


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the undisturbed runs' weights."""
    return tmp_path_factory.mktemp("references")


def kept_plan(path: Path) -> Plan:
    return read_plan(json.loads(path.read_text())["plan"])


@pytest.mark.parametrize("path", [pytest.param(path, id=path.stem) for path in FOUND])
async def test_a_plan_that_once_found_something_ends_right(path: Path, references: Path, tmp_path: Path) -> None:
    plan = kept_plan(path)
    reference = None
    if plan.variant.has_reference:
        cache, folder = references / "references.json", references / "reference"
        reference = await reference_weights(plan.variant, cache=cache, folder=folder)
    outcome = await run(plan, tmp_path, name=f"found-{path.stem}", reference=reference)
    assert {name: faults for name, faults in verdicts(outcome.collected).items() if faults} == {}
