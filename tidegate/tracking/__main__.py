"""A job's tracker: `python -m tidegate.tracking --config PATH --attempt N --boot B`, started by the launcher.

It reads the job's events from the bus, beginning with the submission by the launcher of this boot, and gives their
metrics to each outlet. On SIGTERM it reads the rest of the stream, and closes the outlets within
`tracking.close_timeout_s`. Only the launcher waits for it, at the end and for no longer than that.
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
from tidegate.certs.identity import Party
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
    """The outlets that the config requests. Each outlet's own thread imports its library."""
    folder, tracking = JobFolder.of(config), config.tracking

    # Import the libraries only when needed: one may not be installed, and each import takes time.
    def tensorboard() -> Sink:
        from tidegate.tracking.tensorboard import TensorBoardSink

        return TensorBoardSink(folder.tensorboard, boot=boot)

    def weights_and_biases() -> Sink:
        from tidegate.tracking.weights_and_biases import WandbSink

        public = without_credentials(config.model_dump(mode="json"))
        return WandbSink(tracking.wandb, folder.root, job=config.job, attempt=attempt, boot=boot, config=public)

    sinks = {"tensorboard": tensorboard} if tracking.tensorboard else {}
    if tracking.wandb.is_on:
        sinks["wandb"] = weights_and_biases
    return [Outlet(name, make, capacity=tracking.queue_size) for name, make in sinks.items()]


async def run(config: JobConfig, *, attempt: int, boot: int) -> None:
    """Track the job until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    log = structlog.get_logger(SOURCE)
    outlets = open_outlets(config, attempt=attempt, boot=boot)
    credential = config.servers.nats_credential(Party.JOB)
    bus = await NatsBus.connect(config.servers.nats_url, name=SOURCE, credential=credential)
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
        # Close all sinks at once, so that a hanging sink leaves time to report it.
        for name, account in close_all(outlets, timeout_s=config.tracking.close_timeout_s).items():
            log.info("closed", sink=name, **asdict(account))
        await bus.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tidegate.tracking", description="Reports a job's metrics to TensorBoard and W&B."
    )
    parser.add_argument("--config", type=Path, required=True, help="the job's resolved config.json")
    parser.add_argument("--attempt", type=int, required=True, help="the number of this start of the job")
    parser.add_argument("--boot", type=int, required=True, help="the launcher's")
    arguments = parser.parse_args()
    # Hide torch: tensorboardX imports it where it is installed, needs it for nothing here, and pays seconds and 150 MB.
    sys.modules["torch"] = None  # type: ignore[assignment]  # None makes Python refuse the import
    config = JobConfig.read(arguments.config)
    configure_logging(SOURCE, path=JobFolder.of(config).attempt().logs / f"{SOURCE}.jsonl")
    asyncio.run(run(config, attempt=arguments.attempt, boot=arguments.boot))


if __name__ == "__main__":
    main()
