"""How a test's own client of NATS or Redis shows who it is, where the job's servers ask."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Any

from tidegate.adapters.permissions import store_user
from tidegate.certs.authority import Credential


def nats_options(credential: Path | None) -> dict[str, Any]:
    """Of `nats.connect`. None: nobody."""
    if credential is None:
        return {}
    context = ssl.create_default_context(cafile=credential / "ca.pem")
    context.load_cert_chain(credential / "credential.pem")
    return {"tls": context}


def redis_options(credential: Path | None) -> dict[str, Any]:
    """Of `Redis.from_url`. None: nobody."""
    if credential is None:
        return {}
    own = Credential.load(credential)
    return {"username": store_user(own.identity), "password": own.store_password}
