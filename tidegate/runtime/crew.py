"""The workers of one component of one job, on all nodes, as its lead sees them.

The lead learns the addresses of the component's instances from each command.

Invariants:
- A call goes to the instance of the GPU's node and carries the grant's token. [test_crew: under_an_old_token]
- A worker whose call failed for good is no longer a member. [test_crew: died_in_a_call_is_no_member]
- A stop under an older grant costs no later member. [test_crew: stop_under_an_older_grant]
- Calls to all members are sent side by side. When one fails, the lead does not wait for the others.
  [test_crew: raised_without_waiting_for_the_others]
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

from tidegate.checksums import combined_checksum
from tidegate.types import NO_TOKEN, Grant, JobId, NodeId, node_of
from tidegate.v1 import commands_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

Result = TypeVar("Result")

_WORK = frozenset({"warm_up", "train", "accumulate", "export", "generate", "score"})
"""Calls whose duration depends on the model and the data. The others are bounded like a command."""


class WorkerGone(ConnectionError):
    """The worker died, or its instance cannot be reached. It is no longer a member."""


class WorkerUnreachable(WorkerGone):
    """The worker's instance gave no answer. Only the caller knows this, so the caller reports it.

    `grants` are the grants of the workers that were called.
    """

    def __init__(self, message: str, *, grants: Sequence[Grant] = ()) -> None:
        super().__init__(message)
        self.grants = tuple(grants)


class WorkerRefused(RuntimeError):
    """The worker refused the call. Nothing changed."""


class SnapshotMismatch(ValueError):
    """The weights that a reader loaded differ from those that the actor published."""


class InstancePort(Protocol):
    """One instance of the component, in this process or on another node."""

    async def start_workers(self, job: JobId, transition: str, grants: Sequence[Grant]) -> None:
        """Starts workers through the gate until they are ready for calls. If one fails, none of them runs."""
        ...

    async def stop_workers(self, job: JobId, transition: str, grants: Sequence[Grant]) -> int:
        """Stops these workers. Returns, when their gates are free, the bytes of device memory still in use.

        A worker that does not exist counts as stopped.
        """

    async def stand_down(self, job: JobId, grants: Sequence[Grant]) -> None:
        """The workers give their GPUs back and become standbys. Returns when their gates are free."""
        ...

    async def workers(self, job: JobId) -> tuple[Grant, ...]:
        """The grants of the living workers, standbys included."""
        ...

    def call(self, grant: Grant, call: wire.WorkerCall, *, timeout_s: float) -> AsyncIterator[wire.WorkerReply]:
        """Yields the replies as they come. WorkerGone, WorkerUnreachable or WorkerRefused."""
        ...

    async def store_address(self, grant: Grant) -> tuple[str, int]:
        """The address at which the torch store of a world that this worker leads will listen."""
        ...

    async def fetch_snapshot(self, snapshot: types_pb2.Snapshot) -> str:
        """The folder on the instance's node that has the snapshot's files, verified."""
        ...

    async def drop_snapshots(self, job: JobId, *, before_version: int, keep: Sequence[int]) -> None: ...


Connect = Callable[[str, str], InstancePort]
"""(instance, endpoint) -> its port."""


class Crew:
    """See the module head. One event loop uses it. `work_timeout_s` bounds calls that train, generate or score."""

    def __init__(self, job: JobId, connect: Connect, *, call_timeout_s: float, work_timeout_s: float) -> None:
        self._job = job
        self._connect = connect
        self._call_timeout_s = call_timeout_s
        self._work_timeout_s = work_timeout_s
        self._ports: dict[NodeId, InstancePort] = {}
        self._endpoints: dict[NodeId, str] = {}
        self._boots: dict[NodeId, int] = {}
        self._members: dict[str, Grant] = {}
        self._standbys: dict[str, Grant] = {}

    @property
    def members(self) -> tuple[Grant, ...]:
        """The workers known to be up, in the order of their start or as `arrange` put them."""
        return tuple(self._members.values())

    @property
    def standbys(self) -> tuple[Grant, ...]:
        """The workers known to be standbys."""
        return tuple(self._standbys.values())

    def note_addresses(self, addresses: Iterable[commands_pb2.InstanceAddress]) -> None:
        """Notes the addresses of the component's instances, but for those of an earlier start than is known."""
        for address in addresses:
            node = NodeId(address.instance.partition("@")[2])
            if address.boot < self._boots.get(node, 0):
                continue
            self._boots[node] = address.boot
            self._endpoints[node] = address.endpoint
            self._ports[node] = self._connect(address.instance, address.endpoint)

    def endpoint(self, node: NodeId) -> str:
        """The address of the component's instance on this node. WorkerGone when it is not known."""
        self._on(node)
        return self._endpoints[node]

    async def take_over(self) -> tuple[NodeId, ...]:
        """Finds the workers that an earlier lead left running. Returns the nodes that gave no answer."""
        found = await asyncio.gather(
            *(port.workers(self._job) for port in self._ports.values()), return_exceptions=True
        )
        answers = dict(zip(self._ports, found, strict=True))
        alive = [grant for grants in answers.values() if not isinstance(grants, BaseException) for grant in grants]
        self._members = {grant.gpu: grant for grant in alive if not grant.stands_by}
        self._standbys = {grant.gpu: grant for grant in alive if grant.stands_by}
        return tuple(node for node, grants in answers.items() if isinstance(grants, BaseException))

    async def forget_dead(self) -> None:
        """Removes the members that their instances no longer have. Keeps those on nodes that give no answer."""
        found = await asyncio.gather(
            *(port.workers(self._job) for port in self._ports.values()), return_exceptions=True
        )
        for node, grants in zip(self._ports, found, strict=True):
            if isinstance(grants, BaseException):
                continue
            for grant in (*self.members, *self.standbys):
                if node_of(grant.gpu) == node and grant not in grants:
                    self.forget(grant)

    async def start(self, grants: Sequence[Grant], *, transition: str) -> None:
        """Starts these workers. They become members, or standbys where their grants have no token.

        Where a standby exists on a GPU, it becomes the worker.
        """
        await self._by_node(grants, lambda port, part: port.start_workers(self._job, transition, part))
        for grant in grants:
            self.forget(grant)
            (self._standbys if grant.stands_by else self._members)[grant.gpu] = grant

    async def stand_down(self, grants: Sequence[Grant]) -> None:
        """These members give their GPUs back and become standbys."""
        await self._by_node(grants, lambda port, part: port.stand_down(self._job, part))
        for grant in grants:
            self.forget(grant)
            self._standbys[grant.gpu] = Grant(grant.gpu, NO_TOKEN)

    def arrange(self, members: Sequence[Grant]) -> None:
        """Puts the members into this order, which names each of them."""
        assert set(members) == set(self.members), f"{members} are not {self.members}"
        self._members = {grant.gpu: grant for grant in members}

    async def stop(self, grants: Sequence[Grant], *, transition: str) -> int:
        """Ends these workers. Returns the bytes of device memory still in use."""
        for grant in grants:
            if self._members.get(grant.gpu, grant).token <= grant.token:
                self.forget(grant)
        held_bytes = await self._by_node(grants, lambda port, part: port.stop_workers(self._job, transition, part))
        return sum(held_bytes)

    def forget(self, grant: Grant) -> None:
        """Removes the worker from members and standbys."""
        self._members.pop(grant.gpu, None)
        self._standbys.pop(grant.gpu, None)

    async def rendezvous(self, members: Sequence[Grant], *, timeout_s: float) -> list[wire.Rendezvous]:
        """One for each member, in rank order. The first member's node serves the store."""
        host, port = await self._port(members[0]).store_address(members[0])
        return [
            wire.Rendezvous(rank=rank, world_size=len(members), host=host, port=port, timeout_s=timeout_s)
            for rank in range(len(members))
        ]

    async def stream(self, grant: Grant, call: wire.WorkerCall) -> AsyncIterator[wire.WorkerReply]:
        """All replies to one call. WorkerGone, WorkerUnreachable (both remove the worker) or WorkerRefused."""
        timeout_s = self._work_timeout_s if call.WhichOneof("body") in _WORK else self._call_timeout_s
        try:
            with _naming([grant]):
                async for reply in self._port(grant).call(grant, call, timeout_s=timeout_s):
                    yield reply
        except WorkerGone:
            if grant in (self._members.get(grant.gpu), self._standbys.get(grant.gpu)):
                self.forget(grant)
            raise

    async def ask(self, grant: Grant, call: wire.WorkerCall) -> wire.WorkerReply:
        """The last reply to one call."""
        last = wire.WorkerReply()
        async for reply in self.stream(grant, call):
            last = reply
        return last

    async def glance(self, grant: Grant, call: wire.WorkerCall, *, timeout_s: float) -> wire.WorkerReply | None:
        """The reply, None where none came. A failure of this side question says nothing about the worker."""
        last = None
        try:
            async with asyncio.timeout(timeout_s):
                async for reply in self._port(grant).call(grant, call, timeout_s=timeout_s):
                    last = reply
        except (TimeoutError, WorkerGone, WorkerRefused):
            return None
        return last

    async def ask_all(self, calls: Mapping[Grant, wire.WorkerCall]) -> list[wire.WorkerReply]:
        """The last reply of each worker, in the order of `calls`. The first failure is raised at once."""
        return await together([self.ask(grant, call) for grant, call in calls.items()])

    async def ask_interdependent(
        self, calls: Mapping[Grant, wire.WorkerCall], *, last_words_s: float
    ) -> list[wire.WorkerReply]:
        """Like `ask_all`, for workers that wait for each other.

        Once one fails, the others get `last_words_s` to fail too, so that workers that die of it are removed as well.
        Of several failures it raises a missing answer first, then a death.
        """
        tasks = [asyncio.ensure_future(self.ask(grant, call)) for grant, call in calls.items()]
        try:
            _, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            if waiting:
                await asyncio.wait(waiting, timeout=last_words_s)
            ended = [task.exception() for task in tasks if task.done()]
            failures = [failure for failure in ended if failure is not None]
            if failures:
                raise min(failures, key=_urgency)
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def load(self, snapshot: types_pb2.Snapshot, grants: Sequence[Grant], *, reference: bool = False) -> None:
        """Brings a version to the nodes of these workers and loads it. SnapshotMismatch when a worker has another."""
        want = combined_checksum({shard.file: shard.checksum for shard in snapshot.shards})
        if want != snapshot.checksum:
            raise SnapshotMismatch(f"version {snapshot.version} names checksum {snapshot.checksum}, its files {want}")
        nodes = sorted({node_of(grant.gpu) for grant in grants})
        folders = dict(zip(nodes, await together([self.fetch(snapshot, node) for node in nodes]), strict=True))
        calls = {
            grant: wire.WorkerCall(
                load_shards=wire.LoadShards(
                    version=snapshot.version,
                    folder=folders[node_of(grant.gpu)],
                    files=[shard.file for shard in snapshot.shards],
                    checksums=[shard.checksum for shard in snapshot.shards],
                    reference=reference,
                )
            )
            for grant in grants
        }
        for grant, reply in zip(calls, await self.ask_all(calls), strict=True):
            if reply.loaded.checksum != snapshot.checksum:
                raise SnapshotMismatch(
                    f"{grant.gpu} loaded version {snapshot.version} with checksum {reply.loaded.checksum}, the "
                    f"published checksum is {snapshot.checksum}"
                )

    async def fetch(self, snapshot: types_pb2.Snapshot, node: NodeId) -> str:
        """Brings a version to one node. Returns the folder that has its files there.

        An instance serves what its node has, so each of this component is another source: the writer's may be gone."""
        asked = types_pb2.Snapshot()
        asked.CopyFrom(snapshot)
        for shard in asked.shards:
            nodes = [each for each in (NodeId(shard.node), *self._endpoints) if each != node]
            others = [self._endpoints[each] for each in dict.fromkeys(nodes) if each in self._endpoints]
            shard.other_endpoints[:] = others
        return await self._on(node).fetch_snapshot(asked)

    async def drop_snapshots(self, *, before_version: int, keep: Sequence[int]) -> None:
        """Frees older versions on all nodes. A node that cannot be reached frees them at its next start."""
        drops = [
            port.drop_snapshots(self._job, before_version=before_version, keep=keep) for port in self._ports.values()
        ]
        await asyncio.gather(*drops, return_exceptions=True)

    def _port(self, grant: Grant) -> InstancePort:
        return self._on(node_of(grant.gpu))

    def _on(self, node: NodeId) -> InstancePort:
        if node not in self._ports:
            raise WorkerGone(f"no instance of the component is known on node {node}; known: {sorted(self._ports)}")
        return self._ports[node]

    async def _by_node(
        self, grants: Sequence[Grant], act: Callable[[InstancePort, Sequence[Grant]], Awaitable[Result]]
    ) -> list[Result]:
        async def act_on(node: NodeId) -> Result:
            part = [grant for grant in grants if node_of(grant.gpu) == node]
            with _naming(part):
                return await act(self._on(node), part)

        return await together([act_on(node) for node in sorted({node_of(grant.gpu) for grant in grants})])


@contextmanager
def _naming(grants: Sequence[Grant]) -> Iterator[None]:
    """Adds the grants to the error of a worker whose instance gave no answer."""
    try:
        yield
    except WorkerUnreachable as error:
        raise WorkerUnreachable(str(error), grants=grants) from error


def _urgency(failure: BaseException) -> int:
    return (not isinstance(failure, WorkerUnreachable)) + (not isinstance(failure, WorkerGone))


async def together(awaitables: Iterable[Awaitable[Result]]) -> list[Result]:
    """All results in order. The first failure cancels the rest and is raised as it is."""
    tasks = [asyncio.ensure_future(awaitable) for awaitable in awaitables]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
