"""How a call to another instance can fail. The caller catches these exceptions, whatever protocol carries the call."""

from __future__ import annotations


class PeerUnavailable(ConnectionError):
    """The peer gave no answer within the deadline. The outcome is unknown; a command may be sent again.

    The text names the call, for logs. `reason` is for people."""

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason or message


class PeerRefused(RuntimeError):
    """The peer refused or failed. `status` is the gRPC code's name, `error` the name of the peer's exception.

    The text names the call, for logs. `reason` is the peer's own text, for people."""

    def __init__(self, message: str, *, reason: str, status: str, error: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.status = status
        self.error = error
