"""A cluster on this machine, as a person uses it: `up`, `submit`, `get jobs`, `cancel`, `down`."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from cli.cluster_queue import gpus, submissions
from cli.command import execute
from tests.e2e.clusters import LOOK_AGAIN_S, Cluster, own_address
from tests.e2e.jobs import REPOSITORY
from tests.ports import kept_port
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.folder import ClusterDescription
from tidegate.cluster.keepers import Keepers
from tidegate.config.job_config import JobConfig
from tidegate.json_text import parse_json

AWAY_S = 5.0
"""Longer than the leases of these jobs: each of their schedulers looks at the new Redis many times meanwhile."""


@pytest.mark.usefixtures("umask_022")
def test_jobs_wait_run_side_by_side_with_the_same_bits_and_leave_nothing(cluster: Cluster) -> None:
    assert "is up: n0 with 6 slots" in cluster.run("up", "n0=6")
    assert "a cluster is up in" in cluster.run("up", "n0=6", is_refused=True)
    refused = cluster.submit("wide", "cluster.nodes={a: 9}", *wide(9), is_refused=True)
    assert "needs 9 GPUs (9 on a), those of a node together; n0 has 6" in refused
    cluster.run("pause")  # so that one does not end before two is there
    for job in ("one", "two", "late"):
        assert f"job {job} is queued" in cluster.submit(job)
    assert "job late is " in cluster.submit("late", is_refused=True)
    cluster.submit("never", "--priority", "-1")
    assert "never" in {row["job"] for row in json.loads(cluster.run("get", "jobs", "-o", "json"))}
    assert "job never: taken out of the queue" in cluster.run("cancel", "never")
    cluster.until("never", state="cancelled")
    rows = {row["job"]: row["state"] for row in json.loads(cluster.run("get", "jobs", "-o", "json"))}
    assert rows["never"] == "cancelled"
    cluster.run("pause", "--undo")
    assert len(json.loads(cluster.run("get", "gpus", "-o", "json"))) == 6
    (node,) = json.loads(cluster.run("get", "nodes", "-o", "json"))
    assert (node["node"], node["slots"]) == ("n0", 6)
    assert "the machine that keeps the cluster: host " in cluster.run("describe", "node", "n0")
    assert "no node 'n7': it has n0" in cluster.run("describe", "node", "n7", is_refused=True)
    assert "has no job nosuch; it has " in cluster.run("wait", "one", "nosuch", is_refused=True)
    waited = json.loads(cluster.run("wait", "-o", "json"))
    assert {row["job"]: row["state"] for row in waited} == dict.fromkeys(("one", "two", "late"), "finished")
    assert "all jobs of the cluster of " in cluster.run("wait")
    paused_told = cluster.run("pause", "--reason", "new disks")
    assert paused_told == f"no job starts until tidegate pause --undo --output-dir {cluster.output_dir}: new disks\n"
    cluster.submit("paused")
    assert "no job runs in the cluster of " in cluster.run("wait", "--running")
    assert cluster.run("pause", "--reason", "it keeps the first one") == paused_told
    assert "after 0.2 s not ended: paused" in cluster.run("wait", "--timeout", "0.2", is_refused=True)
    (paused,) = json.loads(cluster.run("get", "jobs", "paused", "-o", "json"))
    assert (paused["state"], paused["message"]) == ("queued", "waits for 3 GPUs; the queue is paused: new disks")
    assert "jobs start again" in cluster.run("pause", "--undo")
    (ran,) = json.loads(cluster.run("wait", "paused", "-o", "json"))
    assert (ran["state"], ran["starts"]) == ("finished", 1)
    assert "job never cancelled" in cluster.run("wait", "never", is_refused=True)
    told = cluster.told()
    gpus = {line["job"]: line["gpus"] for line in told if line["state"] == "placed"}
    assert not {*gpus["one"]} & {*gpus["two"]}
    cluster_own = [cluster.folder.root / name for name in ("", "queue", "logs", "servers", "jobs", "gates/n0")]
    for own in (*cluster_own, cluster.output_dir / "one"):
        assert own.stat().st_mode & 0o777 == 0o700, own
    order = [(line["job"], line["state"]) for line in told if line["job"] != "never"]
    ended = min(order.index(("one", "ended")), order.index(("two", "ended")))
    assert order.index(("two", "placed")) < ended < order.index(("late", "placed"))
    summaries = [cluster.summary(job) for job in ("one", "two", "late")]
    assert len({each["weights_checksum"] for each in summaries}) == 1
    assert [(each["lost"], each["duplicates"]) for each in summaries] == [(0, 0)] * 3
    configs = [JobConfig.read(cluster.output_dir / job / "config.json") for job in ("one", "two", "late")]
    adopters = [config.job for config in configs if config.runtime.adopts_store]
    assert not adopters, "a job knows the gates of its own nodes alone, so it must not open the store that all share"
    family = cluster.agent().children(recursive=True)
    cluster.run("down")
    assert not [each for each in family if each.is_running()]
    assert not [path for path in cluster.host_memory() if path.exists()]
    assert "no cluster is up" in cluster.submit("more", is_refused=True)


def test_a_cluster_in_the_foreground_ends_in_order_when_it_is_asked_to(cluster: Cluster, tmp_path: Path) -> None:
    (gates := tmp_path / "gates").mkdir()
    words = ["up", "n0=3", "--foreground", "--gate-root", str(gates), "--output-dir", str(cluster.output_dir)]
    command = [sys.executable, "-m", "cli", *words]
    with subprocess.Popen(command, cwd=REPOSITORY) as agent:
        while not json.loads(cluster.run("get", "nodes", "-o", "json")):
            assert agent.poll() is None
            time.sleep(LOOK_AGAIN_S)
        assert cluster.agent().pid == agent.pid
        assert [each.name for each in gates.iterdir()] == ["n0"]
        family = cluster.agent().children(recursive=True)
        agent.terminate()
        assert agent.wait() == 0
    assert not [each for each in family if each.is_running()]


def wide(num_gpus: int) -> tuple[str, ...]:
    engines = ",".join(str(index) for index in range(1, num_gpus - 1))
    placement = f"{{actor: '0', rollout: '{engines}', inference: '{num_gpus - 1}'}}"
    return (f"cluster.component_placement={placement}",)


@pytest.mark.long
@pytest.mark.parametrize("loses_data", [False, True], ids=["with its data", "without its data"])
def test_a_killed_agent_loses_nothing_and_the_next_one_goes_on(cluster: Cluster, *, loses_data: bool) -> None:
    cluster.run("up", "n0=3")
    cluster.submit("one", algorithm__iterations=6)
    cluster.submit("two", actor__lr_schedule={})
    cluster.until_trained("one")
    agent = cluster.agent()
    family = agent.children(recursive=True)
    agent.kill()
    psutil.wait_procs(family, timeout=30)
    assert not [each for each in family if each.is_running() and each.status() != psutil.STATUS_ZOMBIE]
    if loses_data:
        shutil.rmtree(cluster.folder.servers)
    cluster.run("up", "n0=3")
    assert (cluster.until("one", state="finished")).num_starts == 2
    cluster.until("two", state="finished")
    for job, num_iterations in (("one", 6), ("two", 1)):
        summary = cluster.summary(job)
        assert (summary["lost"], summary["duplicates"], summary["iterations"]) == (0, 0, num_iterations)
    assert "has finished" in cluster.submit("two", actor__lr_schedule={}, is_refused=True)
    cluster.submit("two", "--resume", actor__lr_schedule={}, algorithm__iterations=4)
    cluster.until("two", state="finished")
    assert cluster.summary("two")["iterations"] == 4
    cluster.submit("two", "--force")
    cluster.until("two", state="finished")
    assert cluster.summary("two")["iterations"] == 1


def test_a_machine_without_the_jobs_folder_submits_follows_and_looks(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its commands know the address and a credential alone."""
    authority = Authority.create(tmp_path / "ca", "lab")
    for party, name in ((Party.NODE, "a"), (Party.OPERATOR, "me"), (Party.VIEWER, "looks")):
        authority.issue(Identity("lab", party, name), tmp_path / name)
    with kept_port(host=(address := own_address())) as port:
        own = ("--address", address, "--command-port", str(port))
        refused = cluster.run("up", "n0=4", *own, is_refused=True)
        assert "--command-port needs --node-credentials too" in refused
        refused = cluster.run("up", "n0=4", *own, "--node-credentials", str(tmp_path / "me"), is_refused=True)
        assert "is of operator/me of cluster lab, and a machine's is needed" in refused
        with socket.create_server((address, port)):
            refused = cluster.run("up", "n0=4", *own, "--node-credentials", str(tmp_path / "a"), is_refused=True)
        assert f"{address}:{port} cannot be used" in refused
        cluster.run("up", "n0=4", *own, "--node-credentials", str(tmp_path / "a"))

    laptop = tmp_path / "laptop"
    shutil.copytree(REPOSITORY / "examples" / "own_data", laptop)
    # Data are not taken along.
    data = (laptop / "train.jsonl").rename(tmp_path / "train.jsonl")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(laptop))
    monkeypatch.chdir(laptop)
    for name in ("me", "looks"):
        where = ("--keeper", f"a={address}:{port}", "--operator", str(tmp_path / name))
        assert execute(["context", "add", name, *where]) == 0
    capsys.readouterr()
    job = ["job.yaml", "algorithm.iterations=1", f"data.train={data}", "--cluster"]
    assert execute(["submit", *job, "looks"]) == 2
    assert "submit needs an operator's credential: that of context looks is of viewer/looks" in capsys.readouterr().err
    assert execute(["submit", "job.yaml", "--cluster", "me"]) == 2
    assert "train.jsonl" in capsys.readouterr().err

    assert execute(["submit", *job, "me", "--follow"]) == 0
    out, said = capsys.readouterr()
    assert out == "job own-data is queued\n"
    assert "tidegate: job own-data iteration 0: " in said
    config = (cluster.output_dir / "own-data" / "config.json").read_text()
    assert str(cluster.output_dir / ".files") in config
    assert str(laptop) not in config
    assert execute(["get", "jobs", "--cluster", "looks", "-o", "json"]) == 0
    assert [row["state"] for row in json.loads(capsys.readouterr().out)] == ["finished"]
    assert not (laptop / "jobs").exists()
    assert execute(["drain", "n7", "--cluster", "me"]) == 2
    assert "the cluster has no node 'n7': it has n0" in capsys.readouterr().err
    cluster.run("down")
    assert execute(["get", "jobs", "--cluster", "looks"]) == 1
    told = f"no machine answers as the keeper of this cluster: a: nothing listens at {address}:{port}"
    assert told in capsys.readouterr().err


def test_a_machine_that_may_keep_the_cluster_by_turns_goes_on_with_its_queue(cluster: Cluster, tmp_path: Path) -> None:
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "operator")
    for name in ("me", "other"):
        authority.issue(Identity("lab", Party.NODE, name), tmp_path / name)
    (gates := tmp_path / "gates").mkdir()
    address = own_address()
    credential = ("--machine-credentials", str(tmp_path / "operator"))
    where = ("--machine", f"me={address}:7400", "--address", address, *credential, "--gate-root", str(gates))
    up: tuple[str, ...] = ("up", "n0=3@me", "--standby")
    refused = cluster.run(*up, *where[:2], is_refused=True)
    assert "--standby needs --address, --machine-credentials, --gate-root too" in refused
    nobody = ("--machine", "other=192.0.2.99:7400", *where[2:])
    refused = cluster.run("up", "n0=3@other", "--standby", *nobody, is_refused=True)
    assert f"--address {address}: 0 of the machines are there" in refused

    nodes_own = (*where[:4], "--machine-credentials", str(tmp_path / "me"), *where[6:])
    assert "is of node/me of cluster lab, and an operator's is needed" in cluster.run(*up, *nodes_own, is_refused=True)
    refused = cluster.run(*up, *where, "--node-credentials", str(tmp_path / "other"), is_refused=True)
    assert "other is the credential of node/other of cluster lab, not of node/me of cluster lab" in refused

    up = (*up, "--node-credentials", str(tmp_path / "me"))
    cluster.run(*up, *where)
    assert parse_json(cluster.folder.endpoint.read_bytes())["far"].startswith(f"{address}:")
    cluster.submit("one")
    cluster.run("drain", "n0")
    cluster.submit("waits", "--priority", "1")
    agent = cluster.agent()
    family = agent.children(recursive=True)
    agent.kill()
    psutil.wait_procs(family, timeout=30)
    cluster.run(*up, *where)
    assert [path.name for path in gates.glob(".cluster-*/servers")] == ["servers"]
    states = {each.job: each.state for each in asyncio.run(submissions(cluster.output_dir))}
    assert states["waits"] == "queued"
    cluster.run("drain", "n0", "--undo")
    for job in ("one", "waits"):
        cluster.until(job, state="finished")
        summary = cluster.summary(job)
        assert (summary["lost"], summary["duplicates"], summary["iterations"]) == (0, 0, 1)
    assert "neither keeps the cluster of" in cluster.run("down")
    names = sorted(path.name for path in cluster.folder.keepers.iterdir())
    assert names == ["1.json", "2.json"]

    # Another machine's turn, which has not ended.
    keepers = Keepers(cluster.folder.keepers)
    term = keepers.claim(3, name="other", address="192.0.2.99", cluster="of other nodes")
    assert term is not None
    refused = cluster.run(*up, *where, is_refused=True)
    assert "other (192.0.2.99) keeps the cluster of" in refused
    assert "give the same NODE=SLOTS and --machine on all machines" in refused
    assert "other (192.0.2.99) does, with its last beat " in cluster.run("up", "n0=3", is_refused=True)
    assert cluster.run("describe", "node", "n0", is_refused=True).endswith("s ago: call it there\n")
    keepers.end(term)
    cluster.run("up", "n0=3")
    assert {each.job: each.end for each in asyncio.run(submissions(cluster.output_dir))} == dict.fromkeys(
        ("one", "waits"), "finished"
    )
    cluster.run("down")
    cluster.run(*up, *where)
    assert "servers" not in {path.name for path in cluster.folder.root.iterdir()}


def test_a_job_that_waits_keeps_the_files_of_its_submission(
    cluster: Cluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own"
    shutil.copytree(REPOSITORY / "examples" / "own_data", own)
    cluster.run("up", "n0=4")
    cluster.run("drain", "n0")
    cluster.run("submit", str(own / "job.yaml"), "algorithm.iterations=1")
    (own / "grading.py").write_text("raise RuntimeError")
    (own / "chat.jinja").unlink()
    cluster.run("drain", "n0", "--undo")
    # What reads beside its folder does not work in a copy, and stays where it is.
    shutil.copy(REPOSITORY / "examples" / "own_data" / "chat.jinja", own)
    (tmp_path / "share.txt").write_text("0.5")
    text = "from pathlib import Path\nSHARE = float((Path(__file__).parents[1] / 'share.txt').read_text())\n"
    (own / "beside.py").write_text(f"{text}def share(response):\n    return SHARE\n")
    (own / "beside.yaml").write_text("{job: beside, rewards: [{name: function, path: 'beside:share'}]}")
    config = [str(own / "job.yaml"), str(own / "beside.yaml"), "algorithm.iterations=1"]
    assert execute(["submit", *config, "--output-dir", str(cluster.output_dir)]) == 0
    assert "the job's files are not copied, but read when it starts: their copy is refused (" in capsys.readouterr().err
    in_place = [*config, "job=in-place", "--no-copies"]
    assert execute(["submit", *in_place, "--follow", "--output-dir", str(cluster.output_dir)]) == 0
    said = capsys.readouterr().err
    assert "copied" not in said
    assert said.index("job in-place is running") < said.index("job in-place iteration 0: reward ")
    assert "job in-place finished: " in said
    for job in ("own-data", "beside", "in-place"):
        cluster.until(job, state="finished")
    names_copies = [
        ".files" in (cluster.output_dir / job / "config.json").read_text() for job in ("own-data", "in-place")
    ]
    assert names_copies == [True, False]


def test_a_queue_that_cannot_be_read_or_written_is_told_at_once(
    cluster: Cluster, capsys: pytest.CaptureFixture[str]
) -> None:
    records = cluster.folder.queue / "records"
    records.mkdir(parents=True)
    (records / "damaged.json").write_text("{")
    (records / "folder.json").mkdir()
    assert execute(["up", "n0=3", "--output-dir", str(cluster.output_dir)]) == 0
    said = capsys.readouterr().err
    for name in ("damaged", "folder"):
        assert f"{records / name}.json cannot be read (" in said
    cluster.run("down")
    cluster.folder.queue.rename(cluster.folder.root / "aside")
    cluster.folder.queue.write_text("")
    began_s = time.monotonic()
    refused = cluster.run("up", "n0=3", is_refused=True)
    assert time.monotonic() - began_s < 30, "it waited for nothing"
    assert f"the cluster could not write its files: [Errno 20] Not a directory: '{cluster.folder.queue}'" in refused


@pytest.mark.long
def test_a_killed_launcher_scheduler_and_server_are_replaced(cluster: Cluster) -> None:
    cluster.run("up", "n0=3")
    cluster.submit("one", algorithm__iterations=20)
    cluster.until_trained("one")
    for program in (
        "services.node.launch",
        "services.scheduler.cluster",
        "tidegate.runtime.forkserver",
        "valkey-server",
        "nats-server",
    ):
        cluster.strike(program)
        cluster.until("one", state="running")
    found = cluster.until("one", state="finished")
    assert found.num_starts == 2, "only the launcher's death was a start"
    summary = cluster.summary("one")
    assert (summary["lost"], summary["duplicates"], summary["iterations"]) == (0, 0, 20)


@pytest.mark.long
def test_a_restarted_redis_that_two_jobs_share_is_opened_by_the_cluster_alone(cluster: Cluster) -> None:
    """Each job is on a node of its own, so neither knows the gate of the other one."""
    cluster.run("up", "n0=3", "n1=3")
    jobs = ("one", "two")
    for job in jobs:
        cluster.submit(job, algorithm__iterations=20, runtime__lease_ttl_s=3.0, runtime__lead_ttl_s=1.5)
    for job in jobs:
        cluster.until_trained(job)
    cluster.submit("late")
    of_cluster = cluster.process("services.scheduler.cluster")
    before = cluster.store()
    of_cluster.suspend()
    try:
        cluster.strike("valkey-server")
        deadline_s = time.monotonic() + AWAY_S
        while time.monotonic() < deadline_s:
            seen = cluster.store()
            assert not seen.is_open or seen == before, "a job has opened the store, without the gate of the other job"
            time.sleep(LOOK_AGAIN_S)
        assert seen.run_id != before.run_id, "Redis has restarted"
    finally:
        of_cluster.resume()
    for job in jobs:
        assert cluster.until(job, state="finished").num_starts == 1
    cluster.until("late", state="finished")
    assert cluster.store().term == before.term + 1, "it was opened once"

    gpus = {line["job"]: {*line["gpus"]} for line in cluster.told() if line["state"] == "placed"}
    assert not gpus["one"] & gpus["two"]
    for job in jobs:
        assert {gpu for gpu, _, _ in cluster.granted(job)} == gpus[job], "no job ever had a GPU of another's place"
    order = [(line["job"], line["state"]) for line in cluster.told()]
    ended = min(order.index((job, "ended")) for job in jobs)
    assert ended < order.index(("late", "placed")), "no GPU of a job looked free to the queue"
    granted = [grant for job in (*jobs, "late") for grant in cluster.granted(job)]
    assert len({*granted}) == len(granted), "no token of a GPU was given to two jobs"
    summaries = [cluster.summary(job) for job in jobs]
    assert [(each["lost"], each["duplicates"], each["iterations"]) for each in summaries] == [(0, 0, 20)] * 2
    assert len({each["weights_checksum"] for each in summaries}) == 1


@pytest.mark.long
def test_a_job_of_a_drained_node_goes_on_elsewhere_with_the_same_bits(cluster: Cluster) -> None:
    cluster.run("up", "n0=3", "n1=3")
    cluster.submit("moved", algorithm__iterations=20)
    cluster.until_trained("moved")
    node, other = cluster.nodes_of("moved")[-1], {"n0": "n1", "n1": "n0"}
    assert f"node {node} gets no jobs" in cluster.run("drain", node)
    assert cluster.until("moved", state="finished").num_starts == 2
    assert cluster.nodes_of("moved") == [node, other[node]]
    states = {row["node"]: row["state"] for row in json.loads(cluster.run("get", "nodes", "-o", "json"))}
    assert states == {node: "drained", other[node]: "ready"}
    cluster.submit("beside", algorithm__iterations=20)
    cluster.submit("undisturbed", algorithm__iterations=20)
    cluster.until("beside", state="running")
    assert "stay until they end" in cluster.run("drain", other[node], "--keep-jobs")
    assert "takes jobs again" in cluster.run("drain", node, "--undo")
    cluster.until("undisturbed", state="finished")
    assert cluster.until("beside", state="finished").num_starts == 1
    assert (cluster.nodes_of("beside"), cluster.nodes_of("undisturbed")) == ([other[node]], [node])
    moved, undisturbed = cluster.summary("moved"), cluster.summary("undisturbed")
    assert (moved["lost"], moved["duplicates"], moved["iterations"]) == (0, 0, 20)
    assert moved["weights_checksum"] == undisturbed["weights_checksum"]


@pytest.mark.long
def test_a_restored_queue_goes_on_after_the_loss_of_all_that_the_cluster_had(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("up", "n0=3", "n1=3")
    cluster.run("drain", "n1", "--keep-jobs")
    cluster.submit("goes-on", algorithm__iterations=20)
    cluster.submit("waits", "--priority", "1")
    cluster.until_trained("goes-on")
    backup = tmp_path / "queue.json"
    assert "has 2 jobs that wait or run, and 0 that have ended" in cluster.run("backup", str(backup))
    assert backup.stat().st_mode & 0o777 == 0o600
    assert "is there already" in cluster.run("backup", str(backup), is_refused=True)
    cluster.run("down")
    shutil.rmtree(cluster.folder.root)
    cluster.run("up", "n0=3", "n1=3")
    told = cluster.run("restore", str(backup))
    assert "2 jobs of" in told
    assert "drained: n1" in told
    cluster.until("waits", state="running")
    there = asyncio.run(gpus(cluster.output_dir))
    assert there.nodes_keeping_jobs == there.drained_nodes == ["n1"]
    cluster.run("drain", "n1", "--undo")
    again = json.loads(cluster.run("restore", str(backup), "-o", "json"))
    assert (sorted(again["known"]), again["queued"], again["drained"]) == (["goes-on", "waits"], [], [])
    for job, num_iterations in (("goes-on", 20), ("waits", 1)):
        assert cluster.until(job, state="finished").num_starts == 2
        summary = cluster.summary(job)
        assert (summary["lost"], summary["duplicates"], summary["iterations"]) == (0, 0, num_iterations)
    placed = [line["job"] for line in cluster.told() if line["state"] == "placed"]
    assert placed == ["waits", "goes-on"], "the urgent one first"


def test_a_job_whose_start_is_refused_says_why_until_it_starts(cluster: Cluster) -> None:
    cluster.run("up", "n0=3")
    credentials = Path(ClusterDescription.parse(cluster.folder.description.read_bytes()).credentials)
    (credentials / "jobs").touch()  # in place of the folder
    cluster.submit("one")
    while not (placed := cluster.until("one", state="placed")).message:
        time.sleep(LOOK_AGAIN_S)
    assert placed.message.startswith(f"cannot start yet: its credentials cannot be written to {credentials}/jobs/one (")
    assert placed.message in cluster.run("describe", "one")
    (credentials / "jobs").unlink()
    cluster.until("one", state="finished")


def test_no_password_among_the_words_of_a_submission_is_kept_or_shown(cluster: Cluster) -> None:
    """What the record has is shown in messages, and among the words of the job's launcher."""
    cluster.run("up", "n0=3")
    cluster.submit("one", 'tracking.wandb.tags=["https://me:hunter2@host"]')
    record = parse_json((cluster.folder.queue / "records" / "one.json").read_text())
    words = ["tidegate", "submit", f"{cluster.output_dir.parent}/one.yaml", 'tracking.wandb.tags=["https://***@host"]']
    assert shlex.split(record["command"]) == [*words, "--output-dir", str(cluster.output_dir)]
    cluster.until("one", state="finished")
    assert "me:hunter2@host" in (cluster.output_dir / "one" / "config.json").read_text(), "the job has it"


def test_a_job_of_another_folder_is_not_restored(cluster: Cluster, tmp_path: Path) -> None:
    cluster.run("up", "n0=3")
    cluster.run("drain", "n0")
    cluster.submit("one")
    cluster.run("backup", str(backup := tmp_path / "queue.json"))
    text = backup.read_text().replace(str(cluster.output_dir), "/elsewhere")
    backup.write_text(text)
    refused = cluster.run("restore", str(backup), is_refused=True)
    assert "job one is of the folder /elsewhere: restore it there" in refused


def test_an_agent_outlives_a_server_that_does_not_answer_while_a_job_ends(cluster: Cluster) -> None:
    cluster.run("up", "n0=3")
    cluster.submit("one", algorithm__iterations=20)
    cluster.until_trained("one")
    agent, hangs = cluster.agent(), cluster.process("nats-server")
    hangs.suspend()
    cluster.strike("services.node.launch")
    while "the servers let in a job that has ended" not in (cluster.folder.logs / "agent.jsonl").read_text():
        time.sleep(LOOK_AGAIN_S)
    hangs.resume()
    assert cluster.until("one", state="finished").num_starts >= 2
    assert cluster.agent() == agent
