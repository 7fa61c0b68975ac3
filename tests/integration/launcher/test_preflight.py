"""The checks before anything starts: a job's servers, an older run on them, its engine."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import venv
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from services.node.launch import _run
from tests.hugging_face import save
from tests.ports import kept_port
from tests.unit.cli.configs import small_config
from tidegate.adapters.nats_bus import NatsBus
from tidegate.adapters.redis_store import redis_store
from tidegate.certs.authority import Authority
from tidegate.certs.identity import Identity, Party
from tidegate.config.job_config import JobConfig
from tidegate.events import EventSource
from tidegate.huggingface.checkpoint import SINGLE_FILE, open_checkpoint
from tidegate.job import load_job
from tidegate.launcher.claim import CannotStart, Start
from tidegate.launcher.host_memory import node_bytes
from tidegate.launcher.outcome import End
from tidegate.launcher.preflight import Away, check_addresses, check_engine, check_servers, check_weights, masked
from tidegate.launcher.run import RunRequest, check_job
from tidegate.ports.bus import JobNotOpen
from tidegate.ports.store import StoreContents
from tidegate.runtime.cuda import cuda_fault
from tidegate.runtime.embedded import EmbeddedServers
from tidegate.runtime.service import connect_bus
from tidegate.types import JobId
from tidegate.v1 import events_pb2

NOBODY = "127.0.0.1:1"


def with_servers(tmp_path: Path, **urls: str) -> JobConfig:
    return small_config(tmp_path, servers=urls)


def test_a_job_with_more_cuda_slots_than_this_machine_has_devices_is_refused(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    num_slots = torch.cuda.device_count() + len(config.cluster.gpus())
    cluster = config.cluster.model_copy(update={"device": "cuda", "nodes": {"n0": num_slots}})
    assert re.match(r"cluster\.(device=cuda, but on this machine|nodes: n0 has )", cuda_fault(cluster))
    assert cuda_fault(config.cluster) == ""


VAST = {"num_layers": 200, "hidden_size": 65536, "ffn_hidden_size": 262144, "num_heads": 512, "head_dim": 128}


async def test_a_job_whose_weights_have_no_room_in_host_memory_is_refused(tmp_path: Path) -> None:
    own = small_config(tmp_path).model_dump(mode="json")
    config = small_config(tmp_path, model=own["model"] | VAST, algorithm=own["algorithm"] | {"kl_coefficient": 0.1})
    job = load_job(config)
    attention = 65536 * 128 * (2 * 512 + 2 * job.model.num_kv_heads)
    layer = attention + 3 * 65536 * 262144 + 2 * 65536
    assert node_bytes(job) == 3 * 4 * (200 * layer + (job.padded_vocab + 1) * 65536)

    request = RunRequest(config, Start.FRESH, "--resume", "--force")
    told = r"host_memory_root=\S+ has \S+ [GM]iB free, and \d x \S+ GiB are needed \(2 versions of the weights and the"
    with pytest.raises(CannotStart, match=told):
        await check_job(request)
    for by_cluster in (replace(request, is_submitted=True), replace(request, is_of_cluster=True)):
        assert (await check_job(by_cluster)).model == job.model, "a cluster counts by itself"


async def test_a_store_that_nobody_would_open_is_refused_outside_of_a_cluster(tmp_path: Path) -> None:
    config = small_config(tmp_path)
    config = config.model_copy(update={"runtime": config.runtime.model_copy(update={"adopts_store": False})})
    with pytest.raises(CannotStart, match=r"adopts_store=false: nobody would open .* leave it out"):
        await check_job(RunRequest(config, Start.FRESH, "--resume", "--force"))
    await check_job(RunRequest(config, Start.FRESH, "--resume", "--force", is_of_cluster=True))


async def test_a_nats_url_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    config = with_servers(tmp_path, nats_url=f"nats://me:hunter2@{NOBODY}")
    with pytest.raises(Away, match=r"nats_url=nats://\*\*\*@127.0.0.1:1: .* did not answer") as refused:
        await check_servers(config, Start.FRESH)
    assert "hunter2" not in str(refused.value)


async def test_a_redis_url_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    config = with_servers(tmp_path, redis_url=f"redis://me:hunter2@{NOBODY}/0")
    with pytest.raises(Away, match=r"redis_url=redis://\*\*\*@127.0.0.1:1/0 does not answer") as refused:
        await check_servers(config, Start.FRESH)
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("url", [{"nats_url": f"nats://{NOBODY}"}, {"redis_url": f"redis://{NOBODY}/0"}])
def test_a_cluster_starts_a_job_again_whose_server_did_not_answer(
    url: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.launcher.preflight.ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr("tidegate.launcher.run.SERVERS_BACK_WITHIN_S", 0.0)
    claims: list[int] = []
    end, message, has_begun = _run(with_servers(tmp_path, **url), Start.FRESH, "", None, lambda: claims.append(1))
    assert (end, has_begun, claims) == (End.INTERRUPTED, False, [])
    assert "did not answer" in message or "does not answer" in message


@pytest.mark.parametrize("url", ["localhost:6379", "http://localhost:6379", "redis://", "redis://host:port"])
async def test_a_text_that_is_not_a_redis_url_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(CannotStart, match="is not a URL like redis://host:port"):
        await check_servers(with_servers(tmp_path, redis_url=url), Start.FRESH)


async def test_a_check_of_free_servers_writes_nothing(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path / "servers") as servers:
        await check_servers(with_servers(tmp_path, nats_url=servers.nats.url, redis_url=servers.store.url), Start.FRESH)
        bus = await NatsBus.connect(servers.nats.url, name="test")
        store = redis_store(servers.store.url)
        try:
            with pytest.raises(JobNotOpen):
                await bus.events.free_bytes(JobId("small"))
            assert not (await store.identity()).is_open
            assert await store.contents() == StoreContents((), ())
        finally:
            await bus.close()
            await store.aclose()


async def test_a_fresh_run_is_refused_where_the_servers_have_an_older_one_of_its_name(tmp_path: Path) -> None:
    async with EmbeddedServers(tmp_path / "servers") as servers:
        config = with_servers(tmp_path, nats_url=servers.nats.url, redis_url=servers.store.url)
        await check_servers(config, Start.FRESH)
        bus = await connect_bus(config, name="test", opens_after=0)
        try:
            await check_servers(config, Start.FRESH)
            source = EventSource("launcher", role=None, boot=1, now_ns=lambda: 1)
            submitted = events_pb2.JobSubmitted(config_json="{}")
            await bus.events.publish(source.event(submitted, job=JobId(config.job), incarnation=1))
        finally:
            await bus.close()
        for start in (Start.FRESH, Start.FORCE):
            with pytest.raises(CannotStart, match=r"has an older run of job small: .*--resume"):
                await check_servers(config, start)
        await check_servers(config, Start.RESUME)


async def test_a_start_of_a_cluster_waits_for_a_server_that_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tidegate.launcher.preflight.ANSWER_TIMEOUT_S", 0.2)
    monkeypatch.setattr("tidegate.launcher.run._LOOK_AGAIN_S", 0.01)
    with kept_port() as port:
        config = with_servers(tmp_path, redis_url=f"redis://127.0.0.1:{port}/0")
        with pytest.raises(Away):
            await check_job(RunRequest(config, Start.FRESH, "--resume", "--force"))
        waiting = asyncio.create_task(
            check_job(RunRequest(config, Start.FRESH, "--resume", "--force", is_of_cluster=True))
        )
        done, _ = await asyncio.wait({waiting}, timeout=1.0)
        assert not done
        async with EmbeddedServers(tmp_path / "servers", store_port=port):
            assert (await waiting).config.job == config.job


def test_a_masked_url_keeps_all_but_user_and_password() -> None:
    assert masked("nats://a:b@host:1") == "nats://***@host:1"
    assert masked("nats://host:1") == "nats://host:1"


@pytest.mark.parametrize(
    ("python", "message"),
    [("/nowhere/python", r"cannot be run \(No such file or directory\)"), (sys.executable, "has no package sglang")],
    ids=["no interpreter", "an interpreter without SGLang"],
)
async def test_an_environment_without_sglang_is_refused_before_anything_starts(
    tmp_path: Path, python: str, message: str
) -> None:
    job = load_job(small_config(tmp_path, rollout={"engine": "sglang", "sglang": {"python": python}}))
    with pytest.raises(CannotStart, match=f"rollout.sglang.python={python} {message}.*make .venv-sglang"):
        await check_engine(job)
    await check_engine(load_job(small_config(tmp_path, rollout={"sglang": {"python": python}})))


async def test_an_sglang_that_is_too_old_is_refused_before_anything_starts(tmp_path: Path) -> None:
    venv.create(tmp_path / "old")
    python = tmp_path / "old" / "bin" / "python"
    packages = next((tmp_path / "old").glob("lib/python*/site-packages"))
    job = load_job(small_config(tmp_path, rollout={"engine": "sglang", "sglang": {"python": str(python)}}))
    refusals = {"0.5.9": r"SGLang 0\.5\.9 is older than 0\.5\.23, .*install sglang==0\.5\.23", "0.6": None}
    for version, refusal in refusals.items():
        package = packages / f"sglang-{version}.dist-info"
        package.mkdir()
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: sglang\nVersion: {version}\n")
        with pytest.raises(CannotStart, match=rf"rollout\.sglang\.python=.*{refusal}") if refusal else nullcontext():
            await check_engine(job)
        shutil.rmtree(package)


async def test_a_tied_copy_that_differs_is_refused_before_anything_starts(tmp_path: Path) -> None:
    tensors = dict(save(tmp_path / "model", "Qwen2.5").state_dict())
    copy = tensors["model.embed_tokens.weight"].clone()
    job = load_job(small_config(tmp_path))
    for altered in (0, 1):
        copy[0, 0] += altered
        save_file(tensors | {"lm_head.weight": copy}, tmp_path / "model" / SINGLE_FILE)
        from_checkpoint = replace(job, checkpoint=open_checkpoint(tmp_path / "model"))
        with pytest.raises(CannotStart, match=r"lm_head\.weight differs from") if altered else nullcontext():
            await check_weights(from_checkpoint)
    await check_weights(job)


async def test_a_model_with_experts_is_refused_where_sglang_would_generate(tmp_path: Path) -> None:
    job = load_job(small_config(tmp_path, rollout={"engine": "sglang", "sglang": {"python": sys.executable}}))
    sparse = replace(job, model=replace(job.model, num_experts=4, experts_per_token=2))
    with pytest.raises(
        CannotStart, match=r"dense models here, and this one has 4 experts: set rollout\.engine=embedded"
    ):
        await check_engine(sparse)


def test_an_address_of_another_machine_is_refused_before_anything_starts(tmp_path: Path) -> None:
    given = dict.fromkeys(small_config(tmp_path).cluster.nodes, "192.0.2.77")
    elsewhere = small_config(tmp_path).cluster.model_copy(update={"addresses": given})
    with pytest.raises(CannotStart, match=r"addresses: n0: 192.0.2.77 is no address .* leave cluster.addresses"):
        check_addresses(elsewhere)
    check_addresses(elsewhere.model_copy(update={"addresses": dict.fromkeys(given, "127.0.0.2")}))


@pytest.mark.parametrize("key", ["nats_credentials", "redis_credentials"])
async def test_credentials_of_nobody_or_of_another_job_are_refused(key: str, tmp_path: Path) -> None:
    config = with_servers(tmp_path, **{key: str(tmp_path / "given")})
    with pytest.raises(CannotStart, match=rf"servers.{key}=.*given: the credential in .*scheduler cannot be read"):
        await check_servers(config, Start.FRESH)
    authority = Authority.create(tmp_path / "ca", "lab")
    authority.issue(Identity("lab", Party.SCHEDULER, "a"), tmp_path / "given/scheduler")
    authority.issue(Identity("lab", Party.JOB, "another"), tmp_path / "given/job")
    with pytest.raises(
        CannotStart, match=r"credential of job/another of cluster lab, not of job small: issue it there"
    ):
        await check_servers(config, Start.FRESH)
    authority.issue(Identity("lab", Party.JOB, "small"), tmp_path / "given/job")
    await check_servers(config, Start.FRESH)
