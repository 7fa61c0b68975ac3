"""The processes of a job follow from its device."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from tests.unit.cli.configs import small, small_over_two_machines
from tidegate.config.job_config import parse_config
from tidegate.job import JobFolder
from tidegate.launcher.services import JobServices
from tidegate.runtime.forkserver import are_of_cuda
from tidegate.runtime.processes import ServiceSpec


def specs(folder: Path, device: str) -> list[ServiceSpec]:
    raw = small(folder)
    config = parse_config(raw | {"cluster": raw["cluster"] | {"device": device}})
    job = JobFolder.of(config)
    return list(JobServices(config, job, sockets=folder, boot=1).specs())


def test_a_job_on_cuda_has_its_devices_and_a_fork_server_that_opens_none(tmp_path: Path) -> None:
    on_cuda = {spec.name: spec for spec in specs(tmp_path, "cuda")}
    assert not [spec for spec in on_cuda.values() if "CUDA_VISIBLE_DEVICES" in spec.env]
    assert on_cuda["forkserver@n0"].env["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
    assert "--forkserver" in on_cuda["actor@n0"].command


def test_a_job_on_cpus_sees_no_device_and_its_instances_know_their_fork_servers(tmp_path: Path) -> None:
    on_cpus = specs(tmp_path, "cpu")
    assert {spec.env["CUDA_VISIBLE_DEVICES"] for spec in on_cpus} == {""}
    forks = [spec.name for spec in on_cpus if spec.name.startswith("forkserver@")]
    assert forks == ["forkserver@n0"]
    knowing = [spec.name for spec in on_cpus if "--forkserver" in spec.command]
    assert knowing == ["actor@n0", "rollout@n0", "inference@n0"]


def test_a_node_on_another_machine_has_stand_ins_here(tmp_path: Path) -> None:
    raw = small_over_two_machines(tmp_path)
    config = parse_config(raw)
    services = JobServices(config, JobFolder.of(config), sockets=tmp_path, boot=1)
    stand_ins = {spec.name: spec for spec in services.specs() if "tidegate.runtime.hosted" in spec.command}
    assert sorted(stand_ins) == ["actor@n1", "forkserver@n1", "inference@n1", "rollout@n1"]
    assert "--role" not in stand_ins["forkserver@n1"].command
    actor = stand_ins["actor@n1"]
    assert actor.command[2:5] == ("tidegate.runtime.hosted", "--node", "n1")
    assert actor.log_path == services.log_of("actor@n1") != services.log_of("actor@n0")
    kept = config.model_copy(
        update={"runtime": config.runtime.model_copy(update={"fork_server": str(tmp_path / "kept.sock")})}
    )
    specs = {spec.name: spec for spec in JobServices(kept, JobFolder.of(kept), sockets=tmp_path, boot=1).specs()}
    assert [name for name in specs if name.startswith("forkserver")] == ["forkserver@n1"], "n0 has this machine's"
    assert str(tmp_path / "kept.sock") in specs["actor@n0"].command


def test_threads_of_cudas_libraries_are_no_hindrance_to_a_fork_and_a_context_is() -> None:
    def torch(cuda: str | None, *, is_initialized: bool) -> SimpleNamespace:
        return SimpleNamespace(
            version=SimpleNamespace(cuda=cuda), cuda=SimpleNamespace(is_initialized=lambda: is_initialized)
        )

    assert are_of_cuda(torch("13.0", is_initialized=False), num_of_python=1)
    assert not are_of_cuda(torch("13.0", is_initialized=False), num_of_python=2)
    assert not are_of_cuda(torch("13.0", is_initialized=True), num_of_python=1)
    assert not are_of_cuda(torch(None, is_initialized=False), num_of_python=1)
