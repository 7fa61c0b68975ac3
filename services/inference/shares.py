"""Shares of a group: the micro-batches of its responses that one copy scores. Pure.

A copy scores whole groups as long as they are small and there is one for each. A large group, or one of the last, is
split between copies, so that the last groups of an iteration take no longer than they must. A share has whole
micro-batches of its group, and a worker that gets them alone cuts them into the same ones. So a split changes no bit.

A group may be held ahead of its delivery, with the responses that have ended. Which of them share a micro-batch depends
on when they ended.

Invariants:
- A share that is cut again has the same micro-batches. [test_shares: cut_again_has_the_same_micro_batches]
- The pieces of a share have each of its samples once. [test_shares: each_sample_once]
- A result counts for the tokens that were sent alone. [test_shares: with_other_tokens_is_another_response]
"""

from __future__ import annotations

from dataclasses import dataclass, field

from tidegate.codec import decode_sample_id
from tidegate.config.job_config import JobConfig
from tidegate.megatron.batching import BatchLimits, cut
from tidegate.ports.bus import SampleDelivery
from tidegate.types import SampleId
from tidegate.v1 import samples_pb2


@dataclass(eq=False, slots=True)
class Response:
    """A response of a held group. `answer` has its log-probabilities, once they are there.

    `is_ahead`: it was dealt last while its group was not delivered."""

    sample: samples_pb2.Sample
    is_with_copy: bool = False
    is_ahead: bool = False
    answer: samples_pb2.Sample | None = None

    @property
    def id(self) -> SampleId:
        return decode_sample_id(self.sample.id)

    @property
    def num_tokens(self) -> int:
        return len(self.sample.response_tokens)


@dataclass(eq=False, slots=True)
class HeldGroup:
    """A group in the hand. `group` is its last delivery's. Before the first it is that of a response.

    - `responses`: all of a delivered group; else those that have ended, as far as is known.
    - `num_deaths`: the copies that died while they had a share of it.
    - `waits_for_delivery`: nothing more of it is scored before it is delivered.
    """

    group: samples_pb2.SampleGroup
    delivery: SampleDelivery | None = None
    responses: dict[SampleId, Response] = field(default_factory=dict)
    num_deaths: int = 0
    waits_for_delivery: bool = False

    @property
    def prompt(self) -> int:
        return self.group.prompt

    @property
    def waiting(self) -> list[Response]:
        """The responses that are neither scored nor with a copy."""
        return [each for each in self.responses.values() if each.answer is None and not each.is_with_copy]

    @property
    def is_scored(self) -> bool:
        return self.delivery is not None and all(each.answer is not None for each in self.responses.values())

    @property
    def num_tokens_ahead(self) -> int:
        """The tokens of the responses that were scored ahead."""
        return sum(each.num_tokens for each in self.responses.values() if each.answer is not None and each.is_ahead)

    def has(self, response: Response) -> bool:
        """Whether it is still the response of its id: another engine may have made that again, with other tokens."""
        return self.responses.get(response.id) is response

    def add(self, group: samples_pb2.SampleGroup) -> bool:
        """Takes the responses of the group. Whether one of them is new, or has other tokens than before."""
        if group.prompt_tokens != self.group.prompt_tokens:
            self.responses.clear()
        self.group, has_new = group, False
        for sample in group.samples:
            response = Response(sample)
            known = self.responses.get(response.id)
            if known is None or known.sample.response_tokens != sample.response_tokens:
                self.responses[response.id], has_new = response, True
        return has_new

    def deliver(self, delivery: SampleDelivery) -> None:
        """Takes a delivery. The first one has all the group's responses."""
        if self.delivery is None:
            self.add(delivery.group)
            whole = {decode_sample_id(sample.id) for sample in delivery.group.samples}
            self.responses = {id: each for id, each in self.responses.items() if id in whole}
        self.delivery, self.group = delivery, delivery.group


@dataclass(frozen=True, slots=True)
class Share:
    """Some micro-batches of a group, in the order of `cut`."""

    held: HeldGroup
    batches: tuple[tuple[Response, ...], ...]

    @property
    def responses(self) -> list[Response]:
        return [response for batch in self.batches for response in batch]

    @property
    def group(self) -> samples_pb2.SampleGroup:
        """What a copy is sent: the group with these responses alone."""
        whole, responses = self.held.group, self.responses
        if self.held.delivery is not None and len(responses) == len(whole.samples):
            return whole
        return samples_pb2.SampleGroup(
            job=whole.job,
            incarnation=whole.incarnation,
            iteration=whole.iteration,
            prompt=whole.prompt,
            version=whole.version,
            prompt_tokens=whole.prompt_tokens,
            samples=[response.sample for response in responses],
        )

    @property
    def num_tokens(self) -> int:
        """The response tokens."""
        return sum(response.num_tokens for response in self.responses)

    @property
    def present(self) -> Share:
        """The share without the responses that its group has no more."""
        batches = (tuple(response for response in batch if self.held.has(response)) for batch in self.batches)
        return Share(self.held, tuple(batch for batch in batches if batch))

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


def share_of_waiting(held: HeldGroup, limits: BatchLimits) -> Share:
    """The responses of the group that wait: all of one that was delivered and not scored ahead."""
    waiting, num_prompt_tokens = held.waiting, len(held.group.prompt_tokens)
    lengths = [num_prompt_tokens + response.num_tokens for response in waiting]
    return Share(held, tuple(tuple(waiting[index] for index in batch) for batch in cut(lengths, limits)))
