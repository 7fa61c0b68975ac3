"""A job as its processes see it: the same from one config, refused before anything starts, the layout of its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from services.rollout.embedded.probe import CANDIDATE_ROWS
from tests.component_bench import job_config, task_of
from tests.hugging_face import save
from tidegate.attempts import AttemptFolder
from tidegate.config.engines.embedded import MAX_RUNNING_REQUESTS
from tidegate.config.job_config import ConfigError, parse_config
from tidegate.huggingface.checkpoint import TOKENIZER
from tidegate.job import JobFolder, load_job, snapshot_folder, snapshot_root
from tidegate.launcher.readme import README
from tidegate.megatron.family import padded_vocab_size
from tidegate.tasks import find_task
from tidegate.tasks.tokenizer import build_tokenizer
from tidegate.types import Layout, NodeId, Role, SampleId


def test_every_process_makes_the_same_job_of_one_config(tmp_path: Path) -> None:
    config = job_config(tmp_path)
    one, other = load_job(config), load_job(type(config).from_json(config.to_json()))
    assert (one.config, one.model, one.padded_vocab) == (other.config, other.model, other.padded_vocab)
    for index in range(5):
        text = task_of(one).prompt(index).text
        assert task_of(other).prompt(index).text == text
        assert one.tokenizer.encode_prompt(text) == other.tokenizer.encode_prompt(text)
    assert one.model.vocab_size == one.tokenizer.vocab_size


def test_the_vocabulary_is_padded_for_the_layouts_of_both_megatron_components(tmp_path: Path) -> None:
    job = load_job(job_config(tmp_path, actor={"layout": {"tp": 2}}))
    assert job.padded_vocab == padded_vocab_size(job.model, [2, 1])
    assert job.padded_vocab >= job.model.vocab_size


def test_the_vocabulary_is_padded_for_every_tp_that_the_actor_may_change_to(tmp_path: Path) -> None:
    model = {"num_heads": 3, "num_kv_heads": 3, "ffn_hidden_size": 96}
    job = load_job(job_config(tmp_path, model=model, actor={"standby": "4"}))
    assert job.padded_vocab == padded_vocab_size(job.model, [3])
    assert job.padded_vocab != job.model.vocab_size


def test_the_vocabulary_is_padded_for_every_tp_that_the_actor_may_get_by_hand(tmp_path: Path) -> None:
    model = {"num_heads": 3, "num_kv_heads": 3, "ffn_hidden_size": 96}
    job = load_job(job_config(tmp_path, model=model))
    assert len(job.config.placement(Role.ACTOR)) < 3 <= len(job.config.gpus)
    assert job.padded_vocab == padded_vocab_size(job.model, [3])


def cluster_for(layout: dict[str, int]) -> dict[str, Any]:
    """A cluster whose actor has as many GPUs as the layout has ranks."""
    first = Layout(**layout).num_ranks
    placement = {"actor": f"0-{first - 1}", "rollout": first, "inference": f"{first + 1}-{first + 2}"}
    return {"nodes": {"n0": first + 3}, "component_placement": placement}


@pytest.mark.parametrize(
    ("layout", "want"),
    [
        ({"cp": 3}, "positions of a row % (2 * cp) = 8 % (2 * 3) = 2, must be 0; legal cp: 1, 2, 4"),
        ({"dp": 2, "ep": 2}, "ep=2, but the model has no experts; legal ep: 1"),
        ({"pp": 2, "vpp": 3}, "num_layers % (vpp * pp) = 2 % (3 * 2) = 2, must be 0; legal pp: none"),
        ({"dp": 5}, "dp=5 replicas cannot share a minibatch of 4 samples"),
        ({"dp": 3}, "dp=3 does not divide actor.num_logical_shards=2; legal dp: 1, 2"),
    ],
    ids=["cp", "ep", "vpp", "more replicas than samples", "replicas that do not divide the shards"],
)
def test_scale_and_the_config_refuse_a_layout_in_the_same_words(
    tmp_path: Path, layout: dict[str, int], want: str
) -> None:
    shards = {"num_logical_shards": 2}
    asked = load_job(job_config(tmp_path, actor=shards)).layout_fault(Role.ACTOR, Layout(**layout))
    with pytest.raises(ConfigError) as refused:
        load_job(job_config(tmp_path, cluster=cluster_for(layout), actor=shards | {"layout": layout}))
    assert str(refused.value) == f"actor.layout: {asked}"
    assert want in str(asked)


@pytest.mark.parametrize("layout", [{"cp": 2}, {"pp": 2, "cp": 2}, {"cp": 4, "dp": 2}, {"tp": 2, "pp": 2, "cp": 2}])
def test_a_config_may_have_a_layout_that_scale_grants(tmp_path: Path, layout: dict[str, int]) -> None:
    job = load_job(job_config(tmp_path, cluster=cluster_for(layout), actor={"layout": layout}))
    assert job.config.layout(Role.ACTOR) == Layout(**layout)
    assert load_job(job_config(tmp_path)).layout_fault(Role.ACTOR, Layout(**layout)) is None


def test_sequences_without_padding_are_not_cut(tmp_path: Path) -> None:
    job = load_job(job_config(tmp_path))
    thd = job.config.actor.model_copy(update={"packing": "thd"})
    job = replace(job, config=job.config.model_copy(update={"actor": thd}))
    assert job.layout_fault(Role.ACTOR, Layout(tp=2)) is None
    want = "actor.packing=thd runs sequences without padding, which cp cannot cut; set packing to padded"
    assert want in str(job.layout_fault(Role.ACTOR, Layout(cp=2)))
    job = replace(job, model=replace(job.model, num_experts=2, experts_per_token=1, norm_topk_prob=False))
    assert "which tp with experts cannot cut" in str(job.layout_fault(Role.ACTOR, Layout(tp=2)))


def test_a_command_on_a_job_names_the_output_folder_where_it_is_not_the_usual_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert JobFolder(tmp_path / "jobs" / "demo").command("why") == "tidegate why demo"
    elsewhere = JobFolder(tmp_path / "my jobs" / "demo").command("describe")
    assert elsewhere == f"tidegate describe demo --output-dir '{tmp_path}/my jobs'"


def test_a_model_with_experts_cannot_be_reproducible(tmp_path: Path) -> None:
    words = build_tokenizer(find_task("countdown", 0).words())
    save(tmp_path, "Qwen3 MoE", vocab_size=words.vocab_size)
    words.save(tmp_path / TOKENIZER)
    model = {"path": str(tmp_path), "max_seq_len": 80}
    usual, reproducible = (
        parse_config(json.loads(job_config(tmp_path, actor=actor).to_json()) | {"model": model})
        for actor in ({}, {"num_logical_shards": 2})
    )
    assert load_job(usual).model.num_experts == 8
    with pytest.raises(ConfigError, match=r"^actor.num_logical_shards=2, but the model has 8 experts: .*; leave num_"):
        load_job(reproducible)


def test_replicas_of_the_inference_share_no_experts(tmp_path: Path) -> None:
    job = load_job(job_config(tmp_path))
    job = replace(job, model=replace(job.model, num_experts=2, experts_per_token=1, norm_topk_prob=False))
    assert job.layout_fault(Role.INFERENCE, Layout(cp=2, ep=2)) is None
    assert job.layout_fault(Role.ACTOR, Layout(dp=2, ep=2)) is None
    assert "cp % ep = 1 % 2 = 1, must be 0" in str(job.layout_fault(Role.INFERENCE, Layout(dp=2, ep=2)))


def test_the_draws_of_a_sample_follow_from_the_jobs_seed_and_its_place_but_not_from_the_incarnation(
    tmp_path: Path,
) -> None:
    job = load_job(job_config(tmp_path))
    seeds = {
        job.sampling_seed(SampleId(1, iteration, prompt, draw))
        for iteration in range(3)
        for prompt in range(12)
        for draw in range(4)
    }
    assert len(seeds) == 3 * 12 * 4
    assert all(0 <= seed < 2**64 for seed in seeds)
    sample = SampleId(1, 0, 3, 1)
    assert job.sampling_seed(sample) == job.sampling_seed(SampleId(9, 0, 3, 1)), "a resume samples the same again"
    reseeded = load_job(job.config.model_copy(update={"seed": 4}))
    assert reseeded.sampling_seed(sample) != job.sampling_seed(sample)


@pytest.mark.parametrize(
    ("sections", "want"),
    [
        ({"task": {"name": "chess"}}, "no task is called 'chess'; known tasks: countdown"),
        ({"model": {"tokenizer": "/no/such/tokenizer.json"}}, "/no/such/tokenizer.json"),
        (
            {"model": {"max_seq_len": 49}, "algorithm": {"max_new_tokens": 48}},
            r"max_new_tokens=48 and a prompt of 5 tokens \(the longest of the first \d+\) make 53, more than "
            r"model.max_seq_len=49: raise the one or lower the other",
        ),
        ({"actor": {"layout": {"tp": 2}}, "model": {"num_heads": 3, "num_kv_heads": 1}}, "num_heads"),
        ({"actor": {"layout": {"pp": 2}}, "model": {"num_layers": 1}}, "num_layers"),
    ],
    ids=[
        "an unknown task",
        "no such tokenizer file",
        "no room for a prompt and its response",
        "heads that tp does not divide",
        "fewer layers than stages",
    ],
)
def test_a_config_that_does_not_fit_is_a_config_error_that_names_the_cause(
    tmp_path: Path, sections: dict[str, dict[str, Any]], want: str
) -> None:
    with pytest.raises(ConfigError, match=want):
        load_job(job_config(tmp_path, **sections))


def test_the_config_allows_an_engine_as_many_requests_as_its_largest_batch_has_rows() -> None:
    assert max(CANDIDATE_ROWS) == MAX_RUNNING_REQUESTS


def paths_of(folder: JobFolder | AttemptFolder) -> dict[str, Path]:
    """The paths that its properties name."""
    names = [name for name, value in vars(type(folder)).items() if isinstance(value, property)]
    return {name: path for name in names if isinstance(path := getattr(folder, name), Path)}


def test_a_jobs_folder_lies_under_its_name_and_nothing_in_it_collides(tmp_path: Path) -> None:
    folder = JobFolder.of(job_config(tmp_path))
    assert folder.root == tmp_path / "jobs" / "bench"
    paths = paths_of(folder)
    assert len(set(paths.values())) == len(paths) >= 10
    assert {path.parent for path in paths.values()} == {folder.root}
    assert folder.node(NodeId("n0")) != folder.node(NodeId("n1"))


@pytest.mark.parametrize("page", ["the folder's own", "the docs'"])
def test_what_a_jobs_folder_holds_is_named_by_its_readme_and_by_the_docs(tmp_path: Path, page: str) -> None:
    folder = JobFolder.of(job_config(tmp_path))
    docs = Path(__file__).resolve().parents[2] / "docs" / "run-directory.md"
    text = README if page == "the folder's own" else docs.read_text()
    paths = paths_of(folder) | paths_of(folder.attempt()) | {"nodes": folder.root / "nodes"}
    del paths["readme"]
    missing = [path.name for path in paths.values() if path.name not in text]
    assert missing == []


def test_snapshots_lie_in_host_memory_by_node_job_incarnation_and_version(tmp_path: Path) -> None:
    config = job_config(tmp_path)
    folders = {
        snapshot_folder(config, NodeId(node), incarnation=incarnation, version=version)
        for node in ("n0", "n1")
        for incarnation in (1, 11)
        for version in (1, 11)
    }
    assert len(folders) == 8
    for folder in folders:
        assert folder.is_relative_to(tmp_path / "memory")
    one = snapshot_folder(config, NodeId("n0"), incarnation=2, version=3)
    assert one.relative_to(snapshot_root(config, NodeId("n0"))) == Path("bench/2/3")
