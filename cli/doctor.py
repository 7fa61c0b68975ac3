"""Checks whether this machine has everything that a job needs. Each finding is ok, warn or bad, with its remedy.

- `bad`: no job will run.
- `warn`: a job will be slow, small or short.

The checks start and change nothing, except that they ask each embedded server's binary for its version, and torch for
its devices, in processes of their own.
"""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from ipaddress import IPv6Address, ip_address
from itertools import pairwise
from pathlib import Path

import psutil

from cli.cluster_access import OPERATOR_VARIABLE
from cli.contexts import operators
from services.rollout.sglang import keeper
from tidegate.certs.authority import SOON_DAYS, CertsError, Credential
from tidegate.cluster.machines import Machines
from tidegate.config.base import OUTPUT_DIR
from tidegate.config.job_config import JobConfig
from tidegate.config.sections.job import RuntimeSection
from tidegate.json_text import parse_json
from tidegate.launcher.left_memory import left_by_launchers, taken_bytes
from tidegate.runtime import handover
from tidegate.runtime.cuda import CudaDevice, NoCuda, cuda_devices
from tidegate.runtime.server_kinds import NATS, VALKEY, ServerKind, ServerPackageMissing, packaged_binary
from tidegate.sizes import size_text
from tidegate.types import Role

_PACKAGES = ("torch", "megatron-core", "grpcio", "nats-py", "redis", "tokenizers", "pydantic", "rich")
_LEAST_MEMORY_BYTES = 256 * 2**20
"""The least free space of /dev/shm. The demo's snapshots take under 10 MB; a container's default of 64 MB is little."""
_LEAST_PYTHON = (3, 11)
_LEAST_FILES = 1024
_LEAST_CORES = 2
_LEAST_GPUS = len(Role)
"""Each component of a job has a slot or more."""
_VERSION_TIMEOUT_S = 10.0
_MODULES = ("services.", "tidegate.")
_SGLANG_KEEPER = f"/{keeper.__name__.replace('.', '/')}.py"
"""The end of its path, which another release has elsewhere. An SGLang server that Tidegate started is its child."""


class Health(StrEnum):
    OK = "ok"
    WARN = "warn"
    BAD = "bad"


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding. `remedy` is empty when all is well."""

    check: str
    health: Health
    found: str
    remedy: str = ""


def examine(
    *,
    host_memory_root: Path = Path("/dev/shm"),
    output_dir: Path = Path(OUTPUT_DIR),
    job_credentials: Collection[Path] = (),
) -> list[Finding]:
    """All findings, in a fixed order. `output_dir` need not exist yet. `job_credentials`: the folders that a job's
    config names. Those of contexts, of `TIDEGATE_OPERATOR` and of this user's agents are looked at too."""
    checks: list[Callable[[], Finding]] = [
        _python,
        _platform,
        *(lambda name=name: _package(name) for name in _PACKAGES),
        _gpus,
        lambda: _server(NATS),
        lambda: _server(VALKEY),
        lambda: host_memory(host_memory_root),
        lambda: disk(output_dir),
        _open_files,
        _cores,
        _threads,
        listeners,
    ]
    known = {*job_credentials, *operators(), *credentials_of(psutil.process_iter())}
    if named := os.environ.get(OPERATOR_VARIABLE):
        known.add(Path(named))
    return [*(check() for check in checks), *map(credential, sorted(known))]


def credential(folder: Path) -> Finding:
    check = f"credential {folder}"
    try:
        found = Credential.load(folder)
    except CertsError as error:
        what, _, remedy = str(error).rpartition(": ")  # each of its texts ends with the remedy
        return Finding(check, Health.WARN, what, remedy)
    if found.days_left() < SOON_DAYS:
        return Finding(check, Health.WARN, found.until(), found.renewal())
    return Finding(check, Health.OK, f"{found.days_left()} days left")


def credentials_of(processes: Iterable[psutil.Process]) -> set[Path]:
    """The folders that the command lines of agents name. Root sees those of all users, others their own."""
    found = set[Path]()
    for process in processes:
        with suppress(psutil.Error):
            if os.getuid() in (0, process.uids().real) and handover.is_agent(command := process.cmdline()):
                given = _given(command)
                folders = [given.get("--credentials", ""), given.get("--node-credentials", "")]
                with suppress(ValueError, LookupError):
                    folders.append(Machines.of(parse_json(given.get("--machines", "{}"))).credentials)
                found |= {Path(process.cwd(), folder) for folder in folders if folder}
    # A container's agent has files of its own.
    return {each for each in found if each.is_dir()}


def listeners(processes: Iterable[psutil.Process] | None = None, *, own_uid: int | None = None) -> Finding:
    """Checks that no process of Tidegate listens beyond loopback, and beyond the addresses that those processes were
    told to listen at. Without `processes` it looks at all of this machine. Root sees those of all users, others their
    own."""
    own_uid = os.getuid() if own_uid is None else own_uid
    told, beyond = set[str](), set()
    ours = _ours(psutil.process_iter() if processes is None else processes, own_uid)
    for process in ours:
        with suppress(psutil.Error):
            told |= _addresses_in(process.cmdline())
            open_at = [each.laddr for each in process.net_connections("inet") if each.status == psutil.CONN_LISTEN]
            listening = {(_as_ipv4(at.ip), at.port, process.pid) for at in open_at}
            beyond |= {each for each in listening if not ip_address(each[0]).is_loopback}
    elsewhere = [f"{ip}:{port} (pid {pid})" for ip, port, pid in sorted(beyond) if ip not in told]
    if elsewhere:
        remedy = "end these processes, or keep the network to those whom you trust: see docs/security.md"
        return Finding("listeners", Health.WARN, f"beyond loopback: {', '.join(elsewhere)}", remedy)
    where = ", ".join(sorted({ip for ip, _, _ in beyond}))
    where = f"on loopback and on {where}, as they were told" if where else "all on loopback"
    none = f"no process of Tidegate {'of this user ' if own_uid else ''}runs"
    return Finding("listeners", Health.OK, f"{len(ours)} processes of Tidegate, {where}" if ours else none)


def _ours(processes: Iterable[psutil.Process], own_uid: int) -> set[psutil.Process]:
    """Those of Tidegate that this user sees, SGLang's servers with all their children."""
    found, servers = set[psutil.Process](), set[str]()
    for kind in (NATS, VALKEY):
        with suppress(ServerPackageMissing):
            servers.add(str(packaged_binary(kind)))
    for process in processes:
        with suppress(psutil.Error):
            if own_uid not in (0, process.uids().real):
                continue
            command = process.cmdline()
            if any(word.endswith(_SGLANG_KEEPER) for word in command):
                found |= {process, *process.children(recursive=True)}
            elif _is_ours(command, servers):
                found.add(process)
    return found


def _addresses_in(command: Sequence[str]) -> set[str]:
    """The addresses at which a command line tells its process to listen, itself or by its config."""
    given = _given(command)
    found = {given.get("--listen", "").rpartition(":")[0]}
    with suppress(OSError, ValueError, LookupError):
        found.add(Machines.of(parse_json(given.get("--machines", "{}"))).address)
    with suppress(OSError, ValueError):
        found |= {*JobConfig.read(Path(given.get("--config", ""))).cluster.addresses.values()}
    return found - {"", "0.0.0.0"}


def _given(command: Sequence[str]) -> dict[str, str]:
    """What follows each word of a command line."""
    words = [part for word in command for part in (word.split("=", 1) if word.startswith("--") else [word])]
    return dict(pairwise([*words, ""]))


def _as_ipv4(address: str) -> str:
    """An IPv4 address that a socket of IPv6 listens on is that address."""
    found = ip_address(address)
    return str((isinstance(found, IPv6Address) and found.ipv4_mapped) or found)


def _is_ours(command: Sequence[str], servers: Collection[str]) -> bool:
    """Whether it is that of a service, an agent, a worker or an embedded server. `servers`: their programs."""
    first, *words = command or ("",)
    if first.startswith("tidegate: "):
        return True
    return first in servers or handover.is_agent(words) or any(word.startswith(_MODULES) for word in words)


def gpus(devices: Sequence[CudaDevice]) -> Finding:
    """Checks the CUDA devices of a machine that has some."""
    names = sorted({f"{each.name} of {each.total_bytes / 2**30:.0f} GiB" for each in devices})
    found = f"{len(devices)}: {', '.join(names)}"
    if len(devices) < _LEAST_GPUS:
        remedy = (
            f"set cluster.slots_per_gpu so that they make {_LEAST_GPUS} slots or more; slots that share a GPU are for "
            "trials, not for speed"
        )
        return Finding("GPUs", Health.WARN, found, remedy)
    return Finding("GPUs", Health.OK, found)


def host_memory(root: Path) -> Finding:
    check = f"host memory {root}"
    if not (root.is_dir() and os.access(root, os.W_OK)):
        return Finding(check, Health.BAD, "not writable", "set runtime.host_memory_root to a folder that is")
    free_bytes = shutil.disk_usage(root).free
    found = f"{free_bytes / 2**20:.0f} MiB free"
    if left := sorted(left_by_launchers(root)):
        found += f"; jobs whose launcher was killed left {size_text(sum(map(taken_bytes, left)))}"
        return Finding(check, Health.WARN, found, f"start them again, or rm -r {' '.join(map(str, left))}")
    if free_bytes < _LEAST_MEMORY_BYTES:
        remedy = f"give it {_LEAST_MEMORY_BYTES // 2**20} MiB (docker run --shm-size), or set runtime.host_memory_root"
        return Finding(check, Health.WARN, found, remedy)
    return Finding(check, Health.OK, found)


def disk(output_dir: Path, *, least_bytes: int | None = None) -> Finding:
    """Checks the disk of the jobs' folders, which has the streams of the embedded NATS too.

    None for `least_bytes` means: as much as the streams of a job reserve by default.
    """
    needed = stream_bytes() if least_bytes is None else least_bytes
    folder = next(path for path in (output_dir.resolve(), *output_dir.resolve().parents) if path.is_dir())
    check, free_bytes = f"disk of {output_dir}", shutil.disk_usage(folder).free
    found = f"{free_bytes / 2**30:.1f} GiB free"
    if free_bytes < needed:
        remedy = (
            f"free {needed / 2**30:.1f} GiB, which the streams of a job reserve, name another --output-dir, or lower "
            "runtime.samples_max_bytes"
        )
        return Finding(check, Health.WARN, found, remedy)
    return Finding(check, Health.OK, found)


def stream_bytes() -> int:
    """What NATS reserves for the streams of a job, by default."""
    default = RuntimeSection()
    return default.events_max_bytes + default.samples_max_bytes + default.dead_max_bytes


def _python() -> Finding:
    found = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info[:2] < _LEAST_PYTHON:
        return Finding("Python", Health.BAD, found, "install Python 3.11 or newer and make a new environment")
    return Finding("Python", Health.OK, found)


def _platform() -> Finding:
    if not hasattr(os, "pidfd_open"):
        return Finding("Linux", Health.BAD, sys.platform, "use Linux 5.4 or newer: processes are watched by pidfd")
    return Finding("Linux", Health.OK, os.uname().release)


def _package(name: str) -> Finding:
    try:
        return Finding(f"package {name}", Health.OK, version(name))
    except PackageNotFoundError:
        return Finding(f"package {name}", Health.BAD, "not installed", "run `make demo`, which installs it")


def _server(kind: ServerKind) -> Finding:
    check = f"embedded {kind.name}"
    try:
        binary = packaged_binary(kind)
        answer = subprocess.run(
            [binary, "--version"], capture_output=True, text=True, timeout=_VERSION_TIMEOUT_S, check=True
        )
    except ServerPackageMissing as missing:
        return Finding(check, Health.BAD, "not found", str(missing))
    except (OSError, subprocess.SubprocessError) as error:
        return Finding(check, Health.BAD, f"does not run: {error}", f"reinstall {kind.package} for this machine")
    return Finding(check, Health.OK, answer.stdout.strip().splitlines()[0])


def _gpus() -> Finding:
    """None at all is fine: jobs then run on CPU slots."""
    try:
        return gpus(cuda_devices())
    except NoCuda as none:
        return Finding("GPUs", Health.OK, f"none, jobs run on CPU slots: {none}")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < _LEAST_FILES and soft != resource.RLIM_INFINITY:
        remedy = f"ulimit -n {_LEAST_FILES} (the hard limit is {hard})"
        return Finding("open files", Health.WARN, f"{soft} allowed", remedy)
    return Finding("open files", Health.OK, f"{soft} allowed")


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count < _LEAST_CORES:
        remedy = f"give it {_LEAST_CORES}: the demo's 8 slots are slow on one"
        return Finding("cores", Health.WARN, str(count), remedy)
    return Finding("cores", Health.OK, str(count))


def _threads() -> Finding:
    """The launcher pins each slot to one thread. A different setting of the shell has no effect on a job."""
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads not in ("", "1"):
        remedy = "nothing to do for a job: the launcher gives each slot one thread; unset it for your own scripts"
        return Finding("torch threads", Health.WARN, f"OMP_NUM_THREADS={threads}", remedy)
    return Finding("torch threads", Health.OK, "one a slot")
