"""`tidegate up`, `down` and `submit` without a cluster: what is refused, and with which words."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from cli.command import execute
from tests.e2e.clusters import own_address
from tests.unit.cli.configs import small
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("up n0", 2, "'n0' is no NODE=SLOTS with 1 to 1024 slots, as in n0=8"),
        ("up n0=0", 2, "'n0=0' is no NODE=SLOTS"),
        ("up n0=9999", 2, "with 1 to 1024 slots"),
        ("up n0=8 n0=4", 2, "node n0 is named twice"),
        ("up", 2, "NODE=SLOTS"),
        ("up n0=8@", 2, "or n1=8@b on machine b"),
        ("up n0=8 n1=8@b", 2, "no --machine names b: give it, as in --machine b=10.0.0.8:7400"),
        ("up n0=8 --machine b=10.0.0.8:7400", 2, "--machine b has no node: give it some, as in n1=8@b"),
        ("up n1=8@b --machine b", 2, "--machine b: give a name and the address of its agent"),
        ("up n1=8@b --machine b=h:1 --machine b=h:2", 2, "--machine b is given twice"),
        ("up n1=8@b --machine b=h:1", 2, "--machine needs --address, --machine-credentials, --gate-root too"),
        (
            "up n0=8 --address 10.0.0.7",
            2,
            "--address: only a cluster with nodes on other machines (--machine) needs it",
        ),
        ("up n1=8@b --machine b=h {far}", 2, "machine b: 'h' is no IPv4 address with a port"),
        (
            "up n1=8@b --machine b=10.0.0.8:1 {far}",
            2,
            "--address: give an IPv4 address that the other machines reach, not 127.0.0.1",
        ),
        ("down", 1, "no cluster is up in"),
        ("wait", 1, "no cluster is up in {jobs}"),
        ("describe node n0", 1, "no cluster is up in {jobs}"),
        ("describe job n0", 2, "describe takes no n0; `tidegate describe --help` lists the arguments"),
        ("submit {config}", 1, "no cluster is up in {jobs}: start one with tidegate up n0=8"),
        ("backup {jobs}/b.json", 1, "no cluster is up in {jobs}"),
        ("restore {config}", 2, "one.yaml is no backup that can be restored"),
        ("restore {jobs}/none.json", 2, "none.json is no backup that can be restored ([Errno 2]"),
        ("submit {config} --resume --force", 2, "--resume needs the files that --force removes"),
        ("submit {config} algorithm.group_size=0", 2, "algorithm.group_size"),
        (
            "submit {config} servers.redis_replicas=1",
            2,
            "job small has servers.redis_replicas, and a cluster has its own servers: leave servers out, or start the "
            "job by tidegate run, which uses yours [override servers.redis_replicas]",
        ),
    ],
)
def test_what_cannot_be_done_is_told(
    words: str, code: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, jobs = tmp_path / "one.yaml", tmp_path / "jobs"
    config.write_text(yaml.safe_dump(small(tmp_path)))
    far = f"--address 127.0.0.1 --machine-credentials {tmp_path} --gate-root {tmp_path}"
    assert execute([*words.format(config=config, jobs=jobs, far=far).split(), "--output-dir", str(jobs)]) == code
    assert told.format(jobs=jobs) in capsys.readouterr().err


def test_gates_of_several_machines_lie_outside_the_folder_that_they_share(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Authority.create(tmp_path / "ca", "lab").issue(Identity("lab", Party.OPERATOR, "me"), tmp_path / "operator")
    gates, jobs = tmp_path / "jobs" / "gates", tmp_path / "jobs"
    words = ["up", "n1=8@b", "--machine", "b=192.0.2.8:1", "--address", own_address(), "--gate-root", str(gates)]
    words += ["--machine-credentials", str(tmp_path / "operator"), "--output-dir", str(jobs)]
    assert execute(words) == 2
    told = (
        f"--gate-root {gates} is in --output-dir {jobs}, which the machines share: gates are on a disk of each machine"
    )
    assert told in capsys.readouterr().err
    assert not jobs.exists()


def test_credentials_of_two_authorities_do_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = own_address()
    node, operator = tmp_path / "node", tmp_path / "operator"
    Authority.create(tmp_path / "ca", "lab").issue(Identity("lab", Party.NODE, "me"), node)
    Authority.create(tmp_path / "other", "lab").issue(Identity("lab", Party.OPERATOR, "me"), operator)
    where = ["--machine", f"me={address}:7400", "--address", address, "--gate-root", str(tmp_path)]
    credentials = ["--machine-credentials", str(operator), "--node-credentials", str(node)]
    jobs = ["--output-dir", str(tmp_path / "jobs")]
    assert execute(["up", "n0=3@me", *where, *credentials, *jobs]) == 2
    want = f"--node-credentials {node} is of another authority than --machine-credentials {operator}"
    assert want in capsys.readouterr().err
    assert not (tmp_path / "jobs").exists()
