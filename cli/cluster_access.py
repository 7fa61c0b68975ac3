"""The way to a cluster's API: the agent on this machine, or the machine that keeps the cluster by turns."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from cli.contexts import operator_of
from tidegate.adapters.grpc_client import Channels
from tidegate.adapters.grpc_tls import Credentials
from tidegate.certs.authority import CertsError
from tidegate.certs.identity import Identity, Party
from tidegate.certs.job_credentials import SCHEDULER
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.keepers import KEEPS, Keepers, Term
from tidegate.cluster.machines import host_of
from tidegate.job import command_in
from tidegate.json_text import parse_json, typed
from tidegate.launcher.control import CALL_TIMEOUT_S, NotRunning
from tidegate.launcher.lock import machine_number, record_of_holder
from tidegate.ports.rpc import PeerUnavailable
from tidegate.runtime.interfaces import NotThisMachine, interface_of
from tidegate.v1 import cluster_pb2_grpc

OPERATOR_VARIABLE = "TIDEGATE_OPERATOR"
"""Names the folder of an operator's credential, on a machine that does not stand by."""


class NoCluster(NotRunning):
    """No cluster is up in the folder."""


class ClusterDown(NoCluster):
    """Nobody keeps it now, as far as this machine sees."""


class KeptElsewhere(NoCluster):
    """Another machine keeps the cluster."""


class NotYet(KeptElsewhere):
    """It does not answer this machine, or has not begun to."""


def keeper_elsewhere(folder: ClusterFolder) -> Term | None:
    """The term of another machine, where several may keep the cluster. Whether that one lives is not known. NoCluster:
    the storage does not answer."""
    if not folder.is_of_several or (record_of_holder(folder.lock) or {}).get(KEEPS):
        return None
    try:
        term = Keepers(folder.keepers).newest()
    except OSError as error:
        raise NoCluster(f"who keeps the cluster of {folder.root.parent} cannot be told: {error}") from error
    if term is None or term.has_ended:
        return None
    with suppress(NotThisMachine, ValueError):  # ValueError: the file is being written
        interface_of(term.address)
        return None
    return term


def named(keeper: Term, folder: ClusterFolder) -> str:
    with suppress(OSError):
        silent_s = Keepers(folder.keepers).silent_s(keeper.number)
        return f"{keeper.name} ({keeper.address}) does, with its last beat {silent_s:.0f} s ago"
    return f"{keeper.name} ({keeper.address}) does"


def agent_pid(folder: ClusterFolder) -> int | None:
    """The pid of the agent that has the folder now. 0: it is on another machine, which shares the folder."""
    found = record_of_holder(folder.lock)
    if found is None or "pid" not in found:
        return None
    return found["pid"] if found.get("machine", machine_number()) == machine_number() else 0


def _of_keeper(keeper: Term, far: str, folder: ClusterFolder) -> tuple[str, str]:
    """Where a keeper elsewhere answers, and the folder of the credential for it. KeptElsewhere: not to this machine."""
    told = f"another machine keeps the cluster of {folder.root.parent}, {named(keeper, folder)}: call it there"
    try:
        named_here = os.environ.get(OPERATOR_VARIABLE) or operator_of(folder.root.parent)
        operator = str(named_here or folder.operator.read_text())
    except FileNotFoundError:
        how = f"name an operator's credential in {OPERATOR_VARIABLE}, or in a context (tidegate context add --help)"
        raise KeptElsewhere(f"{told}, or {how}") from None
    if host_of(far) != keeper.address:  # the keeper before had another address
        raise NotYet(told)
    return far, operator


@asynccontextmanager
async def cluster_of(folder: ClusterFolder) -> AsyncIterator[cluster_pb2_grpc.ClusterAsyncStub]:
    """A stub of the Cluster API. NoCluster where none is up, KeptElsewhere where another machine keeps it."""
    async with channel_to(folder, keeper_elsewhere(folder)) as channel:
        try:
            yield cluster_pb2_grpc.ClusterStub(channel)
        except PeerUnavailable:
            refuse_down(folder)
            _refuse_elsewhere(folder)
            raise


def refuse_down(folder: ClusterFolder) -> None:
    """ClusterDown, with what to do."""
    if keeper_elsewhere(folder) is not None or agent_pid(folder) is not None:
        return
    output_dir = folder.root.parent
    if folder.is_of_several:
        how = f"one that stands by begins soon, otherwise run {command_in(output_dir, 'up', '--standby')}"
        raise ClusterDown(f"no machine keeps the cluster of {output_dir} now: {how}")
    if folder.description.exists():
        raise ClusterDown(
            f"the cluster of {output_dir} was killed: start it with {command_in(output_dir, 'up', 'NODE=SLOTS')}"
        )
    raise ClusterDown(f"no cluster is up in {output_dir}: start one with {command_in(output_dir, 'up', 'n0=8')}")


def _refuse_elsewhere(folder: ClusterFolder) -> None:
    """KeptElsewhere, of one that does not answer here. A unit may have another number for the machine that it is on."""
    if agent_pid(folder) == 0:
        raise KeptElsewhere(f"the cluster of {folder.root.parent} is up on another machine: call it there")


@asynccontextmanager
async def channel_to(folder: ClusterFolder, keeper: Term | None) -> AsyncIterator[Any]:
    """The channel of gRPC. Raises as `cluster_of`."""
    refuse_down(folder)
    output_dir, peer = folder.root.parent, SCHEDULER
    try:
        has_begun = keeper is None or folder.endpoint.exists()
        fields = parse_json(folder.endpoint.read_bytes()) if has_begun else {}
        if keeper is None:
            endpoint, credential = (typed(str, fields[name], name) for name in ("control", "credential"))
        else:
            endpoint, credential = _of_keeper(keeper, typed(str, fields.get("far", ""), "far"), folder)
        tls = Credentials(Path(credential))
        if keeper is not None:
            peer = Identity(tls.identity.cluster, Party.NODE, keeper.name)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NoCluster(f"the cluster of {output_dir} begins, and takes no commands yet: try again") from error
    except (ValueError, KeyError, TypeError, CertsError) as error:
        _refuse_elsewhere(folder)
        raise NoCluster(f"the cluster of {output_dir} cannot be asked: {error}") from error
    channels = Channels(default_timeout_s=CALL_TIMEOUT_S, tls=tls)
    try:
        yield channels.connect(endpoint, peer)
    finally:
        await channels.close()
