"""The interfaces of this machine."""

from __future__ import annotations

import re

import psutil
import pytest

from tidegate.runtime.interfaces import NotThisMachine, interface_of


@pytest.mark.parametrize("address", ["127.0.0.1", "127.0.0.9"])
def test_every_address_of_loopback_is_on_its_interface(address: str) -> None:
    name = interface_of(address)
    assert "127.0.0.1" in [each.address for each in psutil.net_if_addrs()[name]]


def test_an_address_of_another_machine_is_refused_with_those_of_this_one() -> None:
    with pytest.raises(NotThisMachine, match=re.escape("192.0.2.1 is no address of this machine, which has 127.0.0.1")):
        interface_of("192.0.2.1")
