"""Who may call each method of the schema: a table, and calls of everybody to every method through real TLS.

TLS itself stops who has no credential of the cluster's authority that counts: Tidegate sees no call of theirs, so that
it counts and logs none.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from structlog.testing import capture_logs

import tidegate.v1
from tests.expired import issue_expired
from tidegate.adapters.grpc_server import Service, serve
from tidegate.adapters.grpc_tls import Access, Credentials, callers_of
from tidegate.certs.authority import CA_CERT, CREDENTIAL, Authority
from tidegate.certs.identity import Identity, Party

PATIENCE_S = 10.0
NODE, SCHEDULER, JOB, OPERATOR, VIEWER = (Identity("lab", party, "one") for party in Party)
OTHER_JOB = Identity("lab", Party.JOB, "other")
TOOLS = [
    *health_pb2.DESCRIPTOR.services_by_name["Health"].methods,
    *reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].methods,
]
LIST_SERVICES = reflection_pb2.ServerReflectionRequest(list_services="*").SerializeToString()

CALLERS = {
    "Cluster.SubmitJob": "operator",
    "Cluster.ListSubmissions": "operator viewer",
    "Cluster.ListClusterGpus": "operator viewer",
    "Cluster.GetNodeMachine": "operator viewer",
    "Cluster.DrainNode": "operator",
    "Cluster.PauseQueue": "operator",
    "Cluster.CancelSubmission": "operator",
    "Cluster.BackUpJobs": "operator",
    "Cluster.RestoreJob": "operator",
    "Node.GetMachineOfNode": "scheduler",
    "Node.GetNode": "scheduler",
    "Node.StartJob": "scheduler",
    "Node.StopJob": "scheduler",
    "CommandLine.RunCommand": "operator",
    "CommandLine.RunLookingCommand": "operator viewer",
    "Component.ScaleUp": "scheduler",
    "Component.ScaleDown": "scheduler",
    "Component.Migrate": "scheduler",
    "Component.Suspend": "scheduler",
    "Component.Resume": "scheduler",
    "Component.LoadWeights": "scheduler",
    "Component.OpenIteration": "scheduler",
    "Component.CloseIteration": "scheduler",
    "Component.Evaluate": "scheduler",
    "Component.HoldTraining": "scheduler",
    "Component.OrderGroups": "scheduler",
    "Control.GetJob": "job operator viewer",
    "Control.ListGpus": "job operator viewer",
    "Control.ListEvents": "job operator viewer",
    "Control.ReadLogs": "job operator viewer",
    "Control.CancelJob": "job operator",
    "Control.ListDeadLetters": "job operator viewer",
    "Control.ReplayDeadLetter": "job operator",
    "Control.DropDeadLetter": "job operator",
    "Control.ResizeActor": "job operator",
    "Control.ScaleJob": "job operator",
    "Control.MigrateGpus": "job operator",
    "Control.DrainGpus": "job operator",
    "Instance.StartWorkers": "job",
    "Instance.StopWorkers": "job",
    "Instance.StandDown": "job",
    "Instance.DescribeWorkers": "job",
    "Instance.Call": "job",
    "Instance.FetchSnapshot": "job",
    "Instance.DropSnapshots": "job",
    "Instance.ReserveStore": "job",
    "Instance.GateReport": "node scheduler",
    "Weights.FetchShard": "job",
    "Machine.GetMachine": "operator",
    "Machine.GetClock": "operator",
    "Machine.GetGates": "operator",
    "Machine.RunProcess": "operator",
}
WANT_STATUS = {
    "good": grpc.StatusCode.OK,
    "revoked": grpc.StatusCode.UNAUTHENTICATED,
    "another cluster's": grpc.StatusCode.UNAUTHENTICATED,
    "another authority's": grpc.StatusCode.UNAVAILABLE,
    "expired": grpc.StatusCode.UNAVAILABLE,
    "without a credential": grpc.StatusCode.UNAVAILABLE,
    "without TLS": grpc.StatusCode.UNAVAILABLE,
}
"""By what a credential is. A good one has this status where its party may call the method."""
NOBODY = ("without a credential", "without TLS")
SERVERS = [
    ("Cluster", NODE),
    ("Node", NODE),
    ("CommandLine", NODE),
    ("Component", JOB),
    ("Control", SCHEDULER),
    ("Control", NODE),
    ("Instance", JOB),
    ("Weights", JOB),
    ("Machine", NODE),
]
"""Each service, and who serves it. A cluster passes on the calls of Control to its jobs."""


def services() -> dict[str, ServiceDescriptor]:
    """Those of all files of the schema, by name."""
    modules = (each.name for each in pkgutil.iter_modules(tidegate.v1.__path__) if each.name.endswith("_pb2"))
    files = [importlib.import_module(f"tidegate.v1.{name}").DESCRIPTOR for name in modules]
    return {name: service for each in files for name, service in each.services_by_name.items()}


def test_each_method_names_its_callers() -> None:
    found = {
        f"{service.name}.{method.name}": " ".join(sorted(callers_of(service, method.name)))
        for service in services().values()
        for method in service.methods
    }
    assert found == CALLERS


def test_each_service_is_called_below() -> None:
    assert {name for name, _ in SERVERS} == services().keys()


class Lab:
    """The credentials of a cluster, and a server of one service, whose handlers note what was reached."""

    def __init__(self, folder: Path, own: Identity) -> None:
        self.folder, self.own = folder, own
        self.authority = Authority.create(folder / "ca", "lab")
        self.foreign = Authority.create(folder / "foreign", "lab")
        self.elsewhere = Authority.load(folder / "ca")
        self.elsewhere.cluster = "elsewhere"
        self.endpoint = ""
        self.reached: list[str] = []
        self.num_refused: Mapping[str, int] = {}

    @asynccontextmanager
    async def serving(self, service: ServiceDescriptor) -> AsyncIterator[None]:
        """With the credentials that are revoked by now."""
        self.authority.issue(self.own, self.folder / "server")
        tls = Shown(self.folder / "server")
        server = await serve([Service(service, partial(self._add_to, service))], "127.0.0.1:0", tls=tls)
        self.endpoint, self.num_refused = server.endpoint, tls.shown.num_refused
        try:
            yield
        finally:
            await server.stop(grace_s=0.0)

    def credentials(self, caller: Identity) -> dict[str, Path]:
        """Folders of one that counts, and of those that do not."""
        found = {why: self.folder / f"{why} {caller.party} {caller.name}" for why in WANT_STATUS if why not in NOBODY}
        self.authority.issue(caller, found["good"])
        self.authority.revoke(self.authority.issue(caller, found["revoked"]).serial)
        self.elsewhere.issue(Identity("elsewhere", caller.party, caller.name), found["another cluster's"])
        self.foreign.issue(caller, found["another authority's"])
        issue_expired(self.authority, caller, found["expired"])
        return found

    def channel(self, credential: Path | None) -> grpc.aio.Channel:
        """None: with TLS, and without a credential."""
        own: tuple[bytes, ...] = ()
        if credential is not None:
            key, begin, cert = (credential / CREDENTIAL).read_bytes().partition(b"-----BEGIN CERTIFICATE-----")
            own = (key, begin + cert)
        credentials = grpc.ssl_channel_credentials((self.folder / "ca" / CA_CERT).read_bytes(), *own)
        options = [("grpc.ssl_target_name_override", self.own.server_name)]
        return grpc.aio.secure_channel(self.endpoint, credentials, options=options)

    @asynccontextmanager
    async def channels(self, service: ServiceDescriptor) -> AsyncIterator[dict[tuple[str, Identity | None], Any]]:
        """To a server of this service, by what the credential is and whose."""
        made = {caller: self.credentials(caller) for caller in (NODE, SCHEDULER, JOB, OPERATOR, VIEWER, OTHER_JOB)}
        async with self.serving(service), AsyncExitStack() as closing:
            found: dict[tuple[str, Identity | None], grpc.aio.Channel] = {
                ("without TLS", None): grpc.aio.insecure_channel(self.endpoint),
                ("without a credential", None): self.channel(None),
            }
            for caller, folders in made.items():
                found |= {(why, caller): self.channel(folder) for why, folder in folders.items()}
            for channel in found.values():
                await closing.enter_async_context(channel)
            yield found

    def _add_to(self, service: ServiceDescriptor, server: grpc.aio.Server) -> None:
        handlers = {method.name: self._handler(method) for method in service.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))

    def _handler(self, method: MethodDescriptor) -> Any:
        async def single(request: Any, context: Any) -> bytes:
            self.reached.append(path_of(method))
            return b""

        async def stream(request: Any, context: Any) -> AsyncIterator[bytes]:
            self.reached.append(path_of(method))
            yield b""

        make = getattr(grpc, f"{kind_of(method)}_rpc_method_handler")
        return make(stream if method.server_streaming else single)


class Shown(Credentials):
    """Shows who may call the server."""

    shown: Access

    def access(self, *services: Any, **for_all: Any) -> Access:
        self.shown = super().access(*services, **for_all)
        return self.shown


def kind_of(method: MethodDescriptor) -> str:
    kinds = {False: "unary", True: "stream"}
    return f"{kinds[method.client_streaming]}_{kinds[method.server_streaming]}"


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


async def status_of(
    channel: grpc.aio.Channel, method: MethodDescriptor, request: bytes = b"", *, timeout_s: float | None = PATIENCE_S
) -> grpc.StatusCode:
    """How a call ends, or OK at its first answer."""
    call = getattr(channel, kind_of(method))(path_of(method))
    started = call([request] if method.client_streaming else request, timeout=timeout_s)
    try:
        await (anext(aiter(started)) if method.server_streaming else started)
    except grpc.aio.AioRpcError as refused:
        return refused.code()
    finally:
        started.cancel()
    return grpc.StatusCode.OK


def want_of(why: str, caller: Identity | None, method: MethodDescriptor, own: Identity) -> grpc.StatusCode:
    if caller is None or WANT_STATUS[why] is not grpc.StatusCode.OK:
        return WANT_STATUS[why]
    is_named = method in TOOLS or caller.party in CALLERS[method.full_name.removeprefix("tidegate.v1.")].split()
    is_near = caller.party is not Party.JOB or own in (SCHEDULER, caller)
    return grpc.StatusCode.OK if is_named and is_near else grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(("name", "own"), SERVERS, ids=[f"{name} of a {own.party}" for name, own in SERVERS])
async def test_each_method_is_reached_by_its_callers_alone(name: str, own: Identity, tmp_path: Path) -> None:
    service, lab = services()[name], Lab(tmp_path, own)
    found, want = {}, {}
    with capture_logs() as lines:
        async with lab.channels(service) as channels:
            for (why, caller), channel in channels.items():
                for method in service.methods:
                    call = f"{why} {caller} {path_of(method)}"
                    found[call] = await status_of(channel, method)
                    want[call] = want_of(why, caller, method, own)
    assert found == want
    seen = {status: [call.split()[-1] for call, own in want.items() if own is status] for status in grpc.StatusCode}
    assert lab.reached == seen[grpc.StatusCode.OK]
    refused = Counter(seen[grpc.StatusCode.UNAUTHENTICATED] + seen[grpc.StatusCode.PERMISSION_DENIED])
    assert lab.num_refused == refused
    logged = Counter((line["method"], line["num_refused"]) for line in lines if line["event"] == "call refused")
    assert logged == Counter((path, count + 1) for path, calls in refused.items() for count in range(calls))


@pytest.mark.parametrize("own", [JOB, SCHEDULER, NODE], ids=lambda own: str(own.party))
async def test_health_and_reflection_answer_each_party_of_the_cluster_and_nobody_else(
    own: Identity, tmp_path: Path
) -> None:
    lab, found, want = Lab(tmp_path, own), {}, {}
    async with lab.channels(services()["Instance"]) as channels:
        for (why, caller), channel in channels.items():
            for method in TOOLS:
                request = LIST_SERVICES if method.client_streaming else b""
                call = f"{why} {caller} {path_of(method)}"
                found[call] = await status_of(channel, method, request, timeout_s=None)
                for _ in range(3):
                    # So gRPC's client tells a stream of requests that is refused just as it sends.
                    if method.client_streaming and found[call] is grpc.StatusCode.INTERNAL:
                        found[call] = await status_of(channel, method, request, timeout_s=None)
                want[call] = want_of(why, caller, method, own)
                if method.name == "List" and want[call] is grpc.StatusCode.OK:
                    want[call] = grpc.StatusCode.UNIMPLEMENTED  # so the library, to whom it lets in
    assert found == want
    assert {path_of(method) for method in TOOLS} == lab.num_refused.keys()
