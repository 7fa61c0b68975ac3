"""Breaks the code on purpose, one known mistake at a time, and shows that the tests notice: `make mutations`.

Each mutation is applied to a copy of the tree, where the tests that guard its place are run. Exit code 1 when one
survives, or when its place is not there any more.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("services", "tests", "tidegate", "pyproject.toml")
_HAS_FAILURES = 1
"""pytest's exit code; another one is of tests that could not be run."""


@dataclass(frozen=True, slots=True)
class Mutation:
    """A mistake: in `file`, `right` becomes `wrong`."""

    name: str
    file: str
    right: str
    wrong: str
    tests: tuple[str, ...] = ("tests/properties/test_lr_progress.py", "tests/unit/lr")


_OF_THE_CONFIG = ("tests/unit/config/test_schedule.py",)

MUTATIONS = (
    Mutation(
        "float increments",
        "tidegate/lr/progress.py",
        "return self.nominal * units.count / self.num_units",
        "return Fraction(float(self.nominal) * units.count / self.num_units)",
    ),
    Mutation(
        "nominal steps from the current data-parallel size",
        "tidegate/lr/progress.py",
        "steps = self.rules.nominal_of(num_units) if",
        "steps = self.rules.nominal_of(num_units) / dp if",
    ),
    Mutation(
        "a load that adds",
        "tidegate/megatron/lr.py",
        "scheduler.num_steps = ledger.num_steps\n    scheduler.step(0)",
        "scheduler.step(ledger.num_steps)",
    ),
    Mutation(
        "a resume that forgets its progress",
        "tidegate/lr/checkpoint.py",
        "now = replace(saved, rules=rules)",
        "now = replace(saved, rules=rules, progress=Fraction(0))",
    ),
    Mutation(
        "a logical mini-batch of the data-parallel size",
        "tidegate/config/schedule.py",
        "algorithm.n_minibatches * algorithm.group_size",
        "algorithm.n_minibatches * algorithm.group_size // config.actor.layout.dp",
        _OF_THE_CONFIG,
    ),
    Mutation(
        "a budget of the data-parallel size",
        "tidegate/config/schedule.py",
        "return config.algorithm.iterations * config.algorithm.n_minibatches",
        "return config.algorithm.iterations * config.algorithm.n_minibatches // config.actor.layout.dp",
        _OF_THE_CONFIG,
    ),
    Mutation(
        "an optimizer's rate that nobody looks at",
        "services/actor/lr.py",
        "if rates != want_rates",
        "if rates != held[0]",
        ("tests/unit/actor/test_lead_lr.py",),
    ),
    Mutation(
        "the share of a full group for a short one",
        "tidegate/lr/progress.py",
        "before.share(now.updates[update])",
        "before.share(Units.of(range(max(map(lambda each: each.count, now.updates.values())))))",
    ),
    Mutation(
        "the divisor of full sequences for a loss of short ones",
        "services/actor/grpo.py",
        "divisor = sum(counts) if is_over_tokens",
        "divisor = len(counts) * max(counts) if is_over_tokens",
        ("tests/unit/actor/test_grpo.py",),
    ),
)


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = _copied(Path(folder) / "tree")
        suites = sorted({suite for mutation in MUTATIONS for suite in mutation.tests})
        if code := _tested(copy, suites):
            print(f"the tests do not pass as they are (pytest exits with {code})")
            return 1
        survivors = [mutation.name for mutation in MUTATIONS if not _is_noticed(copy, mutation)]
    print(f"{len(MUTATIONS) - len(survivors)} of {len(MUTATIONS)} mutations are noticed")
    return int(bool(survivors))


def _copied(tree: Path) -> Path:
    tree.mkdir()
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, tree / name)
    return tree


def _is_noticed(copy: Path, mutation: Mutation) -> bool:
    path = copy / mutation.file
    text = path.read_text()
    if text.count(mutation.right) != 1:
        print(f"{mutation.name}: {mutation.file} holds its place {text.count(mutation.right)} times, not once")
        return False
    path.write_text(text.replace(mutation.right, mutation.wrong))
    try:
        code = _tested(copy, list(mutation.tests))
    finally:
        path.write_text(text)
    print(f"{mutation.name}: {'noticed' if code == _HAS_FAILURES else f'NOT NOTICED (pytest exits with {code})'}")
    return code == _HAS_FAILURES


def _tested(copy: Path, suites: list[str]) -> int:
    """The exit code of pytest over them, in the copy."""
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *suites]
    env = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=copy, env=env, capture_output=True, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
