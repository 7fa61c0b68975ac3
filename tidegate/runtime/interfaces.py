"""Which of a machine's interfaces has an address.

An address of loopback is on the interface of loopback, also where nobody assigned it: all of 127.0.0.0/8 is.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from ipaddress import IPv4Address, IPv4Interface

import psutil


class NotThisMachine(ValueError):
    """The address is another machine's, or nobody's."""


def interface_of(address: str) -> str:
    """The name of this machine's interface that has the IPv4 address, for example `eth0`. NotThisMachine."""
    wanted, known = IPv4Address(address), list(_interfaces())
    for name, own in known:
        if own.ip == wanted or (own.is_loopback and wanted in own.network):
            return name
    listed = ", ".join(f"{own.ip} ({name})" for name, own in known)
    raise NotThisMachine(f"{address} is no address of this machine, which has {listed}")


def addresses_here() -> list[str]:
    """The IPv4 addresses of this machine."""
    return [str(own.ip) for _, own in _interfaces()]


def _interfaces() -> Iterator[tuple[str, IPv4Interface]]:
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family == socket.AF_INET:
                yield name, IPv4Interface(f"{each.address}/{each.netmask or 32}")
