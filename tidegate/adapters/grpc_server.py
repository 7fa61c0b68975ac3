"""Serves gRPC. Every listener of Tidegate is made here.

Invariants:
- A listener is on loopback, or has mutual TLS (`grpc_tls`), or was explicitly allowed to be open.
  [test_grpc: listener_beyond_loopback_is_refused]
- A call without a deadline is refused before its handler runs. Health and reflection are excepted, because tools call
  them without one. [test_grpc: call_without_a_deadline_is_refused]
- With TLS health and reflection answer each party whose credential counts, and nobody else.
  [test_grpc_callers: health_and_reflection_answer_each_party]
- A handler's exception becomes a status with its message. An exception without a status of its own becomes INTERNAL and
  is logged. The exception's name travels as trailing metadata, so that the caller can distinguish refusals.
  [test_grpc: handlers_exception_reaches_the_caller]
- A stream that people read says nothing more to one whose credential was revoked or has ended.
  [test_command_line: whose_credential_was_revoked]
- Two listeners never share a port. [test_grpc: taken_port_is_refused]
"""

from __future__ import annotations

import inspect
import ipaddress
import time
from collections import ChainMap
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import grpc
import structlog
from google.protobuf.descriptor import ServiceDescriptor
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from tidegate.certs.identity import Identity, NotAllowed, NotAuthenticated
from tidegate.ownership.records import (
    GpuBusy,
    StaleToken,
    StoreNotAdopted,
    StoreUnavailable,
    UnknownGpu,
    UnknownTransition,
    VersionConflict,
)
from tidegate.ports.bus import BusUnavailable, JobNotOpen, StreamFull, UnknownDeadLetter
from tidegate.ports.rpc import PeerUnavailable

if TYPE_CHECKING:
    # Without TLS its library is not imported: it takes 12 MB of each process.
    from tidegate.adapters.grpc_tls import Access, Credentials

MAX_MESSAGE_BYTES = 257 * 2**20
"""One limit for a worker on this node and a worker on another node.

A frame to a worker on this node may hold 256 MiB (`runtime.channel`): a whole minibatch to train on. A call to a worker
on another node carries the same and its wrapping. A smaller limit would refuse by the place of a worker. Weights go in
chunks.
"""
ERROR_METADATA = "tidegate-error"
CHECKED_AGAIN_S = 10.0
"""Before what a stream of `Service.for_people` says after that time, its caller's credential is looked at again."""

_FOR_TOOLS = (
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"],
)
_CALLER: ContextVar[Identity | None] = ContextVar("who calls", default=None)
_STATUSES: Statuses = {
    ValueError: grpc.StatusCode.INVALID_ARGUMENT,
    NotImplementedError: grpc.StatusCode.UNIMPLEMENTED,  # a generated servicer raises this for a missing method
    StaleToken: grpc.StatusCode.FAILED_PRECONDITION,
    GpuBusy: grpc.StatusCode.FAILED_PRECONDITION,
    StoreNotAdopted: grpc.StatusCode.FAILED_PRECONDITION,
    VersionConflict: grpc.StatusCode.ABORTED,
    UnknownGpu: grpc.StatusCode.NOT_FOUND,
    UnknownTransition: grpc.StatusCode.NOT_FOUND,
    UnknownDeadLetter: grpc.StatusCode.NOT_FOUND,
    JobNotOpen: grpc.StatusCode.NOT_FOUND,
    StreamFull: grpc.StatusCode.RESOURCE_EXHAUSTED,
    NotAuthenticated: grpc.StatusCode.UNAUTHENTICATED,
    NotAllowed: grpc.StatusCode.PERMISSION_DENIED,
    StoreUnavailable: grpc.StatusCode.UNAVAILABLE,
    BusUnavailable: grpc.StatusCode.UNAVAILABLE,
    PeerUnavailable: grpc.StatusCode.UNAVAILABLE,
}

# Each method has its own types of request, response and handler.
Behaviour = Callable[[Any, Any], Any]


Statuses = Mapping[type[Exception], grpc.StatusCode]


@dataclass(frozen=True, slots=True)
class Service:
    """One service to serve: its descriptor, and the generated `add_XServicer_to_server` bound to the servicer.

    `statuses` are those of the refusals that are its own. A subclass has the status of its class. `for_people`: its
    streams end with their reader's credential. Those of processes go on: a job runs for longer than one counts."""

    descriptor: ServiceDescriptor
    add_to: Callable[[grpc.aio.Server], None]
    statuses: Statuses = field(default_factory=dict)
    for_people: bool = False


def caller() -> Identity | None:
    """Who calls the handler that runs. None: a listener without TLS does not know."""
    return _CALLER.get()


def keepalive(after_s: float) -> list[tuple[str, Any]]:
    """Options of a channel or a server: a peer is asked after that time of silence, and has the same time to answer."""
    return [
        ("grpc.keepalive_time_ms", round(1000 * after_s)),
        ("grpc.keepalive_timeout_ms", round(1000 * after_s)),
        ("grpc.http2.max_pings_without_data", 0),
        # The peer asks as often.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", round(500 * after_s)),
    ]


class _Health(Protocol):
    """The asyncio servicer of grpcio-health-checking, which its type stubs lack."""

    async def set(self, service: str, status: health_pb2.HealthCheckResponse.ServingStatus.ValueType) -> None: ...

    async def enter_graceful_shutdown(self) -> None: ...


class RpcServer:
    """A running server. `serve` makes it."""

    def __init__(self, server: grpc.aio.Server, health_service: _Health, endpoint: str) -> None:
        self._server = server
        self._health = health_service
        self.endpoint = endpoint

    @property
    def port(self) -> int:
        return int(self.endpoint.rpartition(":")[2])

    async def stop(self, *, grace_s: float) -> None:
        """Takes no new calls, reports this to health, and cancels the calls that still run after the grace."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def serve(
    services: Sequence[Service],
    address: str,
    *,
    tls: Credentials | None = None,
    allow_insecure_remote: bool = False,
    keepalive_s: float | None = None,
) -> RpcServer:
    """Serves on `<host>:<port>`. Port 0 takes a free one. ValueError for an address that is forbidden or unusable.
    `keepalive_s`: a caller that says nothing for longer is asked whether it is there. None: after two hours."""
    host, port = _split(address)
    if tls is None and not allow_insecure_remote and not _is_loopback(host):
        raise ValueError(
            f"{address} listens beyond this machine without TLS: anyone who reaches it could command this job; "
            "listen on 127.0.0.1, give a credential, or allow it explicitly (allow_insecure_remote)"
        )
    access = None if tls is None else tls.access([service.descriptor for service in services], for_all=_FOR_TOOLS)
    statuses = ChainMap(*(dict(service.statuses) for service in services), dict(_STATUSES))
    server = grpc.aio.server(
        interceptors=[
            _Guard(statuses, access, checked_again=_methods(each.descriptor for each in services if each.for_people))
        ],
        options=[
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.so_reuseport", 0),
            *([] if keepalive_s is None else keepalive(keepalive_s)),
        ],
    )
    health_service = health.aio.HealthServicer()  # type: ignore[attr-defined]  # see _Health
    health_pb2_grpc.add_HealthServicer_to_server(health_service, server)
    for service in services:
        service.add_to(server)
        await health_service.set(service.descriptor.full_name, health_pb2.HealthCheckResponse.SERVING)
    await health_service.set("", health_pb2.HealthCheckResponse.SERVING)
    names = [service.descriptor.full_name for service in services]
    reflection.enable_server_reflection([*names, health.SERVICE_NAME, reflection.SERVICE_NAME], server)
    bound = _bind(server, f"{host}:{port}", None if tls is None else tls.for_server())
    await server.start()
    return RpcServer(server, health_service, f"{host}:{bound}")


def _methods(services: Iterable[ServiceDescriptor]) -> frozenset[str]:
    return frozenset(f"/{each.full_name}/{method.name}" for each in services for method in each.methods)


def _bind(server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as refused:
        raise ValueError(
            f"gRPC cannot listen on {address}: the port is taken, or the address is another machine's. "
            "Choose another, or port 0 for a free one"
        ) from refused


def _split(address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) < 2**16):
        raise ValueError(f"listen address {address!r} must be <host>:<port>, for example 127.0.0.1:0")
    return host, int(port)


def _is_loopback(host: str) -> bool:
    """Whether it is a loopback address. Of names only localhost passes: a name may resolve to anything, at any time."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class _Guard(grpc.aio.ServerInterceptor):  # type: ignore[type-arg]  # no generic at run time
    """Runs before every handler: no call that is not allowed or has no deadline, no exception without a status."""

    def __init__(self, statuses: Statuses, access: Access | None, *, checked_again: Collection[str]) -> None:
        """`checked_again`: the methods whose streams end with their reader's credential."""
        self._statuses = statuses
        self._access = access
        self._checked_again = checked_again
        self._without_deadline = _methods(_FOR_TOOLS)
        self._log = structlog.get_logger("tidegate.grpc")

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any]]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any]:
        handler: Any = await continuation(handler_call_details)  # None for a method that no service has
        method = handler_call_details.method
        if handler is None:
            return handler  # type: ignore[return-value]  # grpcio takes None here, which its type stubs deny
        kinds = {
            (False, False): (grpc.unary_unary_rpc_method_handler, handler.unary_unary),
            (False, True): (grpc.unary_stream_rpc_method_handler, handler.unary_stream),
            (True, False): (grpc.stream_unary_rpc_method_handler, handler.stream_unary),
            (True, True): (grpc.stream_stream_rpc_method_handler, handler.stream_stream),
        }
        remake, behaviour = kinds[handler.request_streaming, handler.response_streaming]
        # The stream of health's Watch is written by the handler itself, and awaited.
        is_iterated = handler.response_streaming and not inspect.iscoroutinefunction(behaviour)
        guarded = self._guard_stream if is_iterated else self._guard_single
        return remake(guarded(method, behaviour), handler.request_deserializer, handler.response_serializer)

    def _guard_single(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def single(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                await self._admit(method, context)
                return await behaviour(request, context)
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001  # the edge: every failure becomes a status
                await self._refuse(method, context, error)

        return single

    def _guard_stream(self, method: str, behaviour: Behaviour) -> Behaviour:
        async def stream(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
            try:
                await self._admit(method, context)
                checked_s = time.monotonic()
                async for response in behaviour(request, context):
                    if method in self._checked_again and time.monotonic() - checked_s > CHECKED_AGAIN_S:
                        self._check(method, context, has_begun_earlier=True)
                        checked_s = time.monotonic()
                    yield response
            except grpc.aio.AbortError:
                raise
            except Exception as error:  # noqa: BLE001  # the edge: every failure becomes a status
                await self._refuse(method, context, error)

        return stream

    async def _admit(self, method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._check(method, context)
        if method not in self._without_deadline:
            await _require_deadline(method, context)

    def _check(
        self, method: str, context: grpc.aio.ServicerContext[Any, Any], *, has_begun_earlier: bool = False
    ) -> None:
        """NotAuthenticated or NotAllowed."""
        if self._access is not None:
            own = context.auth_context()
            _CALLER.set(self._access.check(method, own, has_begun_earlier=has_begun_earlier))

    async def _refuse(self, method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
        known = next((kind for kind in type(error).__mro__ if kind in self._statuses), None)
        name = type(error).__name__
        if known is None:
            self._log.error("call_failed", method=method, error=name, exc_info=error)
            code, message = grpc.StatusCode.INTERNAL, f"{name}: {error}"
        else:
            self._log.warning("call_refused", method=method, error=name, message=str(error))
            code, message = self._statuses[known], error.reason if isinstance(error, PeerUnavailable) else str(error)
        await context.abort(code, message, trailing_metadata=((ERROR_METADATA, name),))
        raise AssertionError("abort always raises")


async def _require_deadline(method: str, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    if context.time_remaining() is None:
        await context.abort(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"{method} was called without a deadline; set one (timeout= in Python, -max-time with grpcurl)",
        )
