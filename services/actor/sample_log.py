"""Writes some samples of each iteration into the job's folder, one line each, for people: texts, rewards, fates.

The iteration's plan alone selects the samples: whole groups, spread evenly over its prompts, as many as
`samples.per_iteration` allows. A file holds the samples of one iteration in one incarnation. Its lines are written with
the minibatches. Training waits for the writes only at the end of the iteration.

Invariants:
- A sample is written once, after it has a fate, with the text that the model read and wrote.
  [test_sample_log: texts_the_rewards_by_name]
- A failed write costs the lines and logs a warning; it never stops the training. [test_sample_log: takes_no_samples]
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from tidegate.codec import decode_sample_id
from tidegate.lines import append_lines
from tidegate.tasks.tokenizer import TaskTokenizer
from tidegate.types import SampleId
from tidegate.v1 import samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

_FINISHES = {samples_pb2.FINISH_REASON_STOP: "stop", samples_pb2.FINISH_REASON_LENGTH: "length"}


@dataclass(frozen=True, slots=True)
class Fate:
    """The fate of samples: `name` is `trained`, `filtered` or `discarded`, and the last two have a `reason`.

    - update: the id of the update that the samples were in.
    - masked: the samples that were in the minibatch but, by `mask_truncated`, not in the loss.
    """

    name: str
    reason: str = ""
    update: str = ""
    advantages: Mapping[SampleId, float] | None = None
    masked: frozenset[SampleId] = frozenset()


def fate_of_update(report: wire.UpdateReport, samples: Sequence[wire.TrainSample], *, reason: str) -> Fate:
    """The fate of a minibatch's samples. `reason` counts where the update was not applied."""
    return Fate(
        "trained" if report.committed else "discarded",
        reason="" if report.committed else reason,
        update=report.update_id,
        advantages={decode_sample_id(sample.id): sample.advantage for sample in samples},
        masked=frozenset(decode_sample_id(sample.id) for sample in samples if sample.masked),
    )


def chosen_draws(plan: types_pb2.IterationPlan, per_iteration: int | None) -> dict[int, int]:
    """The number of draws to write, by prompt. None writes all samples.

    Prompts that replace others are chosen only where the iteration's own prompts are not enough."""
    size, num_possible = plan.group_size, plan.num_prompts + plan.max_extra_prompts
    num_samples = num_possible * size if per_iteration is None else min(per_iteration, num_possible * size)
    num_groups = -(-num_samples // size)
    first, step = plan.first_prompt, max(plan.num_prompts, num_groups)
    prompts = [first + place * step // num_groups for place in range(num_groups)]
    return {prompt: min(size, num_samples - place * size) for place, prompt in enumerate(prompts)}


class SampleLog:
    """The log of one actor's lead. `close` it, for it may hold a thread."""

    def __init__(self, folder: Path, tokenizer: TaskTokenizer, *, per_iteration: int | None) -> None:
        self._folder = folder
        self._tokenizer = tokenizer
        self._per_iteration = per_iteration
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="sample-log")
        """One thread, so that lines are in the order of the updates."""
        self._pending: set[asyncio.Future[None]] = set()
        self._log = structlog.get_logger("samples")

    def note(self, plan: types_pb2.IterationPlan, groups: Sequence[samples_pb2.SampleGroup], fate: Fate) -> None:
        """Begin to write the chosen samples of these groups, which all have this fate."""
        draws = chosen_draws(plan, self._per_iteration)
        kept = [group for group in groups if group.prompt in draws]
        if kept:
            writing = asyncio.get_running_loop().run_in_executor(self._writer, self._write, kept, draws, fate)
            self._pending.add(writing)
            writing.add_done_callback(self._pending.discard)

    async def written(self) -> None:
        """Wait for the writes begun so far."""
        await asyncio.gather(*self._pending, return_exceptions=True)

    def close(self) -> None:
        self._writer.shutdown(wait=False, cancel_futures=True)

    def _write(self, groups: Sequence[samples_pb2.SampleGroup], draws: Mapping[int, int], fate: Fate) -> None:
        path = self._folder / f"inc{groups[0].incarnation:03}-it{groups[0].iteration:06}.jsonl"
        try:
            rows = [
                self._row(group, sample, fate) for group in groups for sample in group.samples[: draws[group.prompt]]
            ]
            self._folder.mkdir(exist_ok=True)
            append_lines(
                path, "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows).encode()
            )
        except (OSError, ValueError) as error:
            self._log.warning("samples not written", path=str(path), error=str(error))

    def _row(self, group: samples_pb2.SampleGroup, sample: samples_pb2.Sample, fate: Fate) -> dict[str, Any]:
        sample_id = decode_sample_id(sample.id)
        return {
            "sample": str(sample_id),
            "iteration": group.iteration,
            "version": group.version,
            "fate": fate.name,
            "reason": fate.reason or None,
            "update": fate.update or None,
            "masked": sample_id in fate.masked,
            "reward": sample.reward,
            "rewards": dict(sorted(sample.rewards.items())),
            "failures": {failure.reward: failure.message for failure in sample.failures},
            "advantage": fate.advantages[sample_id] if fate.advantages is not None else None,
            "finish": _FINISHES.get(sample.finish),
            "num_prompt_tokens": len(group.prompt_tokens),
            "num_response_tokens": len(sample.response_tokens),
            "prompt": self._tokenizer.decode(group.prompt_tokens),
            "response": self._tokenizer.decode(sample.response_tokens),
        }
