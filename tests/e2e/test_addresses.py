"""A job whose nodes have addresses of their own, as nodes on several machines have."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.e2e.jobs import calm_job, running
from tidegate.types import Role

ADDRESSES = {"n0": "127.0.0.2", "n1": "127.0.0.3"}


async def test_the_services_and_stores_of_a_node_listen_on_its_address(tmp_path: Path) -> None:
    job = calm_job("placed", algorithm__iterations=2, cluster__addresses=ADDRESSES)
    async with running(job, tmp_path) as placed:
        await placed.until_trained(1)
        rank = placed.worker("n0/0")
        rank.suspend()  # so that the job goes on as long as it is looked at
        found = {
            (role, node): _listens_on(placed.service(f"services.{role}", node)) for node in ADDRESSES for role in Role
        }
        first_rank = _listens_on(rank)
        rank.resume()
        result = await placed.result()
    assert found == {(role, node): {address} for node, address in ADDRESSES.items() for role in Role}
    # Gloo listens on the first address of the interface.
    assert first_rank == {"127.0.0.1", ADDRESSES["n0"]}
    assert (result["summary"]["lost"], result["summary"]["duplicates"]) == (0, 0)


def _listens_on(process: psutil.Process) -> set[str]:
    connections = process.net_connections(kind="inet")
    # gRPC binds an IPv4 address on an IPv6 socket.
    return {each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN}
