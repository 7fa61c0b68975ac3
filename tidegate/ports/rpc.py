"""What a call to another instance can end in, besides an answer. Whoever calls catches these, whatever carries them."""

from __future__ import annotations


class NotSupported(Exception):
    """The schema has the call, this release does not; the text says what to use instead."""


class PeerUnavailable(ConnectionError):
    """No answer from the peer within the deadline: the outcome is unknown, a command may be sent again."""


class PeerRefused(RuntimeError):
    """The peer answered with a refusal or failed. `status` is the gRPC code's name, `error` the peer's exception."""

    def __init__(self, message: str, *, status: str, error: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = error
