"""The queue of a cluster over two machines (`tests/two_machines.py`)."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.jobs import small_job
from tests.hosts.trained import ITERATIONS, assert_all_was_trained_once, summary_of
from tests.two_machines import THERE, Lab, link_down, services_there
from tidegate.certs.authority import REVOKED, Authority
from tidegate.certs.identity import Party
from tidegate.json_text import parse_json

pytestmark = [pytest.mark.hosts, pytest.mark.timeout(400)]

LOOK_AGAIN_S = 0.5


def row_of(lab: Lab, what: str, name: str) -> dict[str, Any]:
    return next(row for row in lab.tidegate("get", what) if name in (row.get("job"), row.get("node")))


def until(lab: Lab, what: str, name: str, **want: Any) -> None:
    """Until the row of a job or a node has these values."""
    while not want.items() <= row_of(lab, what, name).items():
        time.sleep(LOOK_AGAIN_S)


def submit(lab: Lab, *names: str) -> None:
    for name in names:
        lab.submit(small_job(name, algorithm__iterations=ITERATIONS))


def until_saved(lab: Lab, name: str) -> None:
    while not any((lab.jobs / name / "checkpoints").glob("*/manifest.json")):
        time.sleep(LOOK_AGAIN_S)


def assert_trained(lab: Lab, name: str, want_checksum: str) -> None:
    until(lab, "jobs", name, state="finished")
    # Its scheduler has said so, and its launcher is about to write the result.
    while not (lab.jobs / name / "result.json").exists():
        time.sleep(LOOK_AGAIN_S)
    assert_all_was_trained_once(lab.jobs / name, summary_of(lab.jobs / name), want_checksum)


def placements(lab: Lab, name: str) -> Iterator[str]:
    """The nodes of each place that a job had."""
    told = (lab.jobs / ".cluster" / "logs" / "cluster.jsonl").read_text().splitlines()
    for line in map(parse_json, told):
        if line.get("job") == name and line.get("state") == "placed":
            yield "+".join(sorted({gpu.partition("/")[0] for gpu in line["gpus"]}))


def test_jobs_wait_for_the_nodes_of_two_machines_and_have_the_weights_of_one(lab: Lab, want_checksum: str) -> None:
    with lab.cluster("n0=4", "n1=4@b"):
        submit(lab, "first", "second")
        until(lab, "jobs", "first", state="running")
        assert services_there()
        for name in ("first", "second"):
            assert_trained(lab, name, want_checksum)
            assert [*placements(lab, name)] == ["n0+n1"]
        until(lab, "nodes", "n1", state="ready", free=4)
        there = lab.tidegate("describe", "node", "n1")["machine"]
        assert there["name"] == "b"
        assert THERE in there["addresses"]
    assert not services_there()


@pytest.mark.parametrize("server", ["valkey-server", "nats-server"])
def test_a_job_over_two_machines_goes_on_after_a_server_was_killed(lab: Lab, want_checksum: str, server: str) -> None:
    with lab.cluster("n0=4", "n1=4@b") as agent:
        submit(lab, "struck")
        until_saved(lab, "struck")
        (struck,) = [each for each in agent.children(recursive=True) if server in " ".join(each.cmdline())]
        struck.kill()
        assert_trained(lab, "struck", want_checksum)
        assert [*placements(lab, "struck")] == ["n0+n1"]


def test_a_job_of_the_queue_goes_on_after_its_link_was_down_for_5_s(lab: Lab, want_checksum: str) -> None:
    with lab.cluster("n0=4", "n1=4@b"):
        submit(lab, "held-up")
        until_saved(lab, "held-up")
        before = services_there()
        assert before
        with link_down():
            time.sleep(5)
            assert services_there() == before
        assert_trained(lab, "held-up", want_checksum)
        assert [*placements(lab, "held-up")] == ["n0+n1"], "it was not interrupted"


def test_a_job_whose_machine_is_away_goes_on_on_another_one(lab: Lab, want_checksum: str) -> None:
    with lab.cluster("n0=8", "n1=8@b"):
        submit(lab, "here", "moved")
        until_saved(lab, "moved")
        with link_down():
            until(lab, "nodes", "n1", state="away")
            for name in ("here", "moved"):
                assert_trained(lab, name, want_checksum)
        assert [*placements(lab, "moved")] == ["n1", "n0"]
        until(lab, "nodes", "n1", state="ready", free=8)


def test_credentials_are_renewed_and_the_earlier_ones_revoked_while_a_job_runs(lab: Lab, want_checksum: str) -> None:
    authority = Authority.load(lab.folder / "ca")
    folders = {Party.NODE: lab.folder / "node", Party.OPERATOR: lab.folder / "operator"}
    with lab.cluster("n0=4", "n1=4@b"):
        submit(lab, "renewed")
        until_saved(lab, "renewed")
        earlier = authority.issued()
        assert {each.identity.party for each in earlier} == {*folders}
        for each in earlier:
            authority.issue(each.identity, folders[each.identity.party])
        authority.revoke(*(each.serial for each in earlier))
        for folder in folders.values():
            shutil.copy(lab.folder / "ca" / REVOKED, folder)
        assert_trained(lab, "renewed", want_checksum)
        assert [*placements(lab, "renewed")] == ["n0+n1"], "it was not interrupted"
        submit(lab, "next")
        assert_trained(lab, "next", want_checksum)
