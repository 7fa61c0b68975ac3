"""The doctor's checks of the disk and of CUDA, for any job and for the job of a config.

A folder that does not exist yet is on the disk of its nearest existing parent.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from cli.__main__ import main
from cli.doctor import Finding, Health, credential, credentials_of, disk, examine, listeners
from services.rollout.sglang import keeper
from tests.e2e.clusters import own_address
from tests.expired import issue_expired
from tests.unit.cli.configs import small, small_config, small_file
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.cluster.machines import Machines
from tidegate.config.files import load_config
from tidegate.runtime import dies_with_parent
from tidegate.runtime.cuda import cuda_fault

pytestmark = pytest.mark.usefixtures("torch_is_asked_once")

MORE_THAN_ANY_DISK = 2**80


def test_too_little_disk_for_the_streams_gives_a_warning_with_the_remedy(tmp_path: Path) -> None:
    found = disk(tmp_path / "not" / "yet", least_bytes=MORE_THAN_ANY_DISK)
    assert found.health is Health.WARN
    assert "which the streams of a job reserve" in found.remedy
    assert "name another --output-dir" in found.remedy


def test_enough_disk_needs_no_remedy(tmp_path: Path) -> None:
    found = disk(tmp_path / "not" / "yet", least_bytes=0)
    assert (found.health, found.remedy) == (Health.OK, "")


def test_the_disk_examined_is_that_of_the_output_folder(tmp_path: Path) -> None:
    checks = [finding.check for finding in examine(output_dir=tmp_path / "elsewhere")]
    assert f"disk of {tmp_path / 'elsewhere'}" in checks


def found_of(
    host: str,
    *command: str,
    through: Sequence[str] = (),
    look: Callable[[psutil.Process], Finding] = lambda process: listeners([process]),
) -> Finding:
    """What the doctor finds while a process with this command line listens there, started by that of `through`."""
    family = "AF_INET6" if ":" in host else "AF_INET"
    socket = f"s = socket.socket(socket.{family}); s.bind((sys.argv[1], 0)); s.listen()"
    listens = f"import socket, sys; {socket}; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [*through, sys.executable, "-c", listens, host, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        found = look(psutil.Process(process.pid))
        process.communicate()
    return found


@pytest.mark.parametrize(
    ("host", "health", "words"),
    [
        ("127.0.0.1", Health.OK, "all on loopback"),
        ("::ffff:127.0.0.1", Health.OK, "all on loopback"),
        ("0.0.0.0", Health.WARN, "beyond loopback: 0.0.0.0:"),
    ],
)
def test_a_process_of_tidegate_that_listens_beyond_loopback_is_found(host: str, health: Health, words: str) -> None:
    found = found_of(host, "services.of-a-test")
    assert found.health is health
    assert words in found.found


def test_a_process_may_listen_where_it_was_told_to_and_nowhere_else(tmp_path: Path) -> None:
    address = own_address()
    config = tmp_path / "config.json"
    cluster = {**small(tmp_path)["cluster"], "addresses": {"n0": address}}
    told = small_config(tmp_path, cluster=cluster)
    config.write_text(told.to_json())
    machines = json.dumps(Machines(address).to_json())
    for command in (
        ("agent", "--listen", f"{address}:7400"),
        ("agent", f"--listen={address}:7400"),
        ("services.node", "--machines", machines),
        ("services.actor", "--config", str(config)),
    ):
        found = found_of(address, *command)
        assert found.health is Health.OK, command
        assert f"on loopback and on {address}, as they were told" in found.found
    # gRPC listens like this.
    assert found_of(f"::ffff:{address}", "agent", "--listen", f"{address}:7400").health is Health.OK
    for command in (("agent", "--listen", "192.0.2.99:7400"), ("services.actor", "--config", str(tmp_path / "gone"))):
        found = found_of(address, *command)
        assert found.health is Health.WARN, command
        assert f"beyond loopback: {address}:" in found.found
    assert found_of("0.0.0.0", "agent", "--listen", "0.0.0.0:7400").health is Health.WARN


def test_the_processes_of_an_sglang_server_are_known_by_the_keeper_that_tidegate_gives_it() -> None:
    server = (sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))")
    keeps = (sys.executable, "-I", "-S", keeper.__file__, str(os.getpid()), dies_with_parent.__file__, *server)
    found = found_of("0.0.0.0", through=keeps)
    assert found.health is Health.WARN
    assert "beyond loopback: 0.0.0.0:" in found.found
    assert found_of("127.0.0.1", through=keeps).found == "3 processes of Tidegate, all on loopback"
    somebodys = found_of("0.0.0.0", "-m", "sglang.launch_server")
    assert somebodys.health is Health.OK, "a server that Tidegate did not start"


class OfAnotherUser(psutil.Process):
    def uids(self) -> Any:
        return super().uids()._replace(real=os.getuid() + 1)


def test_root_sees_the_processes_of_all_users_and_others_see_their_own() -> None:
    def as_seen_by(uid: int) -> Finding:
        def look(process: psutil.Process) -> Finding:
            return listeners([OfAnotherUser(process.pid)], own_uid=uid)

        return found_of("0.0.0.0", "services.of-a-test", look=look)

    assert as_seen_by(0).health is Health.WARN
    assert as_seen_by(os.getuid() + 1).health is Health.WARN
    assert as_seen_by(os.getuid() + 2).found == "no process of Tidegate of this user runs"


def test_a_process_that_takes_another_program_meanwhile_is_no_error() -> None:
    class Changing(psutil.Process):
        """It has no command line at its second look."""

        num_looks = 0

        def cmdline(self) -> list[str]:
            self.num_looks += 1
            return super().cmdline() if self.num_looks == 1 else []

    def look(process: psutil.Process) -> Finding:
        return listeners([Changing(process.pid)])

    assert found_of("127.0.0.1", "services.of-a-test", look=look).health is Health.OK


def test_a_credential_that_ends_within_two_weeks_gives_a_warning_with_the_command_that_renews_it(
    tmp_path: Path,
) -> None:
    authority, operator = Authority.create(tmp_path / "ca", "lab"), Identity("lab", Party.OPERATOR, "me")
    folder = tmp_path / "me"
    remedy = f"renew it with tidegate certs issue operator me --authority AUTHORITY --to {folder}"
    authority.issue(operator, folder, days=15)
    assert credential(folder) == Finding(f"credential {folder}", Health.OK, "14 days left")
    ends = authority.issue(operator, folder, days=14).ends
    what = f"the credential of {operator} in {folder}"
    want = Finding(f"credential {folder}", Health.WARN, f"{what} ends on {ends:%Y-%m-%d %H:%M} UTC", remedy)
    assert credential(folder) == want
    issue_expired(authority, operator, folder)
    found = credential(folder)
    assert (found.health, found.remedy) == (Health.WARN, remedy)
    assert found.found.startswith(f"{what} ended on ")
    (folder / "ca.pem").unlink()
    assert (credential(folder).health, credential(folder).remedy) == (Health.WARN, "issue it again")


def test_the_credentials_of_contexts_and_configs_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("TIDEGATE_OPERATOR", str(tmp_path / "named"))
    authority, operator = Authority.create(tmp_path / "ca", "lab"), Identity("lab", Party.OPERATOR, "me")
    for folder in ("of-a-context", "named", "of-a-config/scheduler", "of-a-config/job"):
        (tmp_path / folder).parent.mkdir(exist_ok=True)
        authority.issue(operator, tmp_path / folder, days=3)
    words = ["--output-dir", str(tmp_path), "--operator", str(tmp_path / "of-a-context")]
    assert main(["context", "add", "lab", *words]) == 0
    capsys.readouterr()
    file = small_file(
        tmp_path, servers={"nats_url": "tls://nats.example:4222", "nats_credentials": str(tmp_path / "of-a-config")}
    )
    assert main(["doctor", "-o", "json", str(file)]) == 0
    rows = {row["check"]: row["health"] for row in json.loads(capsys.readouterr().out)}
    for folder in ("of-a-context", "named", "of-a-config/scheduler", "of-a-config/job"):
        assert rows[f"credential {tmp_path / folder}"] == "warn", folder


def test_the_credentials_of_agents_are_those_of_their_command_lines(tmp_path: Path) -> None:
    for folder in ("node", "operator"):
        (tmp_path / folder).mkdir()
    machines = json.dumps(Machines(credentials=str(tmp_path / "operator")).to_json())
    for command, want in (
        (("agent", "--listen", "127.0.0.1:7400", "--credentials", "node"), {"node"}),
        (("services.node", f"--node-credentials={tmp_path / 'node'}", "--machines", machines), {"node", "operator"}),
        (("agent", "--listen", "127.0.0.1:7400", "--credentials", "in-a-container"), set()),
        (("services.actor", "--credentials", "node"), set()),
    ):
        waits = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()", *command]
        with subprocess.Popen(waits, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=tmp_path) as process:
            assert process.stdout is not None
            process.stdout.readline()
            found = credentials_of([psutil.Process(process.pid)])
            process.communicate()
        assert found == {tmp_path / each for each in want}, command


without_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


@without_cuda
def test_a_job_on_cuda_is_refused_by_the_doctor_in_one_line_below_its_findings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(small_file(tmp_path)), "cluster.device=cuda"]) == 2
    said = capsys.readouterr()
    (*warnings, refusal) = said.err.splitlines()
    assert refusal.startswith(f"tidegate: cluster.device=cuda, but on this machine torch {torch.__version__} ")
    assert [line for line in warnings if "cuda" in line] == []
    assert f"disk of {tmp_path / 'jobs'}" in said.out


def test_a_job_on_cpu_slots_asks_for_no_cuda(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cuda_fault(small_config(tmp_path).cluster) == ""
    assert main(["doctor", str(small_file(tmp_path))]) == 0
    assert f"host memory {tmp_path / 'memory'}" in capsys.readouterr().out


@without_cuda
def test_a_machine_without_cuda_is_fit_for_cpu_slots_and_torch_says_why() -> None:
    (found,) = [finding for finding in examine() if finding.check == "GPUs"]
    assert found.health is Health.OK
    assert found.found.startswith(f"none, jobs run on CPU slots: torch {torch.__version__} ")


def test_no_command_imports_torch_before_it_needs_it() -> None:
    """torch takes seconds, and `doctor` has to say that it is missing."""
    code = "import sys, cli.command; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_doctor_says_the_warnings_that_a_start_of_the_job_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = small(tmp_path)["cluster"] | {"slots_per_gpu": 3}
    assert main(["doctor", str(small_file(tmp_path, cluster=shared))]) == 0
    want = load_config(small_file(tmp_path, cluster=shared)).warnings()
    assert any("3 slots share a device" in warning for warning in want)
    assert capsys.readouterr().err.splitlines() == [f"tidegate: {warning}" for warning in want]
