"""The checks before a job starts.

Its devices and addresses are there, its servers answer, its name is free there, its engine is installed, its weights
fit.

Invariants:
- A check writes nothing. [test_preflight: check_of_free_servers_writes_nothing]
- A message names the URL without its password, and the remedy.
  [test_preflight: nats_url_that_does_not_answer]
"""

from __future__ import annotations

import asyncio
import os
import re
from ipaddress import IPv4Address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.adapters.nats_bus import NatsBus
from tidegate.adapters.redis_store import redis_store
from tidegate.adapters.redis_url import BadRedisUrl
from tidegate.certs.authority import CertsError, Credential
from tidegate.certs.identity import Party
from tidegate.config.checks.job import devices_fault
from tidegate.config.engines.kind import Environment
from tidegate.config.engines.registry import kind_of
from tidegate.config.job_config import JobConfig
from tidegate.config.named_paths import named_paths
from tidegate.config.sections.job import ClusterSection, MachineSection, ServersSection
from tidegate.huggingface.tied_copy import check_copy
from tidegate.job import Job
from tidegate.launcher.claim import CannotStart, Start
from tidegate.launcher.host_memory import node_bytes, shortage
from tidegate.machines import versions
from tidegate.ownership.records import StoreUnavailable
from tidegate.ports.bus import BusLimits, BusUnavailable, JobNotOpen
from tidegate.ports.rpc import PeerRefused, PeerUnavailable
from tidegate.runtime.hosted import stub_of
from tidegate.runtime.interfaces import NotThisMachine, interface_of
from tidegate.runtime.server_kinds import NATS, VALKEY, ServerKind, ServerPackageMissing, packaged_binary
from tidegate.sizes import size_text
from tidegate.types import JobId, NodeId
from tidegate.v1 import machine_pb2

ANSWER_TIMEOUT_S = 3.0
_LOGIN = re.compile(r"(?<=://)[^/]*@")


class Away(CannotStart):
    """A server or the agent of another machine does not answer. It may do so later."""


def check_addresses(cluster: ClusterSection) -> None:
    """CannotStart where the address of a node that runs here is not this machine's."""
    for node, address in cluster.addresses.items():
        if cluster.machine_of(node) is not None:
            continue
        try:
            interface_of(address)
        except NotThisMachine as error:
            raise CannotStart(
                f"cluster.addresses: {node}: {error}: nodes that cluster.machines does not name run on the machine "
                "that starts the job; give one of these, or leave cluster.addresses out"
            ) from error


async def check_machines(cluster: ClusterSection, job: Job | None = None) -> None:
    """CannotStart where the machine of an agent is not as this one, or has no room for the job. Away where an agent
    does not answer."""
    if not cluster.machines:
        return
    try:
        tls = Credentials(Path(cluster.machine_credentials))
    except CertsError as error:
        raise CannotStart(f"cluster.machine_credentials: {error}") from error
    channels = Channels(default_timeout_s=ANSWER_TIMEOUT_S, tls=tls)
    try:
        stubs = [stub_of(channels, machine, tls.identity.cluster) for machine in cluster.machines]
        found = await asyncio.gather(
            *(_asked_fault(stub, machine, cluster, job) for stub, machine in zip(stubs, cluster.machines, strict=True)),
            return_exceptions=True,
        )
    finally:
        await channels.close()
    silent, faults = [], []
    first_of: dict[str, str] = {}
    for machine, each in zip(cluster.machines, found, strict=True):
        if isinstance(each, PeerUnavailable | PeerRefused):
            silent.append(
                f"cluster.machines: {machine.name}: {each.reason}; start it there: "
                f"tidegate agent --listen {machine.agent} --credentials FOLDER"
            )
        elif isinstance(each, BaseException):
            raise each
        else:
            fault, memory_id = each
            if not fault and (other := first_of.setdefault(memory_id, machine.name)) != machine.name:
                fault = same_machine_fault(machine.name, other)
            faults += [fault] if fault else []
    if faults:
        raise CannotStart("\n".join((*faults, *silent)))
    if silent:
        raise Away("\n".join(silent))


async def _asked_fault(stub: Any, machine: MachineSection, cluster: ClusterSection, job: Job | None) -> tuple[str, str]:
    """Its fault, and the name of its host memory."""
    paths = named_paths(job.config) if job is not None else {}
    request = machine_pb2.GetMachineRequest(paths=[*dict.fromkeys(paths.values())])
    there = await stub.GetMachine(request)
    return machine_fault(there, machine, cluster, job=job), there.host_memory_id


def machine_fault(
    there: machine_pb2.GetMachineResponse,
    machine: MachineSection,
    cluster: ClusterSection,
    *,
    shared: Path | None = None,
    job: Job | None = None,
) -> str:
    """How another machine differs from this one, by what it has told. Empty: a job can have nodes on both. `shared`: a
    file on the disk that both have to share, which it was asked for. `job`: one that needs host memory there."""
    key = f"cluster.machines: {machine.name}"
    if fault := release_fault(there, machine):
        return fault
    if not there.host_memory_id:
        return f"{key}: its agent is of an earlier release: install the same as here"
    if there.user != os.getuid():
        return (
            f"{key}: its agent runs as user {there.user}, and this job as user {os.getuid()}: they have to be the same"
        )
    if shared is not None and not there.has_shared:
        return f"{key} has no {shared}: mount the disk with the jobs' folder there, at the same path"
    for node in machine.nodes:
        address = cluster.address_of(NodeId(node))
        if address not in there.addresses and not IPv4Address(address).is_loopback:
            listed = ", ".join(there.addresses)
            return f"cluster.addresses: {node}: {address} is no address of {machine.name}, which has {listed}"
    if cluster.device == "cuda" and not there.cuda_devices:
        return f"{key}: its agent lends no CUDA device: start it with tidegate agent --device cuda"
    if lacks := devices_fault(cluster, len(there.cuda_devices), machine=machine.name):
        return lacks
    if job is not None and there.missing_paths:
        missing = [f"{path} ({name})" for name, path in named_paths(job.config).items() if path in there.missing_paths]
        return f"{key} has no {' and no '.join(missing)}: put it on storage that all machines have, at the same path"
    # What is free there now may be another's, or left by this job.
    room = there.host_memory.total_bytes
    if job is not None and len(machine.nodes) * node_bytes(job) > room:
        return f"{key} has in {there.host_memory_root} {shortage(job, len(machine.nodes), size_text(room))}"
    return ""


def release_fault(there: machine_pb2.GetMachineResponse, machine: MachineSection) -> str:
    """How the packages of another machine differ from those here. Empty: not at all."""
    for package, own in versions().items():
        if own and there.versions[package] != own:
            told = f"{package} {there.versions[package] or '(none)'}, and this one {own}"
            return f"cluster.machines: {machine.name} has {told}: install the same"
    return ""


def same_machine_fault(name: str, other: str) -> str:
    """Why two agents of these machines cannot both lend nodes to a job."""
    return (
        f"cluster.machines: {name} is the same machine as {other}: a machine has one agent, so name the nodes of both "
        "under one of them"
    )


async def check_servers(config: JobConfig, start: Start) -> None:
    """CannotStart when a server of the config has an older run or cannot be embedded. Away when it does not answer."""
    job = JobId(config.job)
    for key in ("nats_credentials", "redis_credentials"):
        if folder := getattr(config.servers, key):
            _check_credentials(Path(folder), job, key=f"servers.{key}")
    if config.servers.nats_url:
        await _check_nats(config.servers, job, start)
    else:
        _check_package(NATS)
    if config.servers.redis_url:
        await _check_redis(config.servers, job, start)
    else:
        _check_package(VALKEY)


async def check_engine(job: Job) -> None:
    """CannotStart when the engine cannot serve the model, or its environment has no version that Tidegate can drive."""
    rollout = job.config.rollout
    kind = kind_of(rollout)
    try:
        kind.check_model(job.model)
    except ValueError as error:
        raise CannotStart(f"rollout.engine={rollout.engine} cannot generate with this model: {error}") from error
    if (environment := kind.environment()) is not None:
        await _check_environment(environment)


async def _check_environment(of: Environment) -> None:
    named, package = f"{of.key}={of.python}", of.package
    try:
        process = await asyncio.create_subprocess_exec(
            *(of.python, "-I", "-c", f"import importlib.metadata; print(importlib.metadata.version({package!r}))"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )
    except OSError as error:
        raise CannotStart(f"{named} cannot be run ({error.strerror}): {of.remedy}") from error
    output, _ = await process.communicate()
    if process.returncode != 0:
        raise CannotStart(f"{named} has no package {package}: {of.remedy}")
    try:
        of.check_version(output.decode().strip())
    except ValueError as error:
        raise CannotStart(f"{named}: {error}; or {of.remedy}") from error


async def check_weights(job: Job) -> None:
    """CannotStart when the checkpoint's weights contradict its config in a way that no file header shows."""
    if job.checkpoint is None:
        return
    try:
        await asyncio.to_thread(check_copy, job.checkpoint)
    except ValueError as error:
        raise CannotStart(str(error)) from error


def masked(url: str) -> str:
    """The URL, or several with commas between, without user and password."""
    return _LOGIN.sub("***@", url)


def _check_credentials(folder: Path, job: JobId, *, key: str) -> None:
    for party in (Party.SCHEDULER, Party.JOB):
        try:
            found = Credential.load(folder / party).identity
        except CertsError as error:
            raise CannotStart(f"{key}={folder}: {error}") from error
        if found.party is not party or (party is Party.JOB and found.name != job):
            wanted = f"job {job}" if party is Party.JOB else f"a {party}"
            raise CannotStart(
                f"{key}={folder}: {folder / party} is the credential of {found}, not of {wanted}: issue it there with "
                f"tidegate certs issue {party} {job if party is Party.JOB else 'NAME'} --to {folder / party}"
            )


async def _check_nats(servers: ServersSection, job: JobId, start: Start) -> None:
    url, credential = servers.nats_url, servers.nats_credential(Party.SCHEDULER)
    for each in url.split(","):
        _check_scheme(each, key="servers.nats_url", schemes=("nats", "tls"))
    try:
        limits = BusLimits(deadline_s=ANSWER_TIMEOUT_S)
        bus = await NatsBus.connect(url, name="tidegate-preflight", limits=limits, credential=credential)
    except BusUnavailable as error:
        raise Away(f"servers.nats_url={masked(url)}: {error}; or leave it empty for an embedded one") from error
    try:
        if start is Start.RESUME:
            return
        async for _ in bus.events.read(job):
            raise CannotStart(_taken(job, f"NATS at {masked(url)}"))
    except JobNotOpen:
        # Nobody has run a job of this name there.
        return
    except BusUnavailable as error:
        raise Away(f"servers.nats_url={masked(url)}: {error}; JetStream has to be on (-js)") from error
    finally:
        await bus.close()


async def _check_redis(servers: ServersSection, job: JobId, start: Start) -> None:
    url, credential = servers.redis_url, servers.redis_credential(Party.SCHEDULER)
    try:
        store = redis_store(url, credential=credential, socket_timeout_s=ANSWER_TIMEOUT_S)
    except BadRedisUrl as error:
        raise CannotStart(f"servers.redis_url={masked(url)}: {error}") from error
    try:
        identity = await store.identity()
        if start is Start.RESUME or not identity.is_open:
            return
        await store.attach()
        if await store.load(job) is not None:
            raise CannotStart(_taken(job, f"Redis at {masked(url)}"))
    except StoreUnavailable as error:
        raise Away(
            f"servers.redis_url={masked(url)} does not answer within {ANSWER_TIMEOUT_S:g} s ({error.__cause__}): check "
            "the URL and that the server runs, or leave it empty for an embedded one"
        ) from error
    finally:
        await store.aclose()


def _check_scheme(url: str, *, key: str, schemes: tuple[str, ...]) -> None:
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in schemes and bool(parts.netloc or parts.path) and (parts.port is None or parts.port > 0)
    except ValueError:
        is_url = False
    if not is_url:
        raise CannotStart(f"{key}={masked(url)} is not a URL like {schemes[0]}://host:port")


def _check_package(kind: ServerKind) -> None:
    try:
        packaged_binary(kind)
    except ServerPackageMissing as missing:
        raise CannotStart(str(missing)) from missing


def _taken(job: JobId, where: str) -> str:
    return f"{where} has an older run of job {job}: go on with it (--resume), or give the config another job name"
