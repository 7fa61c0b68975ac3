"""Who a process or a person is: a party of a cluster, with a name. Pure.

In a certificate an identity stands twice, as two subject alternative names:

    spiffe://CLUSTER/PARTY/NAME      for who is called: it reads who calls (SPIFFE)
    NAME.PARTY.CLUSTER.tidegate      for who calls: TLS compares it with the server that it wants

Names of one kind cannot be mistaken for another: they are lower-case letters, digits and hyphens, as in DNS.

Invariant: an identity is what its name in a certificate says. [test_identity: is_what_its_uri_says]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SCHEME = "spiffe://"


class BadIdentity(ValueError):
    """The text names nobody."""


class NotAuthenticated(RuntimeError):
    """The caller's credential is not believed."""


class NotAllowed(RuntimeError):
    """The caller is who he says, and may not call this."""


class Party(StrEnum):
    """Of the schema's `Party`: `PARTY_<NAME>` there."""

    NODE = "node"
    SCHEDULER = "scheduler"
    JOB = "job"
    OPERATOR = "operator"
    VIEWER = "viewer"


@dataclass(frozen=True, slots=True)
class Identity:
    """BadIdentity where cluster or name is no label."""

    cluster: str
    party: Party
    name: str

    def __post_init__(self) -> None:
        for what, text in (("cluster", self.cluster), ("name", self.name)):
            if not _LABEL.fullmatch(text):
                raise BadIdentity(
                    f"{what} {text!r} of a credential has 1 to 63 lower-case letters, digits and hyphens, and begins "
                    "and ends with a letter or digit"
                )

    def __str__(self) -> str:
        return f"{self.party}/{self.name} of cluster {self.cluster}"

    @property
    def uri(self) -> str:
        return f"{_SCHEME}{self.cluster}/{self.party}/{self.name}"

    @property
    def server_name(self) -> str:
        return f"{self.name}.{self.party}.{self.cluster}.tidegate"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """BadIdentity."""
        cluster, *path = uri.removeprefix(_SCHEME).split("/")
        if not uri.startswith(_SCHEME) or len(path) != 2 or path[0] not in set(Party):
            parties = ", ".join(Party)
            raise BadIdentity(f"{uri!r} is no identity: {_SCHEME}CLUSTER/PARTY/NAME, with one of {parties} as party")
        return cls(cluster, Party(path[0]), path[1])
