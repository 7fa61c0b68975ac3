"""Calls other instances: one channel for each endpoint, a deadline on every call, named exceptions instead of statuses.

The ordinary generated stub uses a channel. A call without a `timeout` gets the default one.
- A call without an answer raises `PeerUnavailable`: the outcome is unknown.
- A call that the peer refused or failed at raises `PeerRefused`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import grpc

from tidegate.adapters.grpc_server import ERROR_METADATA, MAX_MESSAGE_BYTES, keepalive
from tidegate.certs.identity import Identity
from tidegate.ports.rpc import PeerRefused, PeerUnavailable

if TYPE_CHECKING:
    from tidegate.adapters.grpc_tls import Credentials
    from tidegate.certs.authority import Credential

# A client tries a restarted peer again within a second. gRPC's own default waits up to two minutes.
_FIRST_RECONNECT_MS = 100
_LAST_RECONNECT_MS = 1000
_NO_ANSWER = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

# Each method has its own types of request and response.
Continue = Callable[[Any, Any], Any]


class Channels:
    """The channels of one process. Event loops must not share them."""

    def __init__(
        self, *, default_timeout_s: float, tls: Credentials | None = None, keepalive_s: float | None = None
    ) -> None:
        """`keepalive_s`: a peer that says nothing for longer is asked whether it is there. None: never."""
        self._default_timeout_s = default_timeout_s
        self._keepalive = [] if keepalive_s is None else keepalive(keepalive_s)
        self._tls = tls
        self._channels: dict[tuple[str, Identity | None], grpc.aio.Channel] = {}

    def connect(self, endpoint: str, peer: Identity | None = None) -> grpc.aio.Channel:
        """The channel to `<host>:<port>`, made at the first call. It connects and reconnects by itself.

        `peer`: who has to answer there. ValueError where TLS is in use, and nobody is named."""
        if (endpoint, peer) not in self._channels:
            self._channels[endpoint, peer] = self._open(endpoint, peer)
        return self._channels[endpoint, peer]

    async def close(self) -> None:
        """Ends every channel and the calls on it."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close(None)

    def _open(self, endpoint: str, peer: Identity | None) -> grpc.aio.Channel:
        options: list[tuple[str, Any]] = [
            *self._keepalive,
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.initial_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
            ("grpc.min_reconnect_backoff_ms", _FIRST_RECONNECT_MS),
            ("grpc.max_reconnect_backoff_ms", _LAST_RECONNECT_MS),
            # The data plane is a private network. A proxy from the environment is meant for the world outside.
            ("grpc.enable_http_proxy", 0),
        ]
        # What this channel shows, as long as it is open.
        own = None if self._tls is None else self._tls.now()
        interceptors: list[Any] = [
            kind(endpoint, self._default_timeout_s, own=own, peer=peer) for kind in (_UnaryCalls, _StreamedCalls)
        ]
        if own is None:
            return grpc.aio.insecure_channel(endpoint, options=options, interceptors=interceptors)
        if peer is None:
            raise ValueError(f"say who has to answer at {endpoint}: whoever listens there would get the call")
        options.append(("grpc.ssl_target_name_override", peer.server_name))
        shown = grpc.ssl_channel_credentials(own.ca, own.key, own.cert)
        return grpc.aio.secure_channel(endpoint, shown, options=options, interceptors=interceptors)


class _Calls:
    def __init__(
        self, endpoint: str, default_timeout_s: float, *, own: Credential | None, peer: Identity | None
    ) -> None:
        self._endpoint = endpoint
        self._default_timeout_s = default_timeout_s
        self._own = own
        self._peer = peer

    def with_deadline(self, details: Any) -> Any:
        return details._replace(timeout=self._default_timeout_s) if details.timeout is None else details

    def named(self, failure: grpc.aio.AioRpcError, details: Any) -> Exception:
        method = details.method.decode() if isinstance(details.method, bytes) else details.method
        what = f"{method} at {self._endpoint}"
        trailing: Any = failure.trailing_metadata() or ()
        errors = [str(value) for key, value in trailing if key == ERROR_METADATA]
        reason, status = str(failure.details()), failure.code().name
        if failure.code() in _NO_ANSWER:
            silence = f"gave no answer within {details.timeout:g} s"
            # With the name of an error it is the server's own text: another one did not answer the server.
            is_late = failure.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            words = reason if errors else f"{self._endpoint} {silence}" if is_late else self._broken(reason)
            message = f"{what} {silence} ({status}: {reason})"
            if not errors and self._own is not None and self._own.days_left() < 0:
                # The peer's TLS ends the connection then, and does not tell why.
                ended = f"{self._own.until()}: {self._own.renewal()}"
                message, words = f"{ended} ({message})", f"{ended} ({words})"
            return PeerUnavailable(message, reason=words)
        return PeerRefused(f"{what}: {reason}", reason=reason, status=status, error=errors[0] if errors else "")

    def _broken(self, told: str) -> str:
        fitting = (words for parts, words in _BROKEN if any(part in told for part in parts))
        return next(fitting, "the connection to {} broke").format(self._endpoint, peer=self._peer)


_BROKEN = (
    (("Connection refused",), "nothing listens at {}"),
    (("hostname lookup", "Domain name not found"), "{} has the name of no host"),
    (("Hostname Verification",), "who listens at {} has another one's certificate"),
    (("WRONG_VERSION_NUMBER",), "who listens at {} speaks no TLS: it is another program"),
    (
        ("certificate has expired",),
        "the certificate of {peer} at {} has ended: renew it there with tidegate certs issue",
    ),
    (("SSL_ERROR_SSL",), "who listens at {} has a certificate of another authority than ours"),
    (("No route to host", "unreachable", "timed out", "failed to connect"), "{} cannot be reached"),
)
"""What gRPC tells of a call without an answer, in words for people: the first that fit."""


class _UnaryCalls(_Calls, grpc.aio.UnaryUnaryClientInterceptor):  # type: ignore[type-arg]  # no generic at run time
    async def intercept_unary_unary(self, continuation: Continue, details: Any, request: Any) -> Any:
        details = self.with_deadline(details)
        call = await continuation(details, request)
        try:
            return await call
        except grpc.aio.AioRpcError as failure:
            raise self.named(failure, details) from failure


class _StreamedCalls(_Calls, grpc.aio.UnaryStreamClientInterceptor):  # type: ignore[type-arg]  # no generic at run time
    async def intercept_unary_stream(self, continuation: Continue, details: Any, request: Any) -> AsyncIterator[Any]:
        details = self.with_deadline(details)
        call = await continuation(details, request)
        return self._responses(call, details)

    async def _responses(self, call: Any, details: Any) -> AsyncIterator[Any]:
        try:
            async for response in call:
                yield response
        except grpc.aio.AioRpcError as failure:
            raise self.named(failure, details) from failure
        finally:
            call.cancel()  # no effect when the call is over; if not, nobody reads it any more
