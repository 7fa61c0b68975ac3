"""The progress of an iteration's sequences in the rollout, and the picture that the lead publishes of it. Pure.

A sequence has the place that the lead knows at this moment: on an engine, queued, ended, or else away. Its number of
tokens comes from the last look at its engine. An engine without a look so far is not in the picture.

This lead did not see the lengths of groups that an earlier lead published. They count with the mean of the lengths that
it saw.

Invariants:
- Every sequence of the known candidates is in the picture once. [test_progress: every_picture_is_whole]
- An engine's counts in the picture match the sequences placed on it. The scheduler refuses a picture where they differ.
  [test_progress: an_old_look_counts_no_more]
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from tidegate.codec import decode_sample_id
from tidegate.types import GpuId, SampleId
from tidegate.v1 import events_pb2
from tidegate.v1 import workers_pb2 as wire

QUEUED, AWAY, ENDED, CUT = -1, -2, -3, -4
"""The places in `Generation.places` that are no engine."""


@dataclass(slots=True)
class EngineProgress:
    """The progress of one engine. `held`: its assigned samples. `lengths`: their tokens at the last look.

    `brought`: the tokens that other engines made of them. They do not count in the rate."""

    held: set[SampleId] = field(default_factory=set)
    brought: dict[SampleId, int] = field(default_factory=dict)
    lengths: dict[SampleId, int] = field(default_factory=dict)
    num_waiting: int = 0
    num_kv_tokens: int = 0
    kv_capacity_tokens: int = 0
    rate_tokens_per_s: float = 0.0
    _num_ended_tokens: int = 0
    _last_s: float | None = None
    _last_num_tokens: int = 0

    def begin(self) -> None:
        """Begin an iteration. The idle time before it must not lower the rate."""
        self.rate_tokens_per_s, self._last_s = 0.0, None

    def take(self, sample: SampleId, *, num_brought: int = 0) -> None:
        """Note that the engine gets a sample that has so many tokens already."""
        self.held.add(sample)
        if num_brought:
            self.brought[sample] = num_brought

    def end(self, sample: SampleId, num_tokens: int) -> None:
        """Note that a sample came out with `num_tokens` tokens, finished or not."""
        self.held.discard(sample)
        self.lengths.pop(sample, None)
        self._num_ended_tokens += num_tokens - self.brought.pop(sample, 0)

    def see(self, load: wire.EngineLoad, now_s: float) -> None:
        """Note a look at the engine. The rate covers the time since the last look in this iteration; 0 at the first."""
        pairs = zip(load.samples, load.num_tokens, strict=True)
        lengths = {decode_sample_id(sample): length for sample, length in pairs}
        grown = [length - self.lengths[sample] for sample, length in lengths.items() if sample in self.lengths]
        # Leave out samples that came out meanwhile: they count as ended already.
        self.lengths = {sample: length for sample, length in lengths.items() if sample in self.held}
        self.num_waiting = load.num_waiting
        self.num_kv_tokens, self.kv_capacity_tokens = load.num_used_tokens, load.num_capacity_tokens
        own = (length - self.brought.get(sample, 0) for sample, length in self.lengths.items())
        num_tokens = self._num_ended_tokens + sum(own)
        if self._last_s is not None and now_s > self._last_s:
            made = max(0, num_tokens - self._last_num_tokens)
            self.rate_tokens_per_s = _present_tokens(grown, load.num_running, made) / (now_s - self._last_s)
        self._last_s, self._last_num_tokens = now_s, num_tokens

    def message(self, gpu: GpuId, *, max_running: int) -> events_pb2.Engine:
        """The engine in the picture. The waiting samples are those that it reported, or those beyond `max_running`."""
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


def _present_tokens(grown: Sequence[int], num_running: int, made: int) -> float:
    """The tokens that the samples running now would have made since the last look.

    Each counts with the mean growth of the samples that ran the whole time. Engines get emptier towards an iteration's
    end, so the tokens made with more samples on them would be too many. Where no sample ran the whole time, the result
    is the tokens made."""
    growths = [growth for growth in grown if growth > 0]
    return num_running * sum(growths) / len(growths) if growths else made


@dataclass(slots=True)
class IterationProgress:
    """The progress of one iteration. `hints` are the mean tokens in an earlier epoch, by prompt."""

    first_prompt: int
    group_size: int
    max_running: int
    hints: dict[int, float] = field(default_factory=dict)
    _ended: dict[SampleId, tuple[int, bool]] = field(default_factory=dict)
    _ended_of: dict[int, list[int]] = field(default_factory=dict)
    """The lengths of the ended responses, by prompt."""

    def end(self, sample: SampleId, num_tokens: int, *, is_cut: bool) -> None:
        self._ended[sample] = (num_tokens, is_cut)
        self._ended_of.setdefault(sample.prompt, []).append(num_tokens)

    def expected_tokens(self) -> Callable[[int], float | None]:
        """The expected length of a response, by prompt: the mean of its ended draws, else the hint, else the mean of
        the ended responses or of all hints. None: nothing is known."""
        mean: float | None = None
        if self._ended:
            mean = sum(length for length, _ in self._ended.values()) / len(self._ended)
        elif self.hints:
            mean = sum(self.hints.values()) / len(self.hints)

        def expected(prompt: int) -> float | None:
            of_prompt = self._ended_of.get(prompt)
            return sum(of_prompt) / len(of_prompt) if of_prompt else self.hints.get(prompt, mean)

        return expected

    def picture(
        self,
        prompts: range,
        engines: Sequence[tuple[GpuId, EngineProgress]],
        waiting: Sequence[SampleId],
        complete: Collection[int],
        num_kept: Callable[[SampleId], int] = lambda _: 0,
    ) -> events_pb2.Generation:
        """The picture.

        `prompts` are the known candidates, and `complete` those with a complete group. `waiting` are the queued
        samples, the next one first. `num_kept` are the tokens that a sample keeps while it is on no engine."""
        shown = [(gpu, engine) for gpu, engine in engines if engine.kv_capacity_tokens > 0]
        mean = self._mean_ended()
        is_complete = [prompt in complete for prompt in prompts for _ in range(self.group_size)]
        places = [ENDED if has_ended else AWAY for has_ended in is_complete]
        lengths = [mean if has_ended else 0 for has_ended in is_complete]
        for sample, (length, is_cut) in self._ended.items():
            places[self._index(sample)], lengths[self._index(sample)] = CUT if is_cut else ENDED, length
        for number, (_, engine) in enumerate(shown):
            for sample in engine.held:
                places[self._index(sample)] = number
                lengths[self._index(sample)] = engine.lengths.get(sample, num_kept(sample))
        queue = [self._index(sample) for sample in waiting]
        for sample, index in zip(waiting, queue, strict=True):
            places[index], lengths[index] = QUEUED, num_kept(sample)
        return events_pb2.Generation(
            engines=[engine.message(gpu, max_running=self.max_running) for gpu, engine in shown],
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
