"""An identity and its names in a certificate."""

from __future__ import annotations

import pytest

from tidegate.certs.identity import BadIdentity, Identity, Party
from tidegate.v1 import access_pb2


@pytest.mark.parametrize("party", Party)
def test_an_identity_is_what_its_uri_says(party: Party) -> None:
    identity = Identity("lab-1", party, "n0")
    assert identity.uri == f"spiffe://lab-1/{party}/n0"
    assert Identity.parse(identity.uri) == identity
    assert identity.server_name == f"n0.{party}.lab-1.tidegate"


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "spiffe://lab/node",
        "spiffe://lab/node/a/b",
        "spiffe://lab/root/a",
        "https://lab/node/a",
        "spiffe://lab/node/A",
        "spiffe://lab/node/a.b",
        "spiffe:///node/a",
        "spiffe://lab/node/-a",
        f"spiffe://lab/node/{'a' * 64}",
    ],
)
def test_what_names_nobody_is_refused(uri: str) -> None:
    with pytest.raises(BadIdentity):
        Identity.parse(uri)


def test_the_parties_are_those_of_the_schema() -> None:
    of_schema = {name.removeprefix("PARTY_").lower() for name in access_pb2.Party.keys()}  # noqa: SIM118 # no mapping
    assert set(Party) == of_schema - {"unspecified"}
