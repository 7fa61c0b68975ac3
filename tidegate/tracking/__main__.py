"""A job's tracker: `python -m tidegate.tracking --config PATH --attempt N --boot B`, started by the launcher.

Reads the job's events from the bus, from the submission that the launcher of this boot made, and gives their metrics to
each outlet. SIGTERM: what the stream still holds is read, the outlets are closed within `tracking.close_timeout_s`.
Nobody waits for it, but the launcher at the end, and that for so long.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import structlog

from tidegate.adapters.nats_bus import NatsBus
from tidegate.config.job_config import JobConfig
from tidegate.job import JobFolder
from tidegate.logs import configure_logging, without_credentials
from tidegate.ports.bus import BusUnavailable
from tidegate.runtime.cancellation import end_task
from tidegate.tracking.outlet import Outlet, Sink, close_all
from tidegate.tracking.tracker import Tracker
from tidegate.types import job_id

SOURCE = "tracking"


def open_outlets(config: JobConfig, *, attempt: int, boot: int) -> list[Outlet]:
    """Of all that the config asks for. Their libraries are imported by the outlets' own threads."""
    folder, tracking = JobFolder.of(config), config.tracking

    # Imported where they are needed and no sooner: the one may not be installed, and either costs time.
    def tensorboard() -> Sink:
        from tidegate.tracking.tensorboard import TensorBoardSink

        return TensorBoardSink(folder.tensorboard, boot=boot)

    def weights_and_biases() -> Sink:
        from tidegate.tracking.weights_and_biases import WandbSink

        told = without_credentials(config.model_dump(mode="json"))
        return WandbSink(tracking.wandb, folder.root, job=config.job, attempt=attempt, boot=boot, config=told)

    wanted = {"tensorboard": tensorboard} if tracking.tensorboard else {}
    if tracking.wandb.is_on:
        wanted["wandb"] = weights_and_biases
    return [Outlet(name, make, capacity=tracking.queue_size) for name, make in wanted.items()]


async def run(config: JobConfig, *, attempt: int, boot: int) -> None:
    """Until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    log = structlog.get_logger(SOURCE)
    outlets = open_outlets(config, attempt=attempt, boot=boot)
    bus = await NatsBus.connect(config.servers.nats_url, name=SOURCE)
    try:
        tracker = Tracker(bus.events, job_id(config.job), outlets, boot=boot)
        following = asyncio.create_task(tracker.follow(), name="follow")
        stopped = asyncio.create_task(stopping.wait(), name="stopped")
        await asyncio.wait({following, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if following.done():
            following.result()
        await end_task(following)
        with suppress(BusUnavailable):
            await tracker.rest()
    finally:
        # At once, so that a sink which hangs leaves time to say so.
        for name, account in close_all(outlets, timeout_s=config.tracking.close_timeout_s).items():
            log.info("closed", sink=name, **asdict(account))
        await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tidegate.tracking", description="Tells a job's metrics.")
    parser.add_argument("--config", type=Path, required=True, help="the job's resolved config.json")
    parser.add_argument("--attempt", type=int, required=True, help="the number of this start of the job")
    parser.add_argument("--boot", type=int, required=True, help="the launcher's")
    given = parser.parse_args()
    # tensorboardX imports torch wherever it is, for what is not used here: seconds at each end, and 150 MB.
    sys.modules["torch"] = None  # type: ignore[assignment]  # what Python has for "cannot be imported"
    config = JobConfig.from_json(given.config.read_text())
    configure_logging(SOURCE, path=JobFolder.of(config).attempt().logs / f"{SOURCE}.jsonl")
    asyncio.run(run(config, attempt=given.attempt, boot=given.boot))


if __name__ == "__main__":
    main()
