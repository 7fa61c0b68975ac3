"""`python -m tests.chaos`: runs jobs under drawn faults, one seed after the other, and judges each from outside.

    --runs N --seed S    the seeds S to S + N - 1
    --only KIND          faults of one kind alone
    --replay SEED|FILE   one run, of a seed or of a plan in found/; its folder stays
    --jobs K             K runs side by side
    --log FILE           one JSON line for each run, and one that sums up; without it, only to stdout
    --folder FOLDER      where runs have their folders; that of a run that passed is removed

Exit code 1 where an oracle found something. The folder of such a run stays, and its line names it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.faults.kinds import KINDS
from tests.chaos.oracles import verdicts
from tests.chaos.plan import Plan, plan_of, read_plan
from tests.chaos.references import reference_weights
from tests.chaos.run import run


@dataclass
class Series:
    """The runs of one call."""

    folder: Path
    log: Path | None
    keeps: bool
    only: str | None = None
    lines: list[dict[str, Any]] = field(default_factory=list)
    _one_reference: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def run(self, plan: Plan) -> None:
        reference = await self._reference(plan)
        folder = self.folder / f"{self.only or 'seed'}{plan.seed}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        outcome = await run(plan, folder, name=f"chaos-{plan.seed}", reference=reference)
        found = verdicts(outcome.collected)
        failed = {name: faults for name, faults in found.items() if faults}
        is_kept = bool(failed) or self.keeps
        line = {
            **plan.record(),
            **outcome.record(),
            "oracles": {name: faults or "right" for name, faults in found.items()},
            "passed": not failed,
            **({"folder": str(folder)} if is_kept else {}),
        }
        self.write(line)
        if not is_kept:
            shutil.rmtree(folder)

    async def _reference(self, plan: Plan) -> str | None:
        if not plan.variant.has_reference:
            return None
        async with self._one_reference:
            cache = self.folder / "references.json"
            return await reference_weights(plan.variant, cache=cache, folder=self.folder / "reference")

    def write(self, line: dict[str, Any]) -> None:
        self.lines.append(line)
        text = json.dumps(line)
        print(text, flush=True)
        if self.log is not None:
            with self.log.open("a") as stream:
                stream.write(text + "\n")

    def write_broken(self, plan: Plan, error: Exception) -> None:
        told = "".join(traceback.format_exception(error))
        oracles = {"driver": [told]}
        self.write({**plan.record(), "strikes": [], "missed": [], "starts": [], "oracles": oracles, "passed": False})

    def sum_up(self) -> dict[str, Any]:
        failed = [line for line in self.lines if not line["passed"]]
        by_oracle = Counter(name for line in failed for name, found in line["oracles"].items() if found != "right")
        starts = sum(len(line["starts"]) for line in self.lines)
        strikes = Counter(each["kind"] for line in self.lines for each in line["strikes"])
        return {
            "runs": len(self.lines),
            "passed": len(self.lines) - len(failed),
            "failed_seeds": [line["seed"] for line in failed],
            "failures_by_oracle": dict(by_oracle),
            "starts": starts,
            "strikes": dict(strikes),
        }


async def main(arguments: argparse.Namespace) -> int:
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    series = Series(folder, arguments.log, keeps=arguments.replay is not None, only=arguments.only)
    waiting = iter(_plans(arguments))

    async def take() -> None:
        for plan in waiting:
            try:
                await series.run(plan)
            except Exception as error:  # noqa: BLE001 - a run that breaks the driver is one more that failed
                series.write_broken(plan, error)

    await asyncio.gather(*(take() for _ in range(arguments.jobs)))
    total = series.sum_up()
    print(json.dumps(total), flush=True)
    if arguments.log is not None:
        with arguments.log.open("a") as stream:
            stream.write(json.dumps(total) + "\n")
    return int(total["passed"] < total["runs"])


def _plans(arguments: argparse.Namespace) -> list[Plan]:
    replayed: str | None = arguments.replay
    if replayed is not None and not replayed.isdigit():
        return [read_plan(json.loads(Path(replayed).read_text())["plan"])]
    first, count = (arguments.seed, arguments.runs) if replayed is None else (int(replayed), 1)
    return [plan_of(seed, only=arguments.only) for seed in range(first, first + count)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=list(KINDS))
    parser.add_argument("--replay", metavar="SEED|FILE")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--folder", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    # What was started ends in order, and what was mounted is gone.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(asyncio.run(main(_arguments())))
