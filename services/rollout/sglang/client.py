"""A client of one SGLang server's HTTP API on loopback: JSON in and out, with its token. Any thread may call it."""

from __future__ import annotations

import http.client
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


class CallFailed(RuntimeError):
    """The server could not be reached, closed the connection, or answered with an error."""


@dataclass(frozen=True, slots=True)
class SglangClient:
    port: int
    token: str = field(repr=False)

    def get(self, path: str, *, timeout_s: float) -> Any:
        return self._call("GET", path, None, timeout_s)

    def post(self, path: str, body: Mapping[str, Any] | None = None, *, timeout_s: float | None) -> Any:
        """The answer, or None for an empty one.

        Without `timeout_s` it waits as long as the server takes. Raises CallFailed."""
        return self._call("POST", path, json.dumps(body or {}).encode(), timeout_s)

    def _call(self, method: str, path: str, body: bytes | None, timeout_s: float | None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            connection.request(method, path, body, headers)
            response = connection.getresponse()
            text = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise CallFailed(f"SGLang did not answer {method} {path} at port {self.port}: {error!r}") from error
        finally:
            connection.close()
        if response.status != http.HTTPStatus.OK:
            message = text[:500].decode(errors="replace")
            raise CallFailed(f"SGLang answered {method} {path} with status {response.status}: {message}")
        try:
            return json.loads(text) if text else None
        except ValueError as error:
            raise CallFailed(f"SGLang answered {method} {path} with invalid JSON: {text[:100]!r}") from error
