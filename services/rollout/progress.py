"""What the rollout's lead knows of an iteration's sequences while they are made, and the picture that it tells of them.

A sequence is where the lead has it at this moment: held by an engine, queued, ended, or else away. How many tokens it
has is as its engine was last seen; an engine that was not seen yet is not in the picture. Pure.
Invariants: every sequence of the known candidates is in the picture once; an engine tells of as many sequences as are
placed on it, which is what the scheduler refuses a picture without.

Groups that a lead before this one published ended with lengths that this one did not see: they count as the mean of
those that it saw.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tidegate.codec import decode_sample_id
from tidegate.types import GpuId, SampleId
from tidegate.v1 import events_pb2
from tidegate.v1 import workers_pb2 as wire

QUEUED, AWAY, ENDED, CUT = -1, -2, -3, -4
"""Places that are no engine, as `Generation.places` has them."""


@dataclass(slots=True)
class EngineProgress:
    """`held`: what it was given and has not given back; `lengths`: tokens so far, as last seen."""

    held: set[SampleId] = field(default_factory=set)
    lengths: dict[SampleId, int] = field(default_factory=dict)
    num_waiting: int = 0
    num_kv_tokens: int = 0
    kv_capacity_tokens: int = 0
    rate_tokens_per_s: float = 0.0
    _num_ended_tokens: int = 0
    _last_s: float | None = None
    _last_num_tokens: int = 0

    def begin(self) -> None:
        """An iteration begins: how long nothing was generated before is of no rate."""
        self.rate_tokens_per_s, self._last_s = 0.0, None

    def end(self, sample: SampleId, num_tokens: int) -> None:
        """It came out with so many tokens, whether ended or not."""
        self.held.discard(sample)
        self.lengths.pop(sample, None)
        self._num_ended_tokens += num_tokens

    def see(self, load: wire.EngineLoad, now_s: float) -> None:
        """The rate is over the time since it was last seen in this iteration, 0 the first time."""
        told = zip(load.samples, load.num_tokens, strict=True)
        lengths = {decode_sample_id(sample): length for sample, length in told}
        grown = [length - self.lengths[sample] for sample, length in lengths.items() if sample in self.lengths]
        # One that came out meanwhile is counted as ended already.
        self.lengths = {sample: length for sample, length in lengths.items() if sample in self.held}
        self.num_waiting = load.num_waiting
        self.num_kv_tokens, self.kv_capacity_tokens = load.num_used_tokens, load.num_capacity_tokens
        num_tokens = self._num_ended_tokens + sum(self.lengths.values())
        if self._last_s is not None and now_s > self._last_s:
            made = max(0, num_tokens - self._last_num_tokens)
            self.rate_tokens_per_s = _present(grown, load.num_running, made) / (now_s - self._last_s)
        self._last_s, self._last_num_tokens = now_s, num_tokens

    def told(self, gpu: GpuId, *, max_running: int) -> events_pb2.Engine:
        """What waits is what it said, and what cannot run at once."""
        num_held = len(self.held)
        num_waiting = min(num_held, max(self.num_waiting, num_held - max_running))
        return events_pb2.Engine(
            gpus=[gpu],
            num_running=num_held - num_waiting,
            num_waiting=num_waiting,
            num_kv_tokens=self.num_kv_tokens,
            kv_capacity_tokens=self.kv_capacity_tokens,
            max_running=max_running,
            rate_tokens_per_s=self.rate_tokens_per_s,
        )


def _present(grown: Sequence[int], num_running: int, made: int) -> float:
    """Tokens that what runs now makes in the time in which those that ran all along have grown so much: engines empty
    towards an iteration's end, and what they made with more on them says too much. Where none ran all along, what was
    made."""
    ran = [growth for growth in grown if growth > 0]
    return num_running * sum(ran) / len(ran) if ran else made


@dataclass(slots=True)
class IterationProgress:
    """Of one iteration. `hints` are, by prompt, the mean tokens that an earlier epoch saw."""

    first_prompt: int
    group_size: int
    max_running: int
    hints: dict[int, float] = field(default_factory=dict)
    _ended: dict[SampleId, tuple[int, bool]] = field(default_factory=dict)

    def end(self, sample: SampleId, num_tokens: int, *, is_cut: bool) -> None:
        self._ended[sample] = (num_tokens, is_cut)

    def picture(
        self,
        prompts: range,
        engines: Sequence[tuple[GpuId, EngineProgress]],
        waiting: Sequence[SampleId],
        complete: Collection[int],
    ) -> events_pb2.Generation:
        """`prompts` are the candidates that are known, `complete` those whose groups are all there; `waiting` are
        queued, next first."""
        shown = [(gpu, engine) for gpu, engine in engines if engine.kv_capacity_tokens > 0]
        mean = self._mean_ended()
        is_complete = [prompt in complete for prompt in prompts for _ in range(self.group_size)]
        places = [ENDED if is_in else AWAY for is_in in is_complete]
        lengths = [mean if is_in else 0 for is_in in is_complete]
        for sample, (length, is_cut) in self._ended.items():
            places[self._index(sample)], lengths[self._index(sample)] = CUT if is_cut else ENDED, length
        for number, (_, engine) in enumerate(shown):
            for sample in engine.held:
                places[self._index(sample)] = number
                lengths[self._index(sample)] = engine.lengths.get(sample, 0)
        queue = [self._index(sample) for sample in waiting]
        for index in queue:
            places[index] = QUEUED
        return events_pb2.Generation(
            engines=[engine.told(gpu, max_running=self.max_running) for gpu, engine in shown],
            group_size=self.group_size,
            lengths=lengths,
            places=places,
            queue=queue,
            hints=[self.hints.get(prompt, 0.0) for prompt in prompts] if self.hints else [],
        )

    def _index(self, sample: SampleId) -> int:
        return (sample.prompt - self.first_prompt) * self.group_size + sample.draw

    def _mean_ended(self) -> int:
        if not self._ended:
            return 1
        return max(1, round(sum(length for length, _ in self._ended.values()) / len(self._ended)))
