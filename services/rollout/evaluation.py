"""One evaluation: responses of one version's weights to held-out prompts, and the figures of their rewards.

pass@k is the unbiased estimate of Chen et al., "Evaluating Large Language Models Trained on Code" (2021), equation 1.

Invariants:
- A request depends only on the job, the prompt and the draw, so two evaluations differ only by their weights.
  [test_evaluation: seeds_that_no_version_changes]
- Figures are computed in the order of prompts and draws, so the order of arrival changes no bit of them.
  [test_evaluation: same_whichever_prompt_was_answered_first]
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb
from pathlib import Path
from statistics import fmean
from typing import Any

from services.rollout.exercises import Exercises, Judged
from tidegate.codec import encode_sample_id
from tidegate.config.checks.evaluation import longest_evaluated
from tidegate.job import Job
from tidegate.types import SampleId
from tidegate.v1 import events_pb2, samples_pb2
from tidegate.v1 import workers_pb2 as wire


def pass_at(k: int, *, num_samples: int, num_right: int) -> float:
    """The chance that a draw of k responses without replacement holds a right one.

    pass@k = 1 - C(num_samples - num_right, k) / C(num_samples, k)

    - num_samples: the responses to the prompt. num_right: the right ones among them.
    - C(n, k): the number of ways to choose k of n.
    """
    return 1.0 - comb(num_samples - num_right, k) / comb(num_samples, k)


@dataclass(frozen=True, slots=True)
class _Answered:
    """All responses to one prompt, in the order of their draws, with their rewards."""

    responses: Sequence[samples_pb2.Sample]
    judged: Judged


class Evaluation:
    def __init__(self, job: Job, exercises: Exercises, *, version: int) -> None:
        evaluation, num_prompts = job.config.evaluation, exercises.num_prompts
        assert evaluation is not None, "a job without an evaluation section makes no evaluation"
        assert num_prompts is not None, "the list of held-out prompts is finite"
        self.num_prompts = num_prompts
        self.samples_per_prompt = evaluation.samples_per_prompt
        self._config = evaluation
        self._job = job
        self._exercises = exercises
        self._version = version
        self._answered: dict[int, _Answered] = {}
        self._sampling = wire.Sampling(
            temperature=evaluation.temperature, top_p=evaluation.top_p, max_new_tokens=longest_evaluated(job.config)
        )

    @property
    def num_answered(self) -> int:
        return len(self._answered)

    def request(self, sample: SampleId) -> wire.GenerationRequest:
        return wire.GenerationRequest(
            id=encode_sample_id(sample),
            prompt_tokens=self._exercises.prompt_tokens(sample.prompt),
            seed=self._job.evaluation_seed(sample.prompt, sample.draw),
            sampling=self._sampling,
        )

    async def take(self, prompt: int, responses: Sequence[samples_pb2.Sample]) -> None:
        """Compute the rewards of all responses to a prompt."""
        names = [f"{draw} of the evaluation of version {self._version}" for draw in range(len(responses))]
        tokens = [response.response_tokens for response in responses]
        self._answered[prompt] = _Answered(responses, await self._exercises.judge(prompt, names, tokens))

    def report(self) -> events_pb2.EvaluationReported:
        """The report. Call it after every prompt is answered."""
        return events_pb2.EvaluationReported(
            version=self._version,
            num_prompts=self.num_prompts,
            samples_per_prompt=self.samples_per_prompt,
            metrics=dict(self._figures()),
        )

    def write(self, folder: Path) -> None:
        """Write prompts and responses to the version's file, one JSON line per prompt, by one atomic replacement."""
        folder.mkdir(exist_ok=True)
        path = folder / f"version{self._version:06d}.jsonl"
        partial = path.with_suffix(".partial")
        with partial.open("w") as lines:
            for prompt in range(self.num_prompts):
                lines.write(json.dumps(self._row(prompt), ensure_ascii=False) + "\n")
        os.replace(partial, path)

    def _figures(self) -> Iterator[tuple[str, float]]:
        answered = [self._answered[prompt] for prompt in range(self.num_prompts)]
        responses = [response for each in answered for response in each.responses]
        yield "reward_mean", fmean(reward for each in answered for reward in each.judged.rewards)
        for name in self._exercises.reward_names:
            values = [[by_name[name] for by_name in each.judged.by_name] for each in answered]
            yield f"{name}/mean", fmean(value for of_prompt in values for value in of_prompt)
            num_right = [sum(value >= self._config.pass_from for value in of_prompt) for of_prompt in values]
            for k in self._config.pass_at:
                passes = [pass_at(k, num_samples=self.samples_per_prompt, num_right=right) for right in num_right]
                yield f"{name}/pass@{k}", fmean(passes)
        yield "response_tokens_mean", fmean(len(response.response_tokens) for response in responses)
        yield "truncated_share", fmean(each.finish == samples_pb2.FINISH_REASON_LENGTH for each in responses)
        num_failed = sum(each.judged.num_failed for each in answered)
        if num_failed:
            yield "num_failed_rewards", float(num_failed)

    def _row(self, prompt: int) -> dict[str, Any]:
        answered, decode = self._answered[prompt], self._job.tokenizer.decode_response
        return {
            "prompt": decode(self._exercises.prompt_tokens(prompt)),
            "responses": [
                {
                    "text": decode(response.response_tokens),
                    "reward": reward,
                    "rewards": dict(by_name),
                    "is_truncated": response.finish == samples_pb2.FINISH_REASON_LENGTH,
                }
                for response, reward, by_name in zip(
                    answered.responses, answered.judged.rewards, answered.judged.by_name, strict=True
                )
            ],
        }
