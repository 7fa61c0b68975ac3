"""Sequences that leave an engine while it generates: `python -m benchmarks.migrate [--json] [--quick] [--save]`.

The rollout's real lead drives two real embedded engines, each in a process of its own. The first runs all sequences.
Then the second, which stands by, comes to work, the first is released, and the second goes on with every sequence.

A sequence's pause is the time from its last token on the first engine to its first token on the second. It contains the
abort, the way over the lead, and the wait for the engine. The prefill of its prompt and its tokens so far is measured
on the second engine and subtracted: any engine that continues it needs that. Sequences that are prefilled in one step
share its time; `pause_s` is the whole pause.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.migrate_worker import RECORDS
from benchmarks.report import Report, arguments, publish, spread
from services.rollout.lead import RolloutLead
from tests.component_bench import NODES, Bench, bench
from tests.unit.rollout.real_engines import RealEngine, RealEngines, published_weights
from tidegate.codec import encode_grants, encode_layout
from tidegate.gate import Gate
from tidegate.job import load_job, snapshot_root
from tidegate.runtime.instance import LocalInstance
from tidegate.runtime.remote_instance import GrpcShardSource
from tidegate.runtime.snapshots import SnapshotStore
from tidegate.runtime.subprocess_launcher import SubprocessLauncher
from tidegate.runtime.workers import LocalWorkers, WorkerHome
from tidegate.types import Grant, JobId, Layout, NodeId, Role
from tidegate.v1 import commands_pb2
from tidegate.v1 import workers_pb2 as wire

GOALS = {"pause_beyond_prefill_s": "<= 0.5"}
_LOOK_EVERY_S = 0.01
_TIMEOUT_S = 600.0


def settings(*, is_quick: bool) -> dict[str, Any]:
    """The sections of the job: as many sequences as an engine runs at once. None ends before its limit."""
    num_running = 64 if is_quick else 256
    size = 64 if is_quick else 256
    return {
        "model": {
            "num_layers": 2 if is_quick else 4,
            "hidden_size": size,
            "ffn_hidden_size": 2 * size,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": size // 4,
            "max_seq_len": 256,
            "tied_embeddings": False,
        },
        "algorithm": {
            "prompts_per_iteration": num_running // 8,
            "group_size": 8,
            "max_new_tokens": 220 if is_quick else 100,
        },
        "rollout": {"max_running_requests": num_running, "standby": "2,6"},
    }


def instance_of(job: JobId, node: NodeId, folder: Path, of: Bench[RolloutLead, RealEngine]) -> LocalInstance:
    """A node's real instance, whose workers are processes."""
    home = WorkerHome(
        entry="benchmarks.migrate_worker:main",
        log_dir=folder / "logs",
        timeline=folder / "timeline.jsonl",
        works_for="migrate",
        env={RECORDS: str(folder)},
        start_timeout_s=120.0,
    )
    gate = Gate(folder / node / "gate")

    async def died(grant: Grant, status: int, why: str) -> None:
        raise RuntimeError(f"the engine on {grant.gpu} ended with status {status} {why!r}; see {folder / 'logs'}")

    workers = LocalWorkers(home, gate=gate, launcher=SubprocessLauncher(allow=("benchmarks.",)), on_death=died)
    snapshots = SnapshotStore(snapshot_root(of.config, node), node=node, source=GrpcShardSource(_no_channel))
    return LocalInstance(
        job,
        node=node,
        gpus=of.config.cluster.gpus(),
        workers=workers,
        gate=gate,
        snapshots=snapshots,
        timeout_s=60.0,
    )


def _no_channel(endpoint: str) -> Any:
    raise RuntimeError(f"both nodes have the weights; nothing is at {endpoint}")


async def move(folder: Path, *, is_quick: bool) -> dict[str, Any]:
    """One move of all sequences. Returns the figures of it."""
    async with bench(
        folder / "job", Role.ROLLOUT, RolloutLead, RealEngines().make, **settings(is_quick=is_quick)
    ) as of:
        weights = published_weights(of, 0, never=load_job(of.config).tokenizer.end_ids)
        instances = {node: instance_of(JobId(of.config.job), node, folder, of) for node in NODES}
        of.instances = instances  # type: ignore[assignment]  # real ones in place of the bench's own
        try:
            return await _moved(of, weights, folder)
        finally:
            for lead in of.leads:
                await lead.aclose()
            for node in instances.values():
                found = await node.workers(JobId(of.config.job))
                await node.stop_workers(JobId(of.config.job), "", found)


async def _moved(of: Bench[RolloutLead, RealEngine], weights: Any, folder: Path) -> dict[str, Any]:
    first, second = of.grants()
    lead = of.new_lead()
    lead.take(of.scale_up([first], weights=weights))
    await _seen(of, "layout_committed", 1)
    await _until_one_stands_by(lead)
    lead.take(of.open_iteration())
    await _until_running(of, lead, first, num_running=of.config.rollout.max_running_requests)
    lead.take(of.scale_up([second], members=[first, second], weights=weights))
    await _seen(of, "layout_committed", 2)
    asked_ns = time.monotonic_ns()
    lead.take(
        commands_pb2.ScaleDownRequest(
            header=of.header(transition="leave"),
            grants=encode_grants([first]),
            members=encode_grants([second]),
            layout=encode_layout(Layout()),
        )
    )
    await _seen(of, "iteration_reported", 1)
    # The workers write their records when they end.
    await lead.crew.stop([second, *lead.crew.standbys], transition="end")
    before, after = (
        json.loads((folder / f"{each.gpu.replace('/', '-')}.json").read_text()) for each in (first, second)
    )
    return figures_of(before, after, asked_ns)


def figures_of(before: Any, after: Any, asked_ns: int) -> dict[str, Any]:
    """Only sequences that had a token on the first engine and another on the second have a pause."""
    moved = [each for each, num_tokens in after["num_brought"].items() if num_tokens and each in before["last_ns"]]
    pauses = [(after["first_ns"][each] - before["last_ns"][each]) / 1e9 for each in moved]
    beyond = [pause - after["prefill_s"][each] for each, pause in zip(moved, pauses, strict=True)]
    assert moved, "the sequences were complete before the second engine had any"
    done_s = (max(after["first_ns"][each] for each in moved) - asked_ns) / 1e9
    return {
        "num_moved": len(moved),
        "pause_beyond_prefill_s": statistics.median(beyond),
        "pause_beyond_prefill_max_s": max(beyond),
        "pause_s": statistics.median(pauses),
        "prefill_s": statistics.median(after["prefill_s"][each] for each in moved),
        "sequences_per_s": len(moved) / done_s,
        "prefilled_again_tokens": sum(after["num_brought"][each] for each in moved),
    }


async def _until_one_stands_by(lead: RolloutLead) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        while True:
            if lead.crew.standbys:
                return
            await asyncio.sleep(_LOOK_EVERY_S)


async def _until_running(
    of: Bench[RolloutLead, RealEngine], lead: RolloutLead, grant: Grant, *, num_running: int
) -> None:
    """Until the engine runs so many sequences, which have some tokens by then."""
    async with asyncio.timeout(_TIMEOUT_S):
        while "iteration_reported" not in await of.kinds():
            reply = await lead.crew.glance(grant, wire.WorkerCall(look=wire.Look()), timeout_s=10.0)
            if reply is not None and reply.load.num_running >= num_running and max(reply.load.num_tokens) >= 8:
                return
            await asyncio.sleep(_LOOK_EVERY_S)
    raise RuntimeError("the sequences ended before they could move: they are too short for this machine")


async def _seen(of: Bench[RolloutLead, RealEngine], body: str, count: int) -> None:
    async with asyncio.timeout(_TIMEOUT_S):
        async for _, event in of.bus.events.read(JobId(of.config.job), follow=True):
            if event.HasField("failed"):
                raise RuntimeError(event.failed.message)
            count -= event.WhichOneof("body") == body
            if count == 0:
                return


def main() -> int:
    options = arguments("Sequences that leave an engine while it generates.")
    rows = []
    for number in range(1 if options.quick else 5):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(asyncio.run(move(Path(folder), is_quick=options.quick)))
        print(f"run {number}: {json.dumps(rows[-1])}", flush=True)
    figures = {key: float(statistics.median(row[key] for row in rows)) for key in rows[0]}
    cases = [{"runs": rows, **spread([row["pause_beyond_prefill_s"] for row in rows])}]
    against = "the prefill of the same sequences on the engine that continues them, measured in the same run"
    return publish(Report("migrate", figures, {} if options.quick else GOALS, cases, against), options)


if __name__ == "__main__":
    sys.exit(main())
