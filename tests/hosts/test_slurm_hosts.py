"""`deploy/tidegate.sbatch` on three machines with a real Slurm: an allocation is a cluster for as long as it lasts."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.jobs import REPOSITORY, small_job
from tests.hosts.containers import ADDRESSES, MARKS, Container, networked
from tests.hosts.trained import ITERATIONS, assert_all_was_trained_once, summary_of

pytestmark = [
    *MARKS,
    pytest.mark.timeout(600),
    pytest.mark.skipif(shutil.which("slurmctld") is None, reason="it needs Slurm and munge (slurm-wlm)"),
]

LOOK_AGAIN_S = 0.5
USER, UID = "alice", 7401

SLURM_CONF = f"""\
ClusterName=test
SlurmctldHost=a({ADDRESSES["a"]})
SlurmUser=slurm
StateSaveLocation=/var/spool/slurm
SlurmdSpoolDir=/var/spool/slurmd
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=60
{chr(10).join(f"NodeName={name} NodeAddr={address} CPUs=2" for name, address in ADDRESSES.items())}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


@dataclass
class Slurm:
    """`storage` is what all machines share, at /srv/tidegate."""

    storage: Path
    machines: dict[str, Container]

    def said(self, command: str) -> str:
        """What the user's command says on machine a."""
        variables = f"TIDEGATE={sys.prefix}/bin/tidegate TIDEGATE_JOBS=/srv/tidegate/jobs"
        return self.machines["a"].said(f"cd /srv/tidegate; runuser -u {USER} -- env {variables} {command}")

    @property
    def jobs(self) -> Path:
        return self.storage / "jobs"

    def allocate(self, *names: str, machines: str = "a,b", **changes: Any) -> str:
        """An allocation with these jobs; its number. The first machine keeps the cluster."""
        for name in names:
            raw = small_job(name, **{"algorithm__iterations": ITERATIONS, **changes})
            (self.storage / f"{name}.yaml").write_text(yaml.safe_dump(raw))
        configs = " ".join(f"/srv/tidegate/{name}.yaml" for name in names)
        script = REPOSITORY / "deploy" / "tidegate.sbatch"
        return self.said(f"sbatch --parsable --nodelist={machines} {script} {configs}")

    def state(self, allocation: str) -> str:
        return self.said(f"squeue --noheader --states=all --format=%T --jobs={allocation}")

    def told(self, allocation: str) -> str:
        return (self.storage / f"slurm-{allocation}.out").read_text()

    def until_ended(self, allocation: str) -> str:
        while (state := self.state(allocation)) in ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING"):
            time.sleep(LOOK_AGAIN_S)
        return state


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    storage = tmp_path_factory.mktemp("storage")
    storage.chmod(0o777)
    hosts = "\n".join(f"{address} {name}" for name, address in ADDRESSES.items())
    with networked(storage) as machines:
        for name, machine in machines.items():
            machine.said(
                f"""
                hostname {name}; printf '%s\\n' '{hosts}' >> /etc/hosts
                useradd --uid {UID} {USER}
                head -c 1024 /dev/zero > /etc/munge/munge.key; chown munge: /etc/munge/munge.key
                mkdir -p /etc/slurm /var/spool/slurm /var/spool/slurmd; chown slurm /var/spool/slurm
                cat > /etc/slurm/slurm.conf <<'END'\n{SLURM_CONF}END
                systemctl restart munge
                """
            )
        machines["a"].said("systemctl restart slurmctld")
        for machine in machines.values():
            machine.said("systemctl restart slurmd")
        yield Slurm(storage, machines)


def assert_nothing_is_left(slurm: Slurm, *, but: str = "none") -> None:
    """`but`: names in host memory that do not count."""
    for machine in slurm.machines.values():
        files = f"ls -d /dev/shm/{{,.}}*tidegate* /tmp/tidegate* 2>/dev/null | grep -v '{but}'"
        # Slurm waits for the processes of its steps alone. Others, which the kernel has killed, take a moment to go.
        gone = f"for _ in $(seq 200); do pgrep -u {USER} > /dev/null || break; sleep 0.1; done"
        assert machine.said(f"{gone}; {files} || true; ps -u {USER} -o pid,stat,args --no-headers || true") == ""


@pytest.mark.parametrize(
    ("names", "signal", "state"),
    [
        pytest.param(("one", "two"), "--signal=TERM --batch", "FAILED", id="as before its time limit"),
        pytest.param(("three",), "", "CANCELLED", id="by scancel"),
    ],
)
def test_an_allocation_is_a_cluster_and_the_next_one_goes_on_with_its_jobs(
    slurm: Slurm, want_checksum: str, names: tuple[str, ...], signal: str, state: str
) -> None:
    first = slurm.allocate(*names)
    while not list((slurm.jobs / names[0] / "checkpoints").glob("*/manifest.json")):
        time.sleep(LOOK_AGAIN_S)
    slurm.said(f"scancel {signal} {first}")
    assert slurm.until_ended(first) == state, slurm.told(first)
    assert "goes on with its queue" in slurm.told(first)
    assert_nothing_is_left(slurm)

    # The folder of jobs has the queue, wherever the next cluster is.
    second = slurm.allocate(machines="b,c")
    assert slurm.until_ended(second) == "COMPLETED", slurm.told(second)
    for name in names:
        folder = slurm.jobs / name
        assert_all_was_trained_once(folder, summary_of(folder), want_checksum)
    assert_nothing_is_left(slurm)


def test_an_allocation_ends_with_what_is_wrong(slurm: Slurm) -> None:
    wrong = slurm.allocate("wrong", algorithm__group_size=0)
    assert slurm.until_ended(wrong) == "FAILED"
    assert "algorithm.group_size" in slurm.told(wrong)

    small = slurm.allocate("small", machines="c")
    assert slurm.until_ended(small) == "FAILED"
    assert "job small needs 8 GPUs (4 on n0, 4 on n1), those of a node together; n0 has 4" in slurm.told(small)

    lost = slurm.allocate("lost")
    while not (slurm.jobs / "lost").exists():
        time.sleep(LOOK_AGAIN_S)
    slurm.machines["b"].said("pkill -KILL -f 'tidegate agent'")
    assert slurm.until_ended(lost) == "FAILED"
    assert "the agent of a machine has ended" in slurm.told(lost)
    # A killed agent leaves the job's folder, which goes when the job comes again.
    assert_nothing_is_left(slurm, but=f"/tidegate-{UID}-")
