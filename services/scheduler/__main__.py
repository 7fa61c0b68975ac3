"""Run one replica of the scheduler: `python -m services.scheduler --config PATH --boot N`."""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import os
import time
from pathlib import Path

import structlog

from services.scheduler.policy.registry import policy_of
from services.scheduler.shell.bus_state import told_by_bus
from services.scheduler.shell.codecs.state_codec import job_spec
from services.scheduler.shell.control import ControlServicer, write_endpoint
from services.scheduler.shell.issuer import Issuer
from services.scheduler.shell.opening import Adopt, open_store
from services.scheduler.shell.peers import Peers
from services.scheduler.shell.service import SchedulerPorts, SchedulerService
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.identity import Party
from tidegate.certs.job_credentials import credential_folder, job_identity
from tidegate.config.job_config import JobConfig
from tidegate.events import EventSource
from tidegate.job import JobFolder, load_job
from tidegate.logs import configure_logging
from tidegate.moves_log import MovesLog
from tidegate.ownership.adoption import GateReports, adopt, adopted_by_another
from tidegate.ports.store import Store
from tidegate.runtime.announcer import Announcer
from tidegate.runtime.service import STOP_GRACE_S, connect_bus, connect_store, run_service, stop_signal
from tidegate.types import LOOPBACK, InstanceId, Role, job_id
from tidegate.v1 import control_pb2, control_pb2_grpc

SOURCE = "scheduler"


async def run(config: JobConfig, *, launcher_boot: int) -> None:
    """Adopt the store, serve Control, and run the loop until SIGTERM. ValueError: the policy cannot run the job."""
    policy = policy_of(config.scheduler)
    policy.check(job_spec(config))
    stopping = await stop_signal()
    job, folder, host_memory = job_id(config.job), JobFolder.of(config), Path(config.runtime.host_memory_root)
    tls = Credentials(credential_folder(host_memory, Party.SCHEDULER))
    async with contextlib.AsyncExitStack() as closing:
        bus = await connect_bus(config, name=SOURCE)
        closing.push_async_callback(bus.close)
        store: Store = connect_store(config)
        closing.push_async_callback(store.aclose)
        channels = Channels(default_timeout_s=config.runtime.command_deadline_s, tls=tls)
        closing.push_async_callback(channels.close)
        peers = Peers(channels, job_identity(job))

        async def gate_reports() -> GateReports:
            return await peers.gate_reports(await told_by_bus(bus.events, bus.copies, job))

        adopting: Adopt = functools.partial(adopted_by_another, store, bus.term)
        if config.runtime.adopts_store:
            adopting = functools.partial(adopt, store, bus.term)
        boot = await open_store(store, adopting, gate_reports, job=job, name=InstanceId(SOURCE))
        announcer = Announcer(bus.events, EventSource(SOURCE, role=None, boot=boot, now_ns=time.time_ns), job)
        issuer = Issuer(store, announcer, send=peers.send, ask_gate=peers.ask_gate)
        consumer = await bus.events.consumer(job, SOURCE, on_dead_letter=announcer.publish_dead_letter)
        record = MovesLog(folder.moves).append
        ports = SchedulerPorts(
            store, bus.events, consumer, bus.copies, adopting, announcer, issuer, peers.gate_reports, record
        )
        # Only a resize needs the job's model and tokenizer, so they are read at the first one.
        loaded = functools.cache(functools.partial(load_job, config))
        service = SchedulerService(
            job,
            ports,
            policy,
            decide_every_s=config.scheduler.decide_every_s,
            lease_ttl_s=config.runtime.lease_ttl_s,
            launcher_boot=launcher_boot,
        )
        control = ControlServicer(
            job,
            state=lambda: service.state,
            reason=lambda: service.reason,
            changed=service.changed,
            gpus=store,
            log=bus.events,
            dead_letters=bus.dead_letters,
            announcer=announcer,
            logs=folder.attempt().logs,
            layout_fault=lambda layout: loaded().layout_fault(Role.ACTOR, layout),
            policy=policy,
        )
        descriptor = control_pb2.DESCRIPTOR.services_by_name["Control"]
        served = Service(descriptor, lambda server: control_pb2_grpc.add_ControlServicer_to_server(control, server))
        server = await serve([served], f"{LOOPBACK}:0", tls=tls)
        closing.push_async_callback(lambda: server.stop(grace_s=STOP_GRACE_S))
        credential = credential_folder(host_memory, Party.OPERATOR)
        write_endpoint(folder.endpoint, endpoint=server.endpoint, pid=os.getpid(), credential=credential)
        structlog.get_logger(SOURCE).info("serving", endpoint=server.endpoint, boot=boot, pid=os.getpid())
        await service.run(stopping)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m services.scheduler", description="One replica of the scheduler.")
    parser.add_argument("--config", type=Path, required=True, help="the job's resolved config.json")
    parser.add_argument(
        "--boot", type=int, default=0, help="decide nothing before the submission of this launcher's boot"
    )
    args = parser.parse_args()
    config = JobConfig.read(args.config)
    configure_logging(SOURCE, path=JobFolder.of(config).attempt().logs / f"{SOURCE}.jsonl")
    # A collection of all generations held up a command by some 30 ms. States form no cycles that it would have to find.
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    run_service(run(config, launcher_boot=args.boot))


if __name__ == "__main__":
    main()
