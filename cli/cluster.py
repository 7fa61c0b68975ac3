"""`tidegate up`, `down`: a cluster that stays on this machine.

The cluster of a folder of jobs (`--output-dir`) is in its `.cluster`. What asks its queue is in `cli.cluster_queue`.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from ipaddress import IPv4Address
from pathlib import Path

from cli import doctor
from cli.cluster_access import NoCluster, agent_pid, cluster_of, keeper_elsewhere, named
from cli.cluster_queue import paused_text
from cli.rows import Form, answer_text
from cli.usage import BadUsage
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.keepers import KEEPS, SILENT_S, Keepers, Term
from tidegate.cluster.kept_queue import Kept, KeptQueue
from tidegate.cluster.machines import Machines, far_machine, host_of, is_ipv4
from tidegate.cluster.placement import Room, placed_gpus
from tidegate.cluster.slots import Slots
from tidegate.cluster.submissions import Submission
from tidegate.config.sections.job import ClusterSection
from tidegate.job import command_in
from tidegate.launcher.lock import lock_record
from tidegate.launcher.services import service_env
from tidegate.ports.rpc import PeerUnavailable
from tidegate.runtime import handover
from tidegate.runtime.cuda import cuda_fault
from tidegate.runtime.interfaces import interface_of
from tidegate.runtime.next_program import NextProgram
from tidegate.short_lists import counted, first_few
from tidegate.sizes import size_text
from tidegate.types import NodeId
from tidegate.v1 import cluster_pb2

UP_TIMEOUT_S = 60.0
"""It takes 2 s. A store with a long history is read again first."""
DOWN_TIMEOUT_S = 120.0
_LOOK_AGAIN_S = 0.05
MOST_SLOTS = 1024


def add_agent_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments of `tidegate agent`."""
    parser.add_argument("--listen", required=True, metavar="HOST:PORT", help="an address of this machine")
    help_ = "the credential of this machine, as `tidegate certs issue node NAME` makes it"
    parser.add_argument("--credentials", type=Path, required=True, metavar="FOLDER", help=help_)
    help_ = "the same as the jobs' runtime.host_memory_root (default: /dev/shm)"
    parser.add_argument("--host-memory-root", type=Path, default=Path("/dev/shm"), metavar="FOLDER", help=help_)
    help_ = "cuda: it lends its GPUs, as `tidegate up --device cuda` asks for them (default: cpu)"
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help=help_)
    help_ = "for what its helper prints (default: nowhere)"
    parser.add_argument("--log", type=Path, default=Path(os.devnull), metavar="FILE", help=help_)


def add_machine_arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `tidegate up` for nodes on other machines."""
    help_ = "another machine, and where its `tidegate agent` listens, as in b=10.0.0.8:7400; once for each"
    parser.add_argument("--machine", action="append", default=[], metavar="NAME=HOST:PORT", help=help_)
    parser.add_argument("--address", metavar="HOST", help="this machine's address, where the others reach it")
    help_ = "the operator's credential that the agents ask for"
    parser.add_argument("--machine-credentials", type=Path, metavar="FOLDER", help=help_)
    help_ = "the folder of gates, the same path on a local disk of each machine (default: with the jobs)"
    parser.add_argument("--gate-root", type=Path, metavar="FOLDER", help=help_)
    help_ = "keep the cluster once no other machine does: the same command on each machine, but for its --address"
    parser.add_argument("--standby", action="store_true", help=help_)
    help_ = "this machine's own credential, as its agent has it: commands of other machines are answered then"
    parser.add_argument("--node-credentials", type=Path, metavar="FOLDER", help=help_)
    help_ = "where those are answered, at --address, so that machines without the jobs' folder can call (default: any)"
    parser.add_argument("--command-port", type=_port, default=0, metavar="PORT", help=help_)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and 0 < int(text) < 2**16):
        raise argparse.ArgumentTypeError(f"{text} is no port: give one from 1 to {2**16 - 1}, such as 7401")
    return int(text)


class NotUp(RuntimeError):
    """The cluster did not start, or did not end."""


def nodes_of(words: list[str]) -> tuple[dict[NodeId, int], dict[NodeId, str]]:
    """["n0=8", "n1=4@b"] as slots by node, and the other machines by node. BadUsage."""
    found: dict[NodeId, int] = {}
    machines: dict[NodeId, str] = {}
    for word in words:
        node, equals, rest = word.partition("=")
        count, at, machine = rest.partition("@")
        is_count = count.isascii() and count.isdecimal() and 1 <= int(count) <= MOST_SLOTS
        if not (equals and node and is_count and bool(at) == bool(machine)):
            raise BadUsage(
                f"{word!r} is no NODE=SLOTS with 1 to {MOST_SLOTS} slots, as in n0=8, or n1=8@b on machine b"
            )
        if NodeId(node) in found:
            raise BadUsage(f"node {node} is named twice")
        found[NodeId(node)] = int(count)
        if machine:
            machines[NodeId(node)] = machine
    return found, machines


def machines_of(args: argparse.Namespace, machine_by_node: Mapping[NodeId, str]) -> tuple[Machines, str]:
    """The other machines, and the name of this one. BadUsage where the options and the nodes do not fit each other."""
    agents: dict[str, str] = {}
    for word in args.machine:
        name, equals, agent = word.partition("=")
        if not (equals and name and agent):
            raise BadUsage(f"--machine {word}: give a name and the address of its agent, as in b=10.0.0.8:7400")
        if name in agents:
            raise BadUsage(f"--machine {name} is given twice")
        agents[name] = agent
    if unknown := sorted({*machine_by_node.values()} - {*agents}):
        raise BadUsage(f"no --machine names {', '.join(unknown)}: give it, as in --machine {unknown[0]}=10.0.0.8:7400")
    if idle := sorted({*agents} - {*machine_by_node.values()}):
        raise BadUsage(f"--machine {', '.join(idle)} has no node: give it some, as in n1=8@{idle[0]}")
    needed = {
        "--address": args.address,
        "--machine-credentials": args.machine_credentials,
        "--gate-root": args.gate_root,
    }
    if args.command_port and not args.node_credentials:
        raise BadUsage("--command-port needs --node-credentials too: who calls has to know who answers")
    if args.node_credentials and not args.address:
        raise BadUsage("--node-credentials needs --address too: there the commands of other machines are answered")
    if args.standby and (missing := [option for option, value in needed.items() if not value]):
        raise BadUsage(f"--standby needs {', '.join(missing)} too, and each machine's agent by --machine")
    if not agents:
        alone = {"--gate-root", *(["--address"] if args.node_credentials else [])}
        if given := [option for option, value in needed.items() if value and option not in alone]:
            raise BadUsage(f"{', '.join(given)}: only a cluster with nodes on other machines (--machine) needs it")
        gate_root = str(args.gate_root.resolve()) if args.gate_root else ""
        if not args.node_credentials:
            return Machines(gate_root=gate_root), ""
        try:
            _check_address("--address", args.address)
            interface_of(args.address)
        except ValueError as error:
            raise BadUsage(str(error)) from error
        _check_own(args.node_credentials)
        return Machines(args.address, gate_root=gate_root), ""
    if missing := [option for option, value in needed.items() if not value]:
        raise BadUsage(f"--machine needs {', '.join(missing)} too")
    nodes_of_machine = {name: [node for node, of in machine_by_node.items() if of == name] for name in agents}
    try:
        far = tuple(far_machine(name, agent, nodes_of_machine[name]) for name, agent in agents.items())
        hosts = {"--address": args.address} | {f"--machine {each.name}": host_of(each.agent) for each in far}
        for option, host in hosts.items():
            _check_address(option, host)
        interface_of(args.address)
        if (who := Credentials(args.machine_credentials).identity).party is not Party.OPERATOR:
            raise ValueError(
                f"--machine-credentials {args.machine_credentials} is of {who}, and an operator's is needed"
            )
    except (ValueError, CertsError) as error:
        raise BadUsage(str(error)) from error
    if args.standby and not args.gate_root.is_dir():
        raise BadUsage(f"--gate-root {args.gate_root}: there is no such folder; make it, on a local disk")
    credentials, gate_root = (str(path.resolve()) for path in (args.machine_credentials, args.gate_root))
    here = {each.name for each in far if host_of(each.agent) == args.address}
    if len(here) > 1 or (args.standby and not here):
        raise BadUsage(
            f"--address {args.address}: {len(here)} of the machines are there; --machine names each once, this one too"
        )
    if args.node_credentials:
        _check_own(args.node_credentials)
        _check_together(args.node_credentials, args.machine_credentials, here)
    others = tuple(each for each in far if each.name not in here)
    return Machines(args.address, credentials, gate_root, others), next(iter(here), "")


def _check_address(option: str, host: str) -> None:
    """ValueError."""
    if not is_ipv4(host) or IPv4Address(host).is_loopback:
        raise ValueError(f"{option}: give an IPv4 address that the other machines reach, not {host}")


def _check_own(folder: Path) -> None:
    """BadUsage where it is no machine's credential."""
    try:
        own = Credentials(folder).identity
    except CertsError as error:
        raise BadUsage(f"--node-credentials: {error}") from error
    if own.party is not Party.NODE:
        raise BadUsage(f"--node-credentials {folder} is of {own}, and a machine's is needed: certs issue node NAME")


def _check_together(folder: Path, operator: Path, names: Collection[str]) -> None:
    """BadUsage where another authority has issued the operator's, or another machine is named so. `names`: none where
    this machine has none besides its credential."""
    try:
        own, cluster = Credentials(folder).identity, Credentials(operator).identity.cluster
        has_one_authority = Credentials(folder).now().ca == Credentials(operator).now().ca
    except CertsError as error:
        raise BadUsage(str(error)) from error
    if not has_one_authority:
        raise BadUsage(f"--node-credentials {folder} is of another authority than --machine-credentials {operator}")
    wanted = [Identity(cluster, Party.NODE, name) for name in names]
    if wanted and own not in wanted:
        raise BadUsage(f"--node-credentials {folder} is the credential of {own}, not of {', '.join(map(str, wanted))}")


def up(args: argparse.Namespace, output_dir: Path, form: Form) -> int:
    """Starts the cluster's agent, and returns once the cluster takes jobs. In the foreground this process becomes the
    agent. NotUp."""
    nodes, machine_by_node = nodes_of(args.node)
    folder, slots = ClusterFolder.of(output_dir), Slots(nodes, args.device, args.slots_per_gpu)
    machines, own_name = machines_of(args, machine_by_node)
    takes_place = handover.is_handed_over()
    if not takes_place and (machines.far or args.standby) and Path(machines.gate_root).is_relative_to(output_dir):
        raise BadUsage(
            f"--gate-root {machines.gate_root} is in --output-dir {output_dir}, which the machines share: gates are on "
            "a disk of each machine, so name another folder"
        )
    if (pid := agent_pid(folder)) is not None and not takes_place:
        where = f"agent {pid}" if pid else "on another machine"
        raise NotUp(
            f"a cluster is up in {output_dir} already ({where}): end it there with {command_in(output_dir, 'down')}"
        )
    of_a_job = ClusterSection.model_construct(
        nodes=slots.nodes, device=slots.device, slots_per_gpu=slots.per_gpu, machines=machines.far
    )
    # What the cluster uses already is not asked for again: jobs have it.
    if not takes_place and (fault := cuda_fault(of_a_job)):
        raise NotUp(fault)
    words = ["--slots", json.dumps(asdict(slots)), "--machines", json.dumps(machines.to_json())]
    if args.standby:
        try:
            folder.share(Path(machines.gate_root))
        except ValueError as error:
            raise NotUp(str(error)) from error
        except OSError as error:
            raise NotUp(f"--gate-root and --output-dir have to be folders that can be written: {error}") from error
        from tidegate.launcher.claim import write_private

        cluster = _digest(slots, machine_by_node, args.machine)
        if not takes_place:
            _check_keeper(folder, own_name, cluster)
        write_private(folder.operator, machines.credentials)
        words += ["--keeper", own_name, "--cluster", cluster]
    elif folder.is_of_several:
        if (keeper := keeper_elsewhere(folder)) is not None:
            raise NotUp(
                f"several machines may keep the cluster of {output_dir}, and {named(keeper, folder)}: give --standby, "
                f"or end it there; if that machine is lost, remove {folder.link}"
            )
        folder.keep_alone()
    if args.node_credentials:
        if not takes_place:
            _check_port(args.address, args.command_port)
        words += ["--node-credentials", str(args.node_credentials.resolve())]
        words += ["--command-port", str(args.command_port)]
    if not takes_place:
        _check_folder(folder, slots, output_dir)
    text = ", ".join(f"{node} with {counted(count, 'slot')}" for node, count in slots.nodes.items())
    env = {**os.environ, **(set_here := service_env(args.device))}
    outer = {name: os.environ.get(name) for name in set_here}
    words += ["--next-program", NextProgram(args.program, args.words, outer).to_json()]
    command = [sys.executable, "-m", "services.node", "--output-dir", str(output_dir), *words]
    if args.foreground or takes_place:
        how = "goes on under this program" if takes_place else "begins"
        print(f"tidegate: the cluster of {output_dir} {how}: {text}; SIGTERM ends it", file=sys.stderr, flush=True)
        os.execve(command[0], command, env)
    log = (folder.state if args.standby else folder.logs) / "agent.out"
    log.unlink(missing_ok=True)
    with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as out:
        agent = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
    keeper = _until_up(folder, agent, log)
    answer = {"folder": str(output_dir), "agent": agent.pid, "keeper": own_name or "this machine", **asdict(slots)}
    told = f"the cluster of {output_dir} is up: {text}; submit jobs with {command_in(output_dir, 'submit', 'JOB.yaml')}"
    if keeper is not None:
        answer["keeper"] = keeper.name
        told = f"{keeper.name} ({keeper.address}) keeps the cluster of {output_dir}; {own_name} stands by"
    if args.command_port:
        name = Credentials(args.node_credentials).identity.name
        own = f"{name}={args.address}:{args.command_port}"
        answer["commands"] = own
        told += f"\nother machines call it after tidegate context add NAME --keeper {own} --operator FOLDER"
    print(answer_text(answer, told, form))
    return 0


def _check_folder(folder: ClusterFolder, slots: Slots, output_dir: Path) -> None:
    """NotUp where the cluster could not write its files. Says what a person should know of the folder."""
    try:
        folder.make()
        folder.logs.mkdir(mode=0o700, exist_ok=True)
        folder.check_writing()
    except OSError as error:
        raise NotUp(f"the cluster could not write its files: {error}; make room there, or mend the folder") from error
    if warning := _disk_warning(folder):
        print(f"tidegate: {warning}", file=sys.stderr)
    with suppress(OSError):  # the agent tells it
        for note in notes_of(KeptQueue(folder.queue).read(), slots, output_dir):
            print(f"tidegate: {note}", file=sys.stderr)


def _check_port(address: str, port: int) -> None:
    """NotUp where something else listens there."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            raise NotUp(f"--command-port {port}: {address}:{port} cannot be used: {error}; give another one") from error


def notes_of(kept: Kept, slots: Slots, output_dir: Path) -> list[str]:
    """What a person should know of the queue of a cluster that begins."""
    notes = list(kept.faults)
    if kept.paused:
        notes.append(paused_text(kept.paused, output_dir))
    if drained := sorted(kept.drained.keys() & slots.nodes):
        again = command_in(output_dir, "drain", "NODE", "--undo")
        notes.append(f"drained, and without jobs until {again}: {first_few(drained, most=8)}")
    waiting = [each for each in (Submission.parse(job.record) for job in kept.jobs.values()) if not each.end]
    if never := sorted(each.job for each in waiting if placed_gpus(each.needs, Room.whole(slots.nodes)) is None):
        notes.append(f"without room in this cluster, and waiting for a larger one: {first_few(never, most=8)}")
    return notes


def _disk_warning(folder: ClusterFolder) -> str:
    """Where a job may have no room for its streams. Empty: one has. Jobs may ask for less."""
    needed, there = doctor.stream_bytes(), folder.state if folder.state.is_dir() else folder.root
    free = shutil.disk_usage(there).free
    if free >= needed:
        return ""
    option = "--gate-root" if folder.is_of_several else "--output-dir"
    found = f"{there} has {size_text(free)} free, and NATS reserves {size_text(needed)} there for each job"
    return f"{found}: make room, or name another {option}"


def _digest(slots: Slots, machine_by_node: Mapping[NodeId, str], machines: Iterable[str]) -> str:
    """What has to be the same on all machines that may keep a cluster, as a short text."""
    text = json.dumps([asdict(slots), machine_by_node, sorted(machines)], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _check_keeper(folder: ClusterFolder, own_name: str, cluster: str) -> None:
    """NotUp where another machine keeps the cluster now, and was told of other nodes or machines."""
    with suppress(OSError):
        keepers = Keepers(folder.keepers)
        term = keepers.newest()
        if term is None or term.has_ended or term.name == own_name or not term.is_other_than(cluster):
            return
        if keepers.silent_s(term.number) < SILENT_S:
            raise NotUp(
                f"{term.name} ({term.address}) keeps the cluster of {folder.root.parent} with other nodes or machines: "
                "give the same NODE=SLOTS and --machine on all machines, or end it on all and start it anew"
            )


def _until_up(folder: ClusterFolder, agent: subprocess.Popen[bytes], log: Path) -> Term | None:
    """The term of another machine that keeps the cluster, while this one stands by; None: this one does. NotUp."""
    deadline_s = time.monotonic() + UP_TIMEOUT_S
    while agent.poll() is None and time.monotonic() < deadline_s:
        with suppress(NoCluster, PeerUnavailable):
            keeps = _keeps(folder, agent.pid)
            if keeps == 0 and (keeper := keeper_elsewhere(folder)) is not None:
                return keeper
            if keeps == 1:
                asyncio.run(answers(folder))
                return None
        time.sleep(_LOOK_AGAIN_S)
    said = log.read_text(errors="replace").strip().splitlines()
    how = "gave no answer" if agent.poll() is None else f"ended with status {agent.returncode}"
    if agent.poll() is None:
        agent.terminate()
    raise NotUp(f"the cluster's agent {how}: {said[-1] if said else f'see {folder.logs}'}")


def _keeps(folder: ClusterFolder, pid: int) -> int | None:
    """1: this agent keeps the cluster. 0: it waits for its turn. None: it has not begun. Nobody's lock is tried: the
    agent may be about to."""
    with suppress(FileNotFoundError), folder.lock.open("rb") as lock:
        record = lock_record(lock.fileno())
        if record.get("pid") == pid:
            return record.get(KEEPS)
    return None


async def answers(folder: ClusterFolder) -> None:
    async with cluster_of(folder) as cluster:
        await cluster.ListSubmissions(cluster_pb2.ListSubmissionsRequest())


def down(output_dir: Path, form: Form) -> int:
    """Ends the cluster: jobs that run are interrupted, and go on after the next `up`. NoCluster, NotUp."""
    folder = ClusterFolder.of(output_dir)
    pid = agent_pid(folder)
    if pid is None:
        raise NoCluster(f"no cluster is up in {output_dir}")
    if not pid:
        raise NotUp(f"the cluster of {output_dir} is up on another machine: end it there")
    with suppress(ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
            if not select.select([pidfd], [], [], DOWN_TIMEOUT_S)[0]:
                raise NotUp(f"the cluster's agent {pid} has not ended within {DOWN_TIMEOUT_S:g} s: see {folder.logs}")
        finally:
            os.close(pidfd)
    again = command_in(output_dir, "up", "NODE=SLOTS")
    text = f"the cluster of {output_dir} is down; {again}, with the options that it had, goes on with its queue"
    if folder.is_of_several:
        text = (
            f"this machine neither keeps the cluster of {output_dir} nor stands by any more; one that stands by goes on"
        )
    print(answer_text({"folder": str(output_dir), "state": "down"}, text, form))
    return 0
