"""Jobs whose policy gives the actor other kinds of copies: another pp, bit for bit, and another tp, within rounding.

A minibatch has 9 sequences. One copy of two GPUs makes more of them than two copies of one, of which one has 5: both
have as many GPUs. So the policy leaves the kind of the actor's home on 2 and on 4 GPUs.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.jobs import RunningJob, running
from tests.e2e.lineage import expected_draws, trained_draws
from tests.e2e.moving import moving_job
from tidegate.codec import decode_layout
from tidegate.huggingface.checkpoint import SINGLE_FILE
from tidegate.tasks.tokenizer import build_tokenizer
from tidegate.types import Layout

pytestmark = pytest.mark.timeout(300)

PROMPTS, GROUP_SIZE, MINIBATCHES = 24, 3, 8
WORDS = tuple(f"w{number}" for number in range(24))
GRADING = '''
def variety(response, answer):
    """The share of different words."""
    return len(set(response.split())) / 48
'''
REWARDS = [{"name": "function", "path": "grading:variety", "timeout_s": 60}]
TOLERANCE = 1e-4
"""As in the tests of the library, where another tp or cp agrees within this after 50 updates."""
IN_TP: dict[str, Any] = {
    "actor__layouts": [{"tp": 2}],
    # Another tp has other bits, so a reproducible job would be refused.
    "actor__num_logical_shards": None,
    "checkpoint__export": True,
    # One iteration: its samples are all of the first weights, and rounding draws no other token.
    "iterations": 1,
}


def graded(raw: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The job on records whose rewards always differ. An untrained model earns none in the built-in task: its gradients
    would be rounding alone, which Adam makes as large as any."""
    (folder / "train.jsonl").write_text("".join(json.dumps({"question": f"say {word}"}) + "\n" for word in WORDS))
    (folder / "grading.py").write_text(GRADING)
    build_tokenizer(["say", *WORDS]).save(folder / "tokenizer.json")
    raw |= {"data": {"train": "train.jsonl", "prompt_key": "question"}, "rewards": REWARDS}
    raw["model"]["tokenizer"] = "tokenizer.json"
    raw["actor"] |= {"warm_up": {}, "adam_epsilon": 1e-4}
    del raw["task"]
    return raw


async def run(
    policy: str, folder: Path, *, iterations: int, **changes: Any
) -> tuple[RunningJob, dict[str, Any], set[Layout]]:
    """The finished job, its summary, and the layouts that its actor had."""
    sizes = {
        "algorithm__iterations": iterations,
        "algorithm__prompts_per_iteration": PROMPTS,
        "algorithm__group_size": GROUP_SIZE,
        "algorithm__n_minibatches": MINIBATCHES,
    }
    async with running(graded(moving_job(policy, **sizes, **changes), folder), folder) as job:
        summary = (await job.result())["summary"]
    draws = expected_draws(iterations=iterations, prompts=PROMPTS, group_size=GROUP_SIZE)
    assert trained_draws(job.folder.journal) == draws
    norms = [json.loads(line)["grad_norm"] for line in job.folder.journal.read_text().splitlines()]
    assert min(norms) > 1e-2, "the updates are no rounding"
    assert (summary["lost"], summary["duplicates"], summary["samples_trained"]) == (0, 0, draws.total())
    layouts = {
        decode_layout(event.layout_committed.layout)
        for event in job.events
        if event.HasField("layout_committed") and event.source.startswith("actor@")
    }
    return job, summary, layouts


@pytest.fixture(scope="module")
def static(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """The final weights of the job in its home's layout alone, by name."""
    job, _, layouts = asyncio.run(run("static", tmp_path_factory.mktemp("static"), **IN_TP))
    assert layouts == {Layout()}
    weights: dict[str, torch.Tensor] = load_file(job.folder.export / SINGLE_FILE)
    return weights


@pytest.mark.long
@pytest.mark.parametrize("policy", ["collocated", "tide"])
async def test_an_actor_whose_tp_a_policy_changes_ends_with_the_weights_of_the_static_job_within_rounding(
    policy: str, static: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    job, _, layouts = await run(policy, tmp_path, **IN_TP)
    assert any(layout.tp == 2 for layout in layouts), layouts
    found = load_file(job.folder.export / SINGLE_FILE)
    assert found.keys() == static.keys()
    for name, want in static.items():
        torch.testing.assert_close(found[name], want, rtol=TOLERANCE, atol=TOLERANCE)
    assert any(not torch.equal(found[name], want) for name, want in static.items()), "the sums have another order"


@pytest.mark.long
async def test_an_actor_whose_pp_a_policy_changes_ends_with_the_very_weights_of_the_static_job(tmp_path: Path) -> None:
    found = {}
    for policy in ("static", "tide"):
        (folder := tmp_path / policy).mkdir()
        _, summary, layouts = await run(policy, folder, iterations=2, actor__layouts=[{"pp": 2}])
        assert any(layout.pp == 2 for layout in layouts) == (policy == "tide"), layouts
        found[policy] = summary["weights_checksum"]
    assert found["tide"] == found["static"]
