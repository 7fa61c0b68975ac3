"""The processes of one membership epoch: their torch WORLD, the groups among them, and the end of the epoch.

- A membership is an epoch's number and the ids of its members. torch's rank is the index among them.
- Every key in the store begins with the epoch, so that an epoch never reads an older one's keys. Epoch numbers are
  never reused.
- All groups of a world have one backend, which the members' devices decide (`backends`).
- Groups are cached by their ordered tuple of members. Roles with the same tuple share a group,
  in every layout.
- Only the members of a group make it, and making it waits for all of them. `prepare` makes groups in one order that all
  ranks share, so that some group can always be completed.
- Every member of the epoch must call `prepare` with the same sequence of groups, members of no group too. Each rank
  derives the groups to drop from that sequence alone.

A World is not safe for several threads.

Members may do something `aside`: then their common group is another one, and the loss of a member costs the groups that
they made aside and no others.

Invariants:
- A member id has one place. [test_world: a_membership_has_members_and_each_once]
- No group of the latest `prepare` is dropped. [test_world: a_group_in_use_stays]
- A member that is lost aside leaves the other groups as they were. [test_ahead: a_standby_that_dies_while]
- After `leave` this process has no open connection of the epoch, whoever still holds a group of it. It may join the
  next epoch. [test_world: epochs_leave_no_descriptor]
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store
from torch.distributed import distributed_c10d as c10d

from tidegate.elastic.epoch.backends import Backend, agreed_backend
from tidegate.elastic.epoch.connections import listening, shut
from tidegate.elastic.epoch.epoch_store import EpochStore
from tidegate.elastic.epoch.rendezvous import use_interface

MAX_GROUPS = 64
"""The groups of one rank. With gloo a group of n members costs each n + 3 descriptors and 3 threads.

The usual limit of descriptors is 1,024.
"""


class PeerLost(RuntimeError):
    """A collective or transfer failed, because a peer is dead or too late."""


@dataclass(frozen=True, slots=True)
class Membership:
    epoch: int
    members: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.members or len(set(self.members)) != len(self.members):
            raise ValueError(
                f"epoch {self.epoch} names members {self.members}; it needs one member or more, each of them once"
            )


def epoch_prefix(epoch: int) -> str:
    """The prefix of all keys of an epoch in the members' store."""
    return f"epoch/{epoch}"


@contextmanager
def peers_needed(what: str) -> Iterator[None]:
    """Raise PeerLost for the errors that torch raises when a peer is dead. Other errors pass."""
    try:
        yield
    except RuntimeError as error:
        # gloo has no exception type of its own; its messages begin with the path of its source file.
        if isinstance(error, dist.DistError) or "gloo/" in str(error):
            raise PeerLost(
                f"{what}: a peer is dead or too late: {error}; call leave(abort=True) and join the next epoch"
            ) from error
        raise


def surplus(
    recency: Iterable[tuple[int, ...]], *, keep: frozenset[tuple[int, ...]], bound: int
) -> list[tuple[int, ...]]:
    """The groups to drop so that no member is in more than `bound` groups. Groups in `keep` are never dropped.

    `recency` lists the groups, least recently used first.
    """
    groups = list(recency)
    counts = Counter(member for group in groups for member in group)
    dropped = []
    for group in groups:
        if group not in keep and any(counts[member] > bound for member in group):
            dropped.append(group)
            counts.subtract(group)
    return dropped


@dataclass(frozen=True, slots=True)
class _Aside:
    """The common group of what is done aside, and its addresses."""

    group: dist.ProcessGroup
    addresses: frozenset[str]


class World:
    """This process's part in a membership epoch. `join` makes it."""

    def __init__(
        self,
        membership: Membership,
        *,
        me: int,
        store: Store,
        device: torch.device,
        slot_device: str | None,
        timeout_s: float,
        max_groups: int,
    ) -> None:
        self.membership = membership
        self.me = me
        # Keep a reference: torch holds only the C++ part of our store, which does nothing without the Python part.
        self._epoch_store = EpochStore(store, membership.epoch, timeout_s=timeout_s)
        self.store = PrefixStore(epoch_prefix(membership.epoch), self._epoch_store)
        self.device = device
        self.backend = Backend.GLOO
        self._slot_device = slot_device
        self._timeout = timedelta(seconds=timeout_s)
        self._max_groups = max_groups
        self._groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._addresses: dict[tuple[int, ...], frozenset[str]] = {}
        self._recency: dict[tuple[int, ...], None] = {}
        self._made: Counter[tuple[int, ...]] = Counter()
        self._aside: _Aside | None = None
        self._is_aside = False

    @classmethod
    def join(
        cls,
        membership: Membership,
        *,
        me: int,
        store: Store,
        device: torch.device,
        slot_device: str | None = None,
        timeout_s: float,
        interface: str = "lo",
        max_groups: int = MAX_GROUPS,
    ) -> World:
        """Meet all members. Raises PeerLost when one does not come in time; the process may then join a later epoch.

        On a CPU, members with the same `slot_device` share a device; None: this member shares none.
        """
        if me not in membership.members:
            raise ValueError(f"member {me} cannot join epoch {membership.epoch}: its members are {membership.members}")
        world = cls(
            membership,
            me=me,
            store=store,
            device=device,
            slot_device=slot_device,
            timeout_s=timeout_s,
            max_groups=max_groups,
        )
        use_interface(interface)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        world._meet()
        return world

    def group(self, members: tuple[int, ...]) -> dist.ProcessGroup:
        """The group of these members in this order. The caller is one of them. All of them must call if it does not
        exist yet.
        """
        if members not in self._groups:
            self._make(members)
        return self._groups[members]

    def prepare(self, groups: Iterable[tuple[int, ...]]) -> None:
        """Make this rank's groups among these. Every member of the epoch calls it with the same groups."""
        ordered = sorted({group for group in groups if group != self.membership.members})
        for group in ordered:
            self._recency.pop(group, None)
            self._recency[group] = None
        for group in surplus(self._recency, keep=frozenset(ordered), bound=self._max_groups):
            del self._recency[group]
            self._drop(group)
        for group in ordered:
            if self.me in group:
                self.group(group)

    def is_prepared(self, groups: Iterable[tuple[int, ...]]) -> bool:
        """Whether all of these are cached. The answer is the same on every member of the epoch."""
        return all(group in self._recency or group == self.membership.members for group in groups)

    def gather(self, members: tuple[int, ...], payload: bytes) -> dict[int, bytes]:
        """Each member's payload, by member."""
        is_common = members == self.membership.members
        group = self._aside.group if self._is_aside and self._aside and is_common else self.group(members)
        with peers_needed(f"gathering from members {members}"):
            return dict(zip(members, gather_bytes(group, payload, device=self.device), strict=True))

    def barrier(self, members: tuple[int, ...]) -> None:
        group = self.group(members)
        with peers_needed(f"barrier of members {members}"):
            arrived = torch.ones((), device=self.device)
            dist.all_reduce(arrived, group=group)
            arrived.item()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """All members enter it alike. In it they gather over a common group of their own.

        A PeerLost in it ends the groups that were made in it, so that no member waits in one of them. From then on
        nothing else can be done aside in this epoch, and the members no longer agree on the groups that exist: only
        those of before can be used.
        """
        before = set(self._groups)
        try:
            if self._aside is None:
                self._aside = self._made_aside()
            self._is_aside = True
            yield
        except PeerLost:
            if self._aside is not None:
                shut(self._aside.addresses)
            for members in set(self._groups) - before:
                self._recency.pop(members, None)
                self._drop(members)
            raise
        finally:
            self._is_aside = False

    def leave(self, abort: bool = False) -> None:
        """End this rank's part: together with all members, or with `abort`, after a failure, at once and alone.

        An abort closes this rank's connections, so the operations in which peers wait for this rank fail. Raises
        PeerLost, after leaving, when a member did not come to the end. A second call does nothing.
        """
        if not self._groups:
            return
        try:
            if not abort:
                self.barrier(self.membership.members)
        except PeerLost:
            abort = True
            raise
        finally:
            if abort and self.backend is Backend.NCCL:
                c10d._abort_process_group()
            for members in list(self._addresses):
                self._disconnect(members)
            if self._aside is not None:
                shut(self._aside.addresses)
            self._aside = None
            self._groups.clear()
            if dist.is_initialized():
                dist.destroy_process_group()

    def _meet(self) -> None:
        members = self.membership.members
        # torch wraps the hook at every start and never unwraps it.
        hook = sys.excepthook
        try:
            with peers_needed(f"member {self.me} joining epoch {self.membership.epoch} of members {members}"):
                self.backend = agreed_backend(
                    self.store, self.device, me=self.me, members=members, slot_device=self._slot_device
                )
                before = listening()
                dist.init_process_group(
                    self.backend,
                    store=self.store,
                    rank=members.index(self.me),
                    world_size=len(members),
                    timeout=self._timeout,
                )
                self._addresses[members] = self._exchanged("world", members, listening() - before)
        except PeerLost:
            if dist.is_initialized():
                dist.destroy_process_group()
            # torch names WORLD by a counter that only its destruction resets; the counters of all members must agree.
            c10d._world.group_count = 0
            raise
        finally:
            sys.excepthook = hook
        assert dist.group.WORLD is not None
        self._groups[members] = dist.group.WORLD

    def _make(self, members: tuple[int, ...]) -> None:
        epoch = self.membership
        if self.me not in members or not set(members) <= set(epoch.members):
            raise ValueError(
                f"member {self.me} requests a group of {members}; only the members of a group make it, "
                f"and they must be members of epoch {epoch.epoch}: {epoch.members}"
            )
        name = f"{epoch.epoch}/{'-'.join(map(str, members))}/{self._made[members]}"
        group, self._addresses[members] = self._new_group(name, members)
        self._made[members] += 1
        self._groups[members] = group

    def _made_aside(self) -> _Aside:
        return _Aside(*self._new_group(f"{self.membership.epoch}/aside", self.membership.members))

    def _new_group(self, name: str, members: tuple[int, ...]) -> tuple[dist.ProcessGroup, frozenset[str]]:
        """The group, and the addresses on which its members listen."""
        ranks = [self.membership.members.index(member) for member in members]
        before = listening()
        # torch's new_group names a group by the number of groups of this rank, which may differ between members.
        with peers_needed(f"making the group of members {members}"):
            group, _ = c10d._new_process_group_helper(
                len(ranks),
                ranks.index(dist.get_rank()),
                ranks,
                self.backend,
                self.store,
                c10d.GroupName(name),
                timeout=self._timeout,
            )
            addresses = self._exchanged(name, members, listening() - before)
        c10d._world.pg_group_ranks[group] = {rank: at for at, rank in enumerate(ranks)}
        return group, addresses

    def _exchanged(self, name: str, members: tuple[int, ...], mine: frozenset[str]) -> frozenset[str]:
        """The addresses on which the members listen for a group. With NCCL there are none, because NCCL has an abort
        call.
        """
        self.store.set(f"{name}/listens/{self.me}", "\n".join(sorted(mine)))
        texts = self.store.multi_get([f"{name}/listens/{member}" for member in members])
        return frozenset(address for text in texts for address in text.decode().splitlines())

    def _drop(self, members: tuple[int, ...]) -> None:
        group = self._groups.pop(members, None)
        if group is not None:
            self._disconnect(members)
            dist.destroy_process_group(group)

    def _disconnect(self, members: tuple[int, ...]) -> None:
        # Any reference keeps a gloo group alive, and gloo has no abort call; a peer must not wait for the last one.
        shut(self._addresses.pop(members))


def gather_bytes(group: dist.ProcessGroup, payload: bytes, *, device: torch.device) -> list[bytes]:
    """Each rank's payload, in the group's order."""
    mine = torch.tensor([len(payload)], device=device)
    sizes = torch.empty(group.size(), dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(sizes, mine, group=group)
    width = max(int(sizes.max()), 1)
    sent = torch.frombuffer(bytearray(payload.ljust(width, b"\0")), dtype=torch.uint8).to(device)
    received = torch.empty(group.size() * width, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(received, sent, group=group)
    rows = received.view(group.size(), width).cpu().numpy()
    return [rows[rank, : int(size)].tobytes() for rank, size in enumerate(sizes)]
