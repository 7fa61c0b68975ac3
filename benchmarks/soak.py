"""Whether a long job grows: memory, streams, writes of the store and the scheduler's work after many short iterations.

One real job with embedded servers runs thousands of iterations of some tenths of a second. Each figure is that of the
last iterations over that of the same number of early ones:

    decide_growth         CPU seconds of the scheduler in an iteration, by those of a fixed loop that runs meanwhile: a
                          virtual machine is some 10 % faster or slower from minute to minute
    rss_growth            resident memory of all processes of the job
    stream_growth         the largest size of the job's streams, in bytes
    store_write_growth    bytes that the store receives in an iteration

What is on disk alone (`events.jsonl`, `journal.jsonl`) is the record of the job and grows by design. The cases tell its
bytes an iteration, and each process's memory early and late.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import psutil
import yaml

from benchmarks.report import Report, arguments, publish
from tidegate.adapters import subjects
from tidegate.adapters.nats_link import NatsLink
from tidegate.certs.identity import Party
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.launcher.control import NotRunning, control_of
from tidegate.ports.rpc import PeerUnavailable
from tidegate.types import JobId
from tidegate.v1 import control_pb2

JOB = JobId("soak")
GOALS = dict.fromkeys(("decide_growth", "rss_growth", "stream_growth", "store_write_growth"), "<= 1.1")
_LOOK_AGAIN_S = 0.1
_LOOP = {str(number): [number, {"text": "x" * 20}] for number in range(100)}
_LOOPS = 20


@dataclass(frozen=True, slots=True)
class Sizes:
    """The early figures are those of the `window` iterations that end with `early`, the late ones of the last."""

    iterations: int
    early: int
    window: int


FULL, QUICK = Sizes(2000, 200, 100), Sizes(60, 30, 20)


@dataclass(frozen=True, slots=True)
class Look:
    """What is seen of the job after so many iterations. CPU seconds and received bytes count from a process's start."""

    iteration: int
    rss_bytes: Mapping[str, int]
    scheduler_cpu_s: float
    loop_s: float
    """CPU seconds of the fixed loop."""
    store_bytes: int
    stream_bytes: int
    folder_bytes: int


def config(folder: Path, sizes: Sizes) -> dict[str, Any]:
    """A job of three slots whose iteration takes some tenths of a second."""
    return {
        "job": str(JOB),
        "output_dir": str(folder),
        "cluster": {"nodes": {"n0": 3}, "component_placement": {"actor": "0", "rollout": "1", "inference": "2"}},
        "model": {
            "num_layers": 1,
            "hidden_size": 32,
            "ffn_hidden_size": 64,
            "num_heads": 2,
            "num_kv_heads": 2,
            "head_dim": 16,
            "max_seq_len": 64,
        },
        "scheduler": {"policy": "static"},
        "task": {"name": "countdown"},
        "algorithm": {
            "iterations": sizes.iterations,
            "prompts_per_iteration": 2,
            "group_size": 2,
            "n_minibatches": 1,
            "max_new_tokens": 8,
        },
        "actor": {"learning_rate": 1e-4, "warm_up": {"steps": 5, "batch_size": 8, "learning_rate": 2e-3}},
        "evaluation": {"every": 10, "num_prompts": 2, "samples_per_prompt": 1},
        "checkpoint": {"every": 10},
    }


async def soak(folder: Path, sizes: Sizes) -> list[Look]:
    """Run the job, and look at it after each of its iterations that is seen. RuntimeError where it does not finish."""
    path = folder / "soak.yaml"
    path.write_text(yaml.safe_dump(config(folder, sizes)))
    with (folder / "out").open("wb") as out:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "cli", "run", str(path), stdout=out, stderr=out
        )
        looks: list[Look] = []
        while process.returncode is None:
            with suppress(NotRunning, PeerUnavailable, FileNotFoundError):
                await _follow(process, JobFolder(folder / JOB), looks)
            with suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), _LOOK_AGAIN_S)
    if process.returncode:
        raise RuntimeError(f"the job ended with {process.returncode}: {(folder / 'out').read_text()[-2000:]}")
    return looks


async def _follow(process: asyncio.subprocess.Process, folder: JobFolder, looks: list[Look]) -> None:
    """Look after each change of the iteration, until the scheduler or the job ends."""
    link: NatsLink | None = None
    try:
        async with control_of(folder) as control:
            servers = JobConfig.read(folder.config).servers
            credential = servers.nats_credential(Party.SCHEDULER)
            link = await NatsLink.connect(servers.nats_url, name="soak", deadline_s=5.0, credential=credential)
            known, version = -1, 0
            while process.returncode is None:
                request = control_pb2.GetJobRequest(job=JOB, known_state_version=version, wait_s=2.0)
                status = await control.GetJob(request)
                version = status.state_version
                if status.iteration > known:
                    known = status.iteration
                    looks.append(await _look(known, process.pid, folder, link))
    finally:
        if link is not None:
            await link.close()


async def _look(iteration: int, pid: int, folder: JobFolder, link: NatsLink) -> Look:
    rss: dict[str, int] = defaultdict(int)
    cpu_s, received = 0.0, 0
    for name, process in _processes(pid):
        with suppress(psutil.Error):
            rss[name] += process.memory_info().rss
            if name == "scheduler":
                used = process.cpu_times()
                cpu_s = used.user + used.system
            if name == "valkey":
                received = process.io_counters().read_chars
    streams = (subjects.events_stream(JOB), subjects.samples_stream(JOB), subjects.dead_stream(JOB))
    infos = [await link.require_stream(stream) for stream in streams]
    return Look(
        iteration=iteration,
        rss_bytes=dict(rss),
        scheduler_cpu_s=cpu_s,
        loop_s=_loop_s(),
        store_bytes=received,
        stream_bytes=sum(int(info["state"]["bytes"]) for info in infos),
        folder_bytes=sum(path.stat().st_size for path in (folder.events, folder.journal) if path.exists()),
    )


def _loop_s() -> float:
    """CPU seconds of the same work at each look: some milliseconds of what a scheduler does."""
    begin_s = time.thread_time()
    for _ in range(_LOOPS):
        json.loads(json.dumps(_LOOP))
    return time.thread_time() - begin_s


def _processes(pid: int) -> Iterator[tuple[str, psutil.Process]]:
    """The processes of the job by what they are. Those of one kind share a name."""
    launcher = psutil.Process(pid)
    yield "launcher", launcher
    for process in launcher.children(recursive=True):
        with suppress(psutil.Error, IndexError):
            command = process.cmdline()
            modules = [word.removeprefix("services.") for word in command if word.startswith("services.")]
            program = Path(command[0]).name.partition("-")[0]
            yield (modules[0] if modules else "worker" if command[0].startswith("tidegate: ") else program), process


def figures(looks: list[Look], sizes: Sizes) -> dict[str, float]:
    early, late = sizes.early, sizes.iterations - 1

    def rate(of: Callable[[Look], float], end: int) -> float:
        """By an iteration, over the window that ends there."""
        inside = _window(looks, end, sizes)
        return (of(inside[-1]) - of(inside[0])) / (inside[-1].iteration - inside[0].iteration)

    def work(end: int) -> float:
        """Of the scheduler in an iteration, in fixed loops."""
        loop_s = fmean(look.loop_s for look in _window(looks, end, sizes))
        return rate(lambda look: look.scheduler_cpu_s, end) / loop_s

    def memory(end: int) -> float:
        return fmean(sum(look.rss_bytes.values()) for look in _window(looks, end, sizes))

    def stream(end: int) -> float:
        return max(look.stream_bytes for look in _window(looks, end, sizes))

    return {
        "decide_growth": work(late) / work(early),
        "rss_growth": memory(late) / memory(early),
        "stream_growth": stream(late) / stream(early),
        "store_write_growth": rate(lambda look: look.store_bytes, late) / rate(lambda look: look.store_bytes, early),
        "scheduler_cpu_ms_an_iteration": 1e3 * rate(lambda look: look.scheduler_cpu_s, late),
        "store_kb_an_iteration": rate(lambda look: look.store_bytes, late) / 1e3,
        "streams_mb": stream(late) / 1e6,
        "record_kb_an_iteration": rate(lambda look: look.folder_bytes, late) / 1e3,
    }


def _window(looks: list[Look], end: int, sizes: Sizes) -> list[Look]:
    return [look for look in looks if end - sizes.window < look.iteration <= end]


def memory_cases(looks: list[Look], sizes: Sizes) -> list[dict[str, Any]]:
    """Each kind of process: its memory early and late, in MB."""
    ends = {"early_mb": sizes.early, "late_mb": sizes.iterations - 1}
    means = {key: _means([look.rss_bytes for look in _window(looks, end, sizes)]) for key, end in ends.items()}
    return [
        {"process": name, **{key: round(of.get(name, 0.0) / 1e6, 2) for key, of in means.items()}}
        for name in sorted({name for of in means.values() for name in of})
    ]


def _means(rows: list[Mapping[str, int]]) -> dict[str, float]:
    return {name: fmean(row.get(name, 0) for row in rows) for name in {name for row in rows for name in row}}


def main() -> int:
    options = arguments(__doc__.partition("\n")[0])
    sizes = QUICK if options.quick else FULL
    with tempfile.TemporaryDirectory() as folder:
        looks = asyncio.run(soak(Path(folder), sizes))
    cases = memory_cases(looks, sizes)
    for case in cases:
        print(" ".join(f"{key}={value}" for key, value in case.items()))
    against = f"iterations up to {sizes.iterations} of the same job against those up to {sizes.early}"
    return publish(Report("soak", figures(looks, sizes), GOALS, cases, against), options)


if __name__ == "__main__":
    sys.exit(main())
