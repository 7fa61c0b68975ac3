"""A job whose engines are real SGLang servers on the CPU: it learns, and a server's death costs only its own work. A
Hugging Face checkpoint goes in and comes out trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.e2e.jobs import REPOSITORY, RunningJob, generating, running, small_job
from tests.e2e.lineage import expected_draws, trained_draws
from tests.hugging_face import save
from tests.sglang_env import sglang_python
from tidegate.huggingface.checkpoint import SINGLE_FILE, TOKENIZER
from tidegate.tasks.tokenizer import build_tokenizer

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(900)]

LAUNCHER = "cpu/launch.py"
MIN_RISE = 0.15
"""The rise of the reward over the demo's ten iterations: under half of the observed rise, since draws do not repeat."""


def with_sglang(raw: dict[str, Any], **placement: str) -> dict[str, Any]:
    """One engine: a server has 2 GB. Its start may take minutes on a busy machine."""
    raw["rollout"] = {"engine": "sglang", "sglang": {"python": str(sglang_python()), "start_timeout_s": 290}}
    raw.setdefault("runtime", {})["command_deadline_s"] = 300
    raw["cluster"]["component_placement"] |= placement
    return raw


def servers(job: RunningJob) -> list[psutil.Process]:
    """The servers without their keepers."""
    return [
        process for process in job.processes() if process.cmdline()[1:2] and process.cmdline()[1].endswith(LAUNCHER)
    ]


async def test_the_demos_job_learns_and_no_sample_is_lost_or_doubled(tmp_path: Path) -> None:
    raw = yaml.safe_load((REPOSITORY / "tidegate" / "demo.yaml").read_text())
    raw["cluster"]["nodes"] = {"n0": 6}
    algorithm = raw["algorithm"]
    want = expected_draws(
        iterations=algorithm["iterations"],
        prompts=algorithm["prompts_per_iteration"],
        group_size=algorithm["group_size"],
    )
    async with running(with_sglang(raw, rollout="4", inference="5"), tmp_path) as job:
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == want
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, want.total())
    assert summary["reward_last"] - summary["reward_first"] >= MIN_RISE


async def test_kill_9_of_a_server_in_mid_generation_costs_only_the_regeneration(tmp_path: Path) -> None:
    raw = small_job("killed", cluster__nodes={"n0": 4}, actor__layout={"dp": 2}, samples__per_iteration=None)
    want = expected_draws(iterations=3, prompts=8, group_size=4)
    async with running(with_sglang(raw, actor="0-1", rollout="2", inference="3"), tmp_path) as job:
        await job.until(generating(1))
        (victim,) = servers(job)
        victim.kill()
        failed = await job.until(lambda event: event.WhichOneof("body") == "failed")
        assert failed.source.startswith("rollout")
        summary = (await job.result())["summary"]
        assert trained_draws(job.folder.journal) == want
        assert max(event.incarnation for event in job.events) == 1
        assert tokens_generated(job, 1) == tokens_trained(job, 1), "what was finished is not generated again"
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, want.total())


def tokens_generated(job: RunningJob, iteration: int) -> int:
    """The tokens of every response that an engine finished, even if another engine had made it before."""
    reports = [event.progress for event in job.events if event.iteration == iteration and event.HasField("progress")]
    return int(max(progress.metrics["num_tokens"] for progress in reports if progress.phase == "generate"))


def tokens_trained(job: RunningJob, iteration: int) -> int:
    """The tokens of the trained samples, each of which is written."""
    lines = (job.folder.samples / f"inc001-it{iteration:06}.jsonl").read_text().splitlines()
    assert len(lines) == 32
    return sum(json.loads(line)["num_response_tokens"] for line in lines)


async def test_a_hugging_face_checkpoint_is_trained_on_data_evaluated_and_given_back(tmp_path: Path) -> None:
    want = expected_draws(iterations=2, prompts=8, group_size=4)
    async with running(job_on_checkpoint_and_data(tmp_path), tmp_path) as job:
        result = await job.result()
        assert trained_draws(job.folder.journal) == want
    summary, evaluations = result["summary"], result["job"]["evaluations"]
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, want.total())
    assert [(row.get("version", 0), row["num_prompts"]) for row in evaluations] == [(0, 3), (2, 3)]
    trained = AutoModelForCausalLM.from_pretrained(job.folder.export)
    assert trained(torch.tensor([[1, 3, 4]])).logits.isfinite().all()
    given = load_file(tmp_path / "model" / SINGLE_FILE)
    assert not torch.equal(trained.state_dict()["model.norm.weight"], given["model.norm.weight"])


def job_on_checkpoint_and_data(folder: Path) -> dict[str, Any]:
    """A small Qwen2.5 is to name a colour. A Python function scores how much of its answer is that colour."""
    words = ["say", "red", "green", "blue"]
    rows = [json.dumps({"prompt": f"say {colour}", "answer": colour}) + "\n" for colour in words[1:]]
    (folder / "train.jsonl").write_text("".join(rows * 3))
    (folder / "held-out.jsonl").write_text("".join(rows))
    (folder / "grading.py").write_text(
        "def share(response, answer):\n"
        "    words = response.split()\n"
        "    return words.count(answer) / max(len(words), 1)\n"
    )
    tokenizer = build_tokenizer(words)
    save(folder / "model", "Qwen2.5", vocab_size=tokenizer.vocab_size)
    tokenizer.save(folder / "model" / TOKENIZER)
    raw = small_job(
        "given-back",
        cluster__nodes={"n0": 3},
        model={"path": str(folder / "model"), "max_seq_len": 64},
        data={"train": "train.jsonl", "answer_key": "answer"},
        rewards=[{"name": "function", "path": "grading:share"}],
        evaluation={"every": 2, "data": "held-out.jsonl"},
        checkpoint__export=True,
        algorithm__iterations=2,
        algorithm__max_new_tokens=8,
        actor__layout={},
        actor__warm_up={},
    )
    del raw["task"]
    return with_sglang(raw, actor="0", rollout="1", inference="2")
