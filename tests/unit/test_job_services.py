"""The processes of a job follow from its device."""

from __future__ import annotations

from pathlib import Path

from tests.unit.cli.configs import small
from tidegate.config.job_config import parse_config
from tidegate.job import JobFolder
from tidegate.launcher.services import JobServices
from tidegate.runtime.processes import ServiceSpec


def specs(folder: Path, device: str) -> list[ServiceSpec]:
    raw = small(folder)
    config = parse_config(raw | {"cluster": raw["cluster"] | {"device": device}})
    job = JobFolder.of(config)
    return list(JobServices(config, job, sockets=folder, boot=1).specs())


def test_a_job_on_cuda_has_no_fork_server_and_its_device(tmp_path: Path) -> None:
    on_cuda = specs(tmp_path, "cuda")
    assert not [spec for spec in on_cuda if "forkserver" in " ".join((spec.name, *spec.command))]
    assert not [spec for spec in on_cuda if "CUDA_VISIBLE_DEVICES" in spec.env]


def test_a_job_on_cpus_sees_no_device_and_its_instances_know_their_fork_servers(tmp_path: Path) -> None:
    on_cpus = specs(tmp_path, "cpu")
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in on_cpus} == {""}
    forks = [spec.name for spec in on_cpus if spec.name.startswith("forkserver@")]
    assert forks == ["forkserver@n0"]
    knowing = [spec.name for spec in on_cpus if "--forkserver" in spec.command]
    assert knowing == ["actor@n0", "rollout@n0", "inference@n0"]
