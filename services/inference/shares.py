"""Shares of a group: the micro-batches of its samples that one copy scores. Pure.

A copy scores whole groups as long as they are small and there is one for each. A large group, or one of the last, is
split between copies, so that the last groups of an iteration take no longer than they must. A share has whole
micro-batches of its group, and a worker that gets them alone cuts them into the same ones. So a split changes no bit.

Invariants:
- A share that is cut again has the same micro-batches. [test_shares: cut_again_has_the_same_micro_batches]
- The pieces of a share have each of its samples once. [test_shares: each_sample_once]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from tidegate.config.job_config import JobConfig
from tidegate.megatron.batching import BatchLimits, cut
from tidegate.ports.bus import SampleDelivery
from tidegate.types import SampleId
from tidegate.v1 import samples_pb2


@dataclass(eq=False, slots=True)
class HeldGroup:
    """A group with its last delivery. `num_deaths`: the copies that died while they had a share of it. `scored`: the
    samples whose log-probabilities are there."""

    delivery: SampleDelivery
    num_deaths: int = 0
    scored: dict[SampleId, samples_pb2.Sample] = field(default_factory=dict)

    @property
    def prompt(self) -> int:
        return self.delivery.group.prompt

    @property
    def is_scored(self) -> bool:
        return len(self.scored) == len(self.delivery.group.samples)


@dataclass(frozen=True, slots=True)
class Share:
    """Some micro-batches of a group: the indices of their samples, in the order of `cut`."""

    held: HeldGroup
    batches: tuple[tuple[int, ...], ...]

    @property
    def group(self) -> samples_pb2.SampleGroup:
        """What a copy is sent: the group with these samples alone."""
        whole, indices = self.held.delivery.group, [index for batch in self.batches for index in batch]
        if len(indices) == len(whole.samples):
            return whole
        group = samples_pb2.SampleGroup()
        group.CopyFrom(whole)
        del group.samples[:]
        group.samples.extend(whole.samples[index] for index in indices)
        return group

    @property
    def num_tokens(self) -> int:
        """The response tokens."""
        samples = self.held.delivery.group.samples
        return sum(len(samples[index].response_tokens) for batch in self.batches for index in batch)

    def split(self, num_pieces: int) -> list[Share]:
        """At most so many pieces: one micro-batch is the smallest. Each gets every `num_pieces`-th."""
        num_pieces = min(num_pieces, len(self.batches))
        return [Share(self.held, self.batches[piece::num_pieces]) for piece in range(num_pieces)]

    def cut_after(self, num_batches: int) -> tuple[Share, Share | None]:
        """The first micro-batches, and the rest, if there is one."""
        if num_batches >= len(self.batches):
            return self, None
        return Share(self.held, self.batches[:num_batches]), Share(self.held, self.batches[num_batches:])


def limits_of(config: JobConfig) -> BatchLimits:
    """The limits of a micro-batch of the inference."""
    return BatchLimits(max_tokens=config.inference.max_tokens_per_microbatch)


def whole_of(held: HeldGroup, limits: BatchLimits) -> Share:
    return Share(held, tuple(cut(lengths_of(held.delivery.group), limits)))


def lengths_of(group: samples_pb2.SampleGroup) -> Sequence[int]:
    """The tokens of each sample, prompt included."""
    return [len(group.prompt_tokens) + len(sample.response_tokens) for sample in group.samples]
