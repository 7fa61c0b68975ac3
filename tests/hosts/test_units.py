"""The units of `deploy/` under a real systemd, in a container on this machine's files. Its changes stay in memory."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import yaml

from tests.e2e.jobs import REPOSITORY, small_job
from tests.hosts.containers import MARKS, Container, booted

pytestmark = [*MARKS, pytest.mark.timeout(300)]

TIDEGATE = "runuser -u alice -- /opt/tidegate/bin/tidegate"
JOBS = "/srv/tidegate/jobs"


@pytest.fixture
def container() -> Iterator[Container]:
    """With user alice, and the units."""
    with booted("tidegate-units", "--private-network") as found:
        found.said(f"useradd alice; ln -sfn {sys.prefix} /opt/tidegate")
        found.said("mkdir -p /etc/tidegate /srv/tidegate; chown alice /srv/tidegate")
        found.said(f"cp {REPOSITORY}/deploy/*.service /etc/systemd/system/")
        found.said(f"cp {REPOSITORY}/deploy/cluster.env /etc/tidegate/")
        yield found


def test_a_cluster_that_systemd_keeps_trains_a_job_and_goes_on_after_its_agent_was_killed(container: Container) -> None:
    text = yaml.safe_dump(small_job("kept", algorithm__iterations=12))
    container.said(f"cat > /srv/tidegate/kept.yaml <<'EOF'\n{text}\nEOF")
    container.said("systemctl daemon-reload; systemctl start tidegate-cluster@alice")
    container.until(f"{TIDEGATE} get nodes --output-dir {JOBS} 2>/dev/null | grep -q ready")
    container.said(f"{TIDEGATE} submit /srv/tidegate/kept.yaml --output-dir {JOBS}")
    container.until(f"compgen -G '{JOBS}/kept/checkpoints/*/manifest.json'")
    container.said("systemctl kill --signal=KILL --kill-whom=main tidegate-cluster@alice")
    container.until(f"{TIDEGATE} get jobs --output-dir {JOBS} 2>/dev/null | grep -q finished")
    assert container.said("systemctl show --value -p NRestarts tidegate-cluster@alice") == "1"
    assert container.said("stat -c '%U %a' /var/lib/tidegate/gates") == "alice 700"
    container.said("systemctl stop tidegate-cluster@alice")
    assert container.said("systemctl show --value -p Result tidegate-cluster@alice") == "success"
    assert container.said("pgrep -u alice || true") == ""


def test_an_agent_that_systemd_keeps_listens_and_is_started_again_after_it_was_killed(container: Container) -> None:
    certs = "/opt/tidegate/bin/tidegate certs"
    container.said(f"{certs} init --authority /etc/tidegate/ca --cluster lab")
    container.said(
        f"{certs} issue node b --authority /etc/tidegate/ca --to /etc/tidegate/node; chown -R alice /etc/tidegate/node"
    )
    container.said("echo LISTEN=127.0.0.1:7400 > /etc/tidegate/agent.env")
    container.said("systemctl daemon-reload; systemctl start tidegate-agent@alice")
    listens = "journalctl -u tidegate-agent@alice | grep -c 'listens on 127.0.0.1:7400'"
    container.until(f"[ $({listens}) = 1 ]")
    container.said("systemctl kill --signal=KILL --kill-whom=main tidegate-agent@alice")
    container.until(f"[ $({listens}) = 2 ]")
    container.said("systemctl stop tidegate-agent@alice")
    assert container.said("systemctl show --value -p Result tidegate-agent@alice") == "success"
    assert container.said("pgrep -u alice || true") == ""
