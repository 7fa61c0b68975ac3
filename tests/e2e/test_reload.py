"""A cluster whose agent takes its program anew, as for another release, while jobs run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from cli.cluster_access import agent_pid
from cli.command import execute
from tests.e2e.clusters import LOOK_AGAIN_S, Cluster, standing_by
from tidegate.cluster.folder import ClusterFolder
from tidegate.cluster.keepers import Keepers
from tidegate.json_text import parse_json
from tidegate.launcher.claim import write_private
from tidegate.launcher.lock import LOCK, held_by
from tidegate.runtime import handover


@contextmanager
def asked_all_the_time(folder: ClusterFolder) -> Iterator[set[int | None]]:
    """The agents that have the folder meanwhile."""
    seen: set[int | None] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.001):
            seen.add(agent_pid(folder))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def fork_servers(agent: psutil.Process) -> list[str]:
    """Their command lines."""
    found = []
    for each in agent.children():
        with suppress(psutil.Error):  # it has just ended
            found += [" ".join(each.cmdline())]
    return [words for words in found if "tidegate.runtime.forkserver" in words]


def pids_of_servers(agent: psutil.Process) -> set[int]:
    found = set()
    for each in agent.children():
        with suppress(psutil.Error):  # it has just ended
            found |= {each.pid} if each.name() in ("nats-server", "valkey-server") else set()
    return found


def test_no_job_notices_that_its_agent_takes_its_program_anew_and_nobody_gets_in_between(cluster: Cluster) -> None:
    assert "no cluster is up in" in cluster.run("reload", is_refused=True)
    cluster.run("up", "n0=9")
    agent = cluster.agent()
    cluster.submit("one", algorithm__iterations=6)
    cluster.submit("cancelled", algorithm__iterations=1000)
    cluster.until_trained("one")
    servers = pids_of_servers(agent)
    with asked_all_the_time(cluster.folder) as seen:
        assert "goes on under release" in cluster.run("reload")
    assert seen == {agent.pid}
    assert servers == pids_of_servers(agent)
    cluster.submit("two", algorithm__iterations=6)
    cluster.run("cancel", "cancelled")
    waited = {row["job"]: row for row in json.loads(cluster.run("wait", "one", "two", "-o", "json"))}
    assert {(row["state"], row["starts"]) for row in waited.values()} == {("finished", 1)}
    assert cluster.until("cancelled", state="ended").end == "cancelled"
    one, two = (cluster.summary(job) for job in ("one", "two"))
    assert one["weights_checksum"] == two["weights_checksum"]
    assert (one["lost"], one["duplicates"]) == (0, 0)
    # Those of programs before, for jobs that have ended.
    while len(forkers := fork_servers(agent)) > 1:
        time.sleep(LOOK_AGAIN_S)
    assert "forkserver-1.sock" in forkers[0]
    family = agent.children(recursive=True)
    cluster.run("down")
    assert not [each for each in family if each.is_running()]
    assert not [path for path in cluster.host_memory() if path.exists()]


def test_what_an_agent_started_before_dies_with_it_under_its_new_program(cluster: Cluster) -> None:
    cluster.run("up", "n0=3")
    cluster.submit("one", algorithm__iterations=1000)
    cluster.until_trained("one")
    agent = cluster.agent()
    cluster.run("reload")
    cluster.strike("services.node.launch")
    while cluster.until("one", state="running").num_starts < 2:
        time.sleep(LOOK_AGAIN_S)
    _, memory = cluster.host_memory()
    while held_by(memory / LOCK) is None:
        time.sleep(LOOK_AGAIN_S)
    cluster.run("pause")
    family = agent.children(recursive=True)
    agent.kill()
    psutil.wait_procs(family, timeout=30)
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    os.utime(memory / LOCK, (0, 0))  # else its launcher might just begin
    cluster.run("up", "n0=3")
    assert not memory.exists()
    assert cluster.until("one", state="queued").num_starts == 2
    cluster.run("cancel", "one")
    cluster.until("one", state="cancelled")


def test_an_agent_whose_program_is_gone_goes_on_with_the_one_that_it_has(cluster: Cluster, tmp_path: Path) -> None:
    program = tmp_path / "tidegate"
    program.symlink_to(Path(sys.executable).with_name("tidegate"))
    subprocess.run([program, "up", "n0=3", "--output-dir", str(cluster.output_dir)], check=True)
    program.unlink()
    assert f"the program {program} cannot be started: No such file or directory. Nothing has changed" in cluster.run(
        "reload", is_refused=True
    )
    agent = cluster.agent()
    agent.send_signal(handover.SIGNAL)
    while "its program is not taken anew" not in (cluster.folder.logs / "agent.jsonl").read_text():
        time.sleep(LOOK_AGAIN_S)
    cluster.submit("one")
    assert cluster.until("one", state="finished").num_starts == 1
    description = parse_json(cluster.folder.description.read_bytes())
    write_private(cluster.folder.description, json.dumps(description | {"handover_form": 0}))
    refused = cluster.run("reload", is_refused=True)
    assert f"the agent {agent.pid} is of an earlier release: jobs cannot run on" in refused
    assert cluster.agent() == agent


def test_an_agent_keeps_its_turn_and_its_place_in_the_line(cluster: Cluster, tmp_path: Path) -> None:
    keepers = Keepers(cluster.folder.keepers)
    other = keepers.claim(1, name="other", address="192.0.2.99")
    assert other is not None
    up = standing_by(tmp_path)
    assert "me stands by" in cluster.run(*up)
    assert "this machine stands by for the cluster of" in cluster.run("reload")
    keepers.end(other)
    while execute(["describe", "node", "n0", "--output-dir", str(cluster.output_dir)]):
        time.sleep(LOOK_AGAIN_S)
    cluster.submit("one", algorithm__iterations=6)
    cluster.until_trained("one")
    for _ in range(2):
        assert "goes on under release" in cluster.run("reload")
    assert cluster.until("one", state="finished").num_starts == 1
    newest = keepers.newest()
    assert newest is not None
    assert (newest.number, newest.name, newest.has_ended) == (2, "me", False)
