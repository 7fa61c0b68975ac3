"""Counts the samples on which rewards failed, and refuses an iteration in which a reward failed on too many. Pure.

A reward that always fails makes every sample 0. Without a limit the job would go on and learn nothing.

    share = num_failed / num_samples

- num_failed: the iteration's samples on which the reward failed, as the stream holds them.
- num_samples: the samples of all prompts that the iteration may still take.

The iteration is refused once the share of one reward is above its `max_failed`.

Invariants:
- An iteration refused before its end would be refused at its end too. [test_failed_rewards: refused_at_its_end_too]
- The message has the failure of the lowest prompt and draw so far. [test_failed_rewards: lowest_prompt_and_draw]
- A group counts once. [test_failed_rewards: group_counts_once]
"""

from __future__ import annotations

from collections.abc import Sequence

from tidegate.candidates import Candidates
from tidegate.config.sections.data import RewardSection, reward_names
from tidegate.v1 import samples_pb2


class TooManyFailedRewards(ValueError):
    """A reward failed on more samples than its limit allows. The message has the first traceback."""


class FailedRewards:
    """The failures of one iteration, with the candidates that its groups belong to."""

    def __init__(self, rewards: Sequence[RewardSection], candidates: Candidates, *, group_size: int) -> None:
        self.candidates = candidates
        self._limits = {name: reward.max_failed for name, reward in zip(reward_names(rewards), rewards, strict=True)}
        self._places = {name: place for place, name in enumerate(self._limits)}
        self._group_size = group_size
        self._failures: dict[str, dict[tuple[int, int], samples_pb2.RewardFailure]] = {}
        """The failures by reward, and by prompt and draw."""

    def add(self, group: samples_pb2.SampleGroup) -> int:
        """Count the failures of a group on the stream. Returns the number of all failures so far."""
        for sample in group.samples:
            for failure in sample.failures:
                self._failures.setdefault(failure.reward, {})[(group.prompt, sample.id.draw)] = failure
        return sum(len(failed) for failed in self._failures.values())

    def check(self) -> None:
        """Raise TooManyFailedRewards where a reward failed on too many samples."""
        candidates = self.candidates
        num_prompts = len(candidates.prompts if candidates.is_complete else candidates.possible)
        num_samples = num_prompts * self._group_size
        for name, limit in self._limits.items():
            failed = self._failures.get(name, {})
            if len(failed) / num_samples > limit:
                first = failed[min(failed)]
                message = (
                    f"reward {name} failed on {len(failed)} of the iteration's {num_samples} samples, more than "
                    f"rewards.{self._places[name]}.max_failed={limit:g} allows; the first: {first.message}. Mend the "
                    "function and resume, or raise the limit (1 sets none)"
                )
                raise TooManyFailedRewards("\n".join([message, first.traceback]) if first.traceback else message)
