"""The undisturbed run of each training: its final weights, and that it learns. Kept in a file beside the driver's
log."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path

from tests.chaos.oracles import verdicts
from tests.chaos.plan import Plan
from tests.chaos.run import run
from tests.chaos.variants import Variant, reference_of

LEAST_RISE = 0.1
"""From the first to the last iteration's mean reward. Weights that learn nothing are equal for no reason."""


class BadReference(RuntimeError):
    """The undisturbed run does not end right, so that nothing can be compared with it."""


async def reference_weights(variant: Variant, *, cache: Path, folder: Path) -> str:
    """The final weights of the training of `variant` when nothing happens. Runs it in `folder` the first time."""
    training, known = str(variant.training), _read(cache)
    if training not in known:
        _make_anew(folder)
        known[training] = await _measured(variant, folder)
        _write(cache, known)
    return known[training]


def _make_anew(folder: Path) -> None:
    """A call that was interrupted may have left one."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _read(cache: Path) -> dict[str, str]:
    with suppress(FileNotFoundError):
        known: dict[str, str] = json.loads(cache.read_text())
        return known
    return {}


def _write(cache: Path, known: dict[str, str]) -> None:
    cache.write_text(json.dumps(known, indent=1))


async def _measured(variant: Variant, folder: Path) -> str:
    # Another driver may measure too, and what is left behind is found by the job's name.
    name = f"undisturbed-{os.getpid()}"
    outcome = await run(Plan(0, reference_of(variant), ()), folder, name=name, reference=None)
    found = {name: faults for name, faults in verdicts(outcome.collected).items() if faults}
    result = outcome.collected.result
    if found or result is None:
        raise BadReference(f"the undisturbed run in {folder} does not end right: {found}")
    summary = result["summary"]
    if summary["reward_last"] - summary["reward_first"] < LEAST_RISE:
        raise BadReference(
            f"the undisturbed run in {folder} does not learn: its reward goes from {summary['reward_first']:.3f} to "
            f"{summary['reward_last']:.3f}"
        )
    shutil.rmtree(folder)
    return str(summary["weights_checksum"])
