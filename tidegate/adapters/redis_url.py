"""The URL of a Redis: one server, or Sentinels that name the primary. Pure.

    redis://[user:password@]host:port/db                     rediss:// with TLS, unix:// a socket
    redis+sentinel://[user:password@]host:port,.../NAME      rediss+sentinel:// with TLS

User and password are those of the servers. Sentinels are asked without.

Invariant: a URL that is none is refused with a text that does not repeat its password.
[test_redis_url: without_its_password]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self
from urllib.parse import unquote, urlsplit

_PLAIN = ("redis", "rediss", "unix")
_SENTINEL = ("redis+sentinel", "rediss+sentinel")
_SENTINEL_PORT = 26379


class BadRedisUrl(ValueError):
    """The text is no URL of a Redis."""


@dataclass(frozen=True, slots=True)
class RedisUrl:
    """`sentinels` are empty where the URL names one server. `login`: user name and password, if it has them."""

    has_tls: bool
    sentinels: tuple[tuple[str, int], ...] = ()
    primary: str = ""
    login: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, url: str) -> Self:
        """BadRedisUrl."""
        scheme, _, rest = url.partition("://")
        if scheme in _PLAIN:
            if not _is_one_server(url):
                raise BadRedisUrl("it is not a URL like redis://host:port")
            return cls(scheme == "rediss")
        if scheme not in _SENTINEL:
            raise BadRedisUrl("it is not a URL like redis://host:port or redis+sentinel://host:port,host:port/NAME")
        place, _, name = rest.partition("/")
        proof, _, hosts = place.rpartition("@")
        user, _, password = proof.partition(":")
        login = {key: unquote(value) for key, value in (("username", user), ("password", password)) if value}
        if not name or "/" in name:
            raise BadRedisUrl("it does not name the primary after its Sentinels: redis+sentinel://host:port/NAME")
        return cls(scheme == "rediss+sentinel", tuple(map(_address, hosts.split(","))), name, login)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon:
        host, port = text, str(_SENTINEL_PORT)
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise BadRedisUrl(f"{text!r} is no address of a Sentinel: host:port")
    return host, int(port)


def _is_one_server(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.netloc or parts.path) and (parts.port is None or parts.port > 0)
    except ValueError:
        return False
