"""The agent of a machine that lends its nodes to jobs which are started elsewhere.

    tidegate agent --listen HOST:PORT --credentials FOLDER [--host-memory-root FOLDER]

It runs a fork server and three instances for each of a job's nodes here: a caller names a node and a role, and the
agent makes the command. A job's config names programs too (rewards, SGLang's Python), so who may call is as good as
this user. The job's config and logs are on storage that all machines share. Its folder in host memory, with the
credential of its processes, is this machine's: the first process of the job makes it, the last one removes it.

Asked by SIGUSR2, the agent takes its program anew, which may be of another release. Before, it tells its callers that
their processes live on, and they call again for them (`tidegate.runtime.handover`).

Invariants:
- A process lives as long as the call that started it. [test_machine: ends_with_its_call]
- One whose agent takes its program anew lives on for the next call, and ends where none comes within `KEPT_S`.
  [test_machine_reload: goes_on_with_its_process] [test_machine_reload: that_nobody_asks_for]
- A process is of its job's release, also where the agent has another one.
  [test_machine_reload: of_the_release_of_its_job]
- A stop while it tells its callers ends all processes in order. [test_machine_reload: a_stop_while]
- Who calls and is silent for `LOST_S` is gone. [test_machine: a_silent_caller]
- A process of an instance starts when the one before it is gone. [test_machine: waits_for_the_one_before]
  [test_machine: cancelled_again_and_again]
- Nothing is written but the job's credential in host memory, and the log. [test_machine: nothing_is_written_outside]
  [test_machine: for_gates_makes_nothing]
- Nobody else reads the credential. [test_machine: of_another_user] [test_machine: has_the_credential_for_itself]
- A request that cannot run here is refused with the reason, and leaves nothing. [test_machine: what_cannot_run_here]
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import grpc
import structlog

from services.node.job_memories import JobMemories
from services.node.machine_left import Kept, MachineLeft
from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Party
from tidegate.codec import encode_gate_state
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.gate import Gate, GateState
from tidegate.job import JobFolder
from tidegate.launcher.services import FORKED, fork_server_env, forkserver_command, service_env
from tidegate.logs import configure_logging
from tidegate.machines import BEAT_S, LOST_S, fork_server_socket, own_modules, release
from tidegate.runtime import handover
from tidegate.runtime.cuda import CudaDevice, NoCuda, cuda_devices
from tidegate.runtime.interfaces import NotThisMachine, interface_of
from tidegate.runtime.inventory import this_machine
from tidegate.runtime.next_program import NO_PROGRAM, NextProgram
from tidegate.runtime.processes import ServiceSpec, StartChild, Supervisor, reap_orphans
from tidegate.runtime.service import STOP_GRACE_S, stop_signal
from tidegate.runtime.spawner import Spawner
from tidegate.types import NodeId, Role, job_id
from tidegate.v1 import machine_pb2, machine_pb2_grpc

_STOP_S = 10.0
KEPT_S = 15.0
"""How long a process lives on without a caller, while its agent takes its program anew, which takes 3 s on a quiet
machine. With the time in which it ends it is gone before its job goes on elsewhere.
[test_machine_reload: before_its_job]"""
_REAPS_AFTER_S = 1.0
_TOLD_S = 5.0
"""The time to tell all callers. One that is not told takes its process for gone."""
Requests = AsyncIterator[machine_pb2.RunProcessRequest]


class _Process:
    """A process of a job, whoever calls for it. `free` gives back what it has once it is gone."""

    def __init__(self, memory: Path, name: str, pid: int, supervisor: Supervisor, free: AsyncExitStack) -> None:
        self.memory = memory
        self.name = name
        self.pid = pid
        self.supervisor = supervisor
        self.free = free
        self.told = asyncio.Event()
        """Its caller knows that it is kept."""

    def kept(self) -> Kept:
        service = next(iter(self.supervisor.watched()), None)
        return Kept(self.memory, service, tuple(self.supervisor.untold_ends()), self.name, self.pid)


class MachineServicer(machine_pb2_grpc.MachineServicer):
    def __init__(
        self,
        start_child: StartChild | None,
        host_memory_root: Path,
        devices: Sequence[CudaDevice] = (),
        *,
        left: MachineLeft | None = None,
        spawner: int | None = None,
    ) -> None:
        """`devices`: those that jobs may use. `left`: by the agent's program before. `spawner`: the pid of who starts
        processes."""
        self._start_child = start_child
        self._devices = devices
        left = left or MachineLeft()
        self._memories = JobMemories(host_memory_root, left.credentials)
        self._running: set[tuple[Path, str]] = set()
        """By the job's folder in host memory, and name."""
        self._called: set[_Process] = set()
        self._uncalled: dict[int, _Process] = {}
        """Those that the program before has left, by pid, until somebody calls for them."""
        self._ending: set[asyncio.Task[None]] = set()
        self._supervisors: set[Supervisor] = set()
        self.looks_at_next_program = False
        """A child of this process does then, which nobody else may reap."""
        self._spawner = set() if spawner is None else {spawner}
        self._gone = asyncio.Event()
        self._leaving = asyncio.Event()
        self._log = structlog.get_logger("agent")
        self._left = left

    async def take_over(self) -> None:
        """Takes the processes that the program before has left. Call it before the first call comes."""
        for kept in self._left.processes:
            place = (kept.memory, kept.name)
            self._running.add(place)
            free = AsyncExitStack()
            free.callback(self._free, place)
            await free.enter_async_context(self._memories.of_kept(kept.memory))
            supervisor = Supervisor(self._start_child, untold=kept.ends)
            self._supervisors.add(supervisor)
            if kept.service is not None:
                supervisor.watch(kept.service)
            free.callback(self._log.info, "process gone", memory=kept.memory.name, name=kept.name)
            free.callback(self._reap, supervisor)
            free.push_async_callback(supervisor.aclose)
            self._uncalled[kept.pid] = _Process(kept.memory, kept.name, kept.pid, supervisor, free)
        if self._uncalled:
            self._log.info("processes kept", number=len(self._uncalled))
            remaining_s = max(0.0, self._left.kept_until_s - time.monotonic())
            asyncio.get_running_loop().call_later(remaining_s, self._end_uncalled)

    def begin(self, listens: str) -> None:
        """Removes what killed processes left in host memory. Call it once this agent listens there."""
        self._memories.begin(listens)

    def _end_uncalled(self) -> None:
        for process in self._uncalled.values():
            self._log.warning("nobody has called for a process that was kept", name=process.name, pid=process.pid)
            self._end(process)
        self._uncalled.clear()

    async def leave(self) -> MachineLeft:
        """Tells the callers that their processes are kept. Then the next program has to take this one's place."""
        await self.aclose()
        self._leaving.set()
        kept_until_s = time.monotonic() + KEPT_S
        if tellings := [asyncio.create_task(process.told.wait()) for process in self._called]:
            _, untold = await asyncio.wait(tellings, timeout=_TOLD_S)
            for task in untold:
                task.cancel()
        await self.aclose()
        await asyncio.to_thread(self._memories.finish)
        processes = tuple(each.kept() for each in (*self._called, *self._uncalled.values()))
        return MachineLeft(processes, kept_until_s, dict(self._memories.credentials), tuple(self._devices))

    async def stay(self) -> None:
        """Ends the processes after all whose callers were told that they are kept, and waits for that."""
        for process in (*self._called, *self._uncalled.values()):
            self._end(process)
        self._called.clear()
        self._uncalled.clear()
        await self.aclose()

    async def GetMachine(self, request: machine_pb2.GetMachineRequest, context: Any) -> machine_pb2.GetMachineResponse:
        has_shared = bool(request.shared) and await asyncio.to_thread(_is_seen, Path(request.shared))
        missing = await asyncio.to_thread(lambda: [path for path in request.paths if not os.path.exists(path)])
        found = this_machine(self._memories.root, self._devices)
        found.has_shared = has_shared
        found.missing_paths.extend(missing)
        return found

    async def GetClock(self, request: machine_pb2.GetClockRequest, context: Any) -> machine_pb2.GetClockResponse:
        return machine_pb2.GetClockResponse(monotonic_ns=time.monotonic_ns())

    async def GetGates(self, request: machine_pb2.GetGatesRequest, context: Any) -> machine_pb2.GetGatesResponse:
        root, nodes = Path(request.root), [job_id(node) for node in request.nodes]
        found = await asyncio.to_thread(lambda: [state for node in nodes for state in _gate_states(root, node)])
        return machine_pb2.GetGatesResponse(gates=map(encode_gate_state, found))

    async def RunProcess(self, requests: Requests, context: Any) -> AsyncIterator[machine_pb2.RunProcessResponse]:
        start = await _first(requests)
        await self._refuse_while_leaving(context)
        if start.kept_pid:
            process = self._kept(start)
        else:
            config = await _config_of(start)
            memory, files = Path(config.runtime.host_memory_root), dict(start.files)
            spec = _spec_of(start, config)
            place = (memory, spec.name)
            self._memories.check(memory, files)
            for earlier in [each for each in self._uncalled.values() if (each.memory, each.name) == place]:
                self._end(self._uncalled.pop(earlier.pid))  # whoever asks for another one does not call for it
            while place in self._running or not self._memories.have_room(memory, files):
                # What ran before, for a caller that is gone, is still ending.
                yield machine_pb2.RunProcessResponse(beat=machine_pb2.Beat())
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._gone.wait(), BEAT_S)
            # Nothing is awaited from here to the start: the next program would not know of it.
            await self._refuse_while_leaving(context)
            process = await self._started(memory, files, spec)
        self._called.add(process)
        try:
            yield machine_pb2.RunProcessResponse(started=machine_pb2.ProcessStarted(pid=process.pid))
            async for response in self._until_ended(process, requests):
                yield response
        finally:
            if self._leaving.is_set() and process in self._called:
                process.told.set()  # its caller has ended the call, and calls again
            else:
                self._called.discard(process)
                await asyncio.shield(self._end(process))

    async def _refuse_while_leaving(self, context: Any) -> None:
        """The caller calls the next program then."""
        if self._leaving.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the agent takes its program anew: call again")

    async def _started(self, memory: Path, files: Mapping[str, bytes], spec: ServiceSpec) -> _Process:
        place = (memory, spec.name)
        self._running.add(place)
        free = AsyncExitStack()
        free.callback(self._free, place)
        async with free:
            await free.enter_async_context(self._memories.of_job(memory, files))
            supervisor = Supervisor(self._start_child)
            self._supervisors.add(supervisor)
            free.callback(self._reap, supervisor)
            pid = supervisor.start(spec)
            self._log.info("process started", memory=memory.name, name=spec.name, pid=pid)
            free.callback(self._log.info, "process gone", memory=memory.name, name=spec.name)
            free.push_async_callback(supervisor.aclose)
            return _Process(memory, spec.name, pid, supervisor, free.pop_all())

    def _kept(self, start: machine_pb2.ProcessStart) -> _Process:
        """ValueError where no such process was kept."""
        process = self._uncalled.get(start.kept_pid)
        if process is None or process.name != _name_of(start):
            raise ValueError(f"no process {start.kept_pid} of {_name_of(start)} was kept, or it was ended since")
        return self._uncalled.pop(start.kept_pid)

    def _end(self, process: _Process) -> asyncio.Task[None]:
        """In a task of its own: gRPC may cancel a call again while its process ends."""
        ending = asyncio.create_task(process.free.aclose())
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)
        return ending

    async def _until_ended(
        self, process: _Process, requests: Requests
    ) -> AsyncIterator[machine_pb2.RunProcessResponse]:
        """Beats, and at last the end. It returns without one once the caller is gone."""
        ended = asyncio.create_task(process.supervisor.next_end())
        listening = asyncio.create_task(_listen(process.supervisor, process.name, requests))
        leaving = asyncio.create_task(self._leaving.wait())
        tasks = (ended, listening, leaving)
        try:
            while True:
                await asyncio.wait(tasks, timeout=BEAT_S, return_when=asyncio.FIRST_COMPLETED)
                if leaving.done():
                    ended.cancel()  # what it has not taken stays to be told
                    await asyncio.gather(ended, return_exceptions=True)
                if ended.done() and not ended.cancelled():
                    status = ended.result().exit_status
                    process.told.set()
                    self._called.discard(process)  # it is over, and is not kept
                    yield machine_pb2.RunProcessResponse(ended=machine_pb2.ProcessEnded(exit_status=status))
                    return
                if leaving.done():
                    yield machine_pb2.RunProcessResponse(kept=machine_pb2.ProcessKept(seconds=int(KEPT_S)))
                    await asyncio.Event().wait()  # the caller ends the call once it has read this
                if listening.done():
                    return
                yield machine_pb2.RunProcessResponse(beat=machine_pb2.Beat())
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _reap(self, over: Supervisor) -> None:
        """What a killed process had started is this agent's child: it has made itself the subreaper."""
        self._supervisors.discard(over)
        # The kernel ends them with it, a moment later.
        asyncio.get_running_loop().call_later(_REAPS_AFTER_S, self._reap_orphans)

    def _reap_orphans(self) -> None:
        if not self.looks_at_next_program:
            reap_orphans(self._spawner.union(*(each.pids for each in self._supervisors)))

    def _free(self, place: tuple[Path, str]) -> None:
        self._running.discard(place)
        self._gone.set()
        self._gone = asyncio.Event()

    async def aclose(self) -> None:
        """Until the processes of all calls that ended are gone."""
        while self._ending:
            await asyncio.wait(self._ending)


async def _first(requests: Requests) -> machine_pb2.ProcessStart:
    try:
        async with asyncio.timeout(LOST_S):
            request = await anext(aiter(requests))
    except (TimeoutError, StopAsyncIteration) as error:
        raise ValueError("the call has no request that starts a process") from error
    return request.start


async def _listen(supervisor: Supervisor, name: str, requests: Requests) -> None:
    """Until the caller is silent for too long, or has closed the call."""
    stopping: asyncio.Task[Any] | None = None
    with suppress(TimeoutError, StopAsyncIteration):
        while True:
            async with asyncio.timeout(LOST_S):
                request = await anext(requests)
            if request.WhichOneof("body") == "stop" and stopping is None:
                stopping = asyncio.create_task(supervisor.stop(name))


def _is_seen(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # of another user
        return False


def _gate_states(root: Path, node: str) -> list[GateState]:
    """What a node's gate says, if it was ever passed. Makes nothing. ValueError where there is no folder for gates."""
    if not (root.is_absolute() and root.is_dir()):
        raise ValueError(f"there is no folder {root} for gates: make it, on a local disk of this machine")
    return Gate(root / node).report() if (root / node).is_dir() else []


async def _config_of(start: machine_pb2.ProcessStart) -> JobConfig:
    """ValueError where the job's files, or its node, are not of this machine."""
    path = Path(start.config)
    shared = "output_dir has to be on storage that all machines share"
    try:
        async with asyncio.timeout(LOST_S):
            config = await asyncio.to_thread(_read, path)
    except TimeoutError:
        raise ValueError(f"the job's config {path} is not read within {LOST_S:g} s: {shared}") from None
    except OSError as error:
        raise ValueError(f"the job's config cannot be read here ({error}): {shared}") from error
    job = JobFolder.of(config)
    if path != job.config:
        raise ValueError(f"{path} is not the config of job {config.job}, which is {job.config}")
    if start.node not in config.cluster.nodes:
        raise ValueError(f"{start.node!r} is no node of job {config.job}, which has {', '.join(config.cluster.nodes)}")
    if start.role and start.role not in set(Role):
        raise ValueError(f"{start.role!r} is no component: one of {', '.join(Role)}, or none for the fork server")
    if job.root not in Path(start.log).parents or ".." in Path(start.log).parts:
        raise ValueError(f"the log {start.log} is not in the job's folder {job.root}")
    try:
        interface_of(config.cluster.address_of(NodeId(start.node)))
    except NotThisMachine as error:
        raise ValueError(f"cluster.addresses: {start.node}: {error}") from error
    return config


def _read(path: Path) -> JobConfig:
    if not path.is_file():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    return JobConfig.read(path)


def _name_of(start: machine_pb2.ProcessStart) -> str:
    return f"{start.role or 'forkserver'}@{start.node}"


def _release_of(start: machine_pb2.ProcessStart) -> tuple[str, str]:
    """The Python and the modules of the job's release. ValueError where this machine does not have them."""
    own = release()
    if not start.release or start.release == own:
        return sys.executable, own_modules()
    if start.python == sys.executable or not os.access(start.python, os.X_OK):
        raise ValueError(
            f"the job is of release {start.release} in {start.python}, and this machine has {own}: it goes on once it "
            "starts anew"
        )
    return start.python, start.modules


def _spec_of(start: machine_pb2.ProcessStart, config: JobConfig) -> ServiceSpec:
    socket, device = fork_server_socket(config, NodeId(start.node)), config.cluster.device
    python, modules = _release_of(start)
    command: tuple[str, ...] = forkserver_command(socket)
    if start.role:
        words = ("--config", start.config, "--node", start.node, "--forkserver", str(socket))
        command = (f"services.{start.role}", *words)
    return ServiceSpec(
        name=_name_of(start),
        command=(python, "-m", *command),
        log_path=Path(start.log),
        env=(service_env if start.role else fork_server_env)(device, modules=modules),
        stop_timeout_s=_STOP_S,
    )


async def run(
    listen: str,
    tls: Credentials,
    host_memory_root: Path,
    log: Path,
    devices: Sequence[CudaDevice] = (),
    *,
    next_program: NextProgram = NO_PROGRAM,
    left: MachineLeft | None = None,
) -> None:
    """Until SIGTERM. `left`: by the program before. ValueError for an address on which it cannot listen."""
    stopping, asked = await stop_signal(), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(handover.SIGNAL, asked.set)
    handover.ready()  # before there are children, who would get this process's mask
    spawner = Spawner.begin(FORKED, env=service_env("cuda" if devices else "cpu"), log_path=log)
    try:
        await spawner.ready()
        servicer = MachineServicer(spawner.start, host_memory_root, devices, left=left, spawner=spawner.pid)
        await servicer.take_over()
        served = Service(
            machine_pb2.DESCRIPTOR.services_by_name["Machine"],
            lambda server: machine_pb2_grpc.add_MachineServicer_to_server(servicer, server),
        )
        server = await serve([served], listen, tls=tls)
        servicer.begin(server.endpoint)
        print(
            f"the agent {tls.identity.name} of cluster {tls.identity.cluster} listens on {server.endpoint}", flush=True
        )
        try:
            while await _is_asked(asked, stopping):
                asked.clear()
                servicer.looks_at_next_program = True
                fault = await next_program.fault()
                servicer.looks_at_next_program = False
                if fault:
                    structlog.get_logger("agent").error("its program is not taken anew", reason=fault)
                    continue
                state = await servicer.leave()
                if not await handover.is_last_call(stopping):
                    break
                spawner.close()
                next_program.take(state.to_json())
        finally:
            await server.stop(grace_s=STOP_GRACE_S)
            await servicer.stay()
    finally:
        spawner.close()


async def _is_asked(asked: asyncio.Event, stopping: asyncio.Event) -> bool:
    """Whether it is to take its program anew, and not to stop, once it is one of the two."""
    waits = [asyncio.create_task(event.wait()) for event in (asked, stopping)]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    return not stopping.is_set()


def main(args: argparse.Namespace) -> int:
    """`tidegate agent`."""
    handover.hold()
    configure_logging("agent", level="INFO")
    try:
        left = handover.handed_over(MachineLeft.of)
        tls = Credentials(args.credentials)
        this_machine(args.host_memory_root)
        if tls.identity.party is not Party.NODE:
            raise ConfigError(f"{args.credentials} is the credential of {tls.identity}: an agent's is of a node")
        devices: Sequence[CudaDevice] = ()
        if args.device == "cuda":
            # What jobs use is not asked for again: the question takes memory on it.
            devices = left.devices if left else cuda_devices()
        again = NextProgram(args.program, args.words)
        asyncio.run(run(args.listen, tls, args.host_memory_root, args.log, devices, next_program=again, left=left))
    except NoCuda as none:
        print(f"tidegate: --device cuda, but on this machine {none}", file=sys.stderr)
        return 1
    except (CertsError, ConfigError, handover.NoHandover, ValueError, OSError) as error:
        print(f"tidegate: {error}", file=sys.stderr)
        return 1
    return 0
