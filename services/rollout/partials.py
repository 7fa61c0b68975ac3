"""The unfinished responses that engines handed back, for the engines that continue them. Pure.

A partial is kept until its response is complete. So the death of an engine that continues it costs only the tokens made
since: to prefill a partial is cheaper than to generate it again.

Invariants:
- A partial only grows: an engine that hands back less than it was given does not shorten it.
  [test_partials: only_grows]
- A partial that an engine would refuse as complete is complete. [test_partials: left_to_generate]
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from tidegate.types import SampleId
from tidegate.v1 import samples_pb2


@dataclass(slots=True)
class Partials:
    """The partials of one iteration or evaluation.

    `num_moves` and `num_moved_tokens` count those handed back. `num_lost_tokens` were made and not handed back."""

    num_moves: int = 0
    num_moved_tokens: int = 0
    num_lost_tokens: int = 0
    _by_sample: dict[SampleId, samples_pb2.Sample] = field(default_factory=dict)

    def keep(self, sample: SampleId, response: samples_pb2.Sample) -> None:
        """Keep what an engine handed back. A response without a token is begun again."""
        num_tokens = len(response.response_tokens)
        if num_tokens:
            self.num_moves += 1
            self.num_moved_tokens += num_tokens
        if num_tokens > self.num_tokens(sample):
            self._by_sample[sample] = response

    def of(self, sample: SampleId) -> samples_pb2.Sample | None:
        """The response to continue. None: it is to be begun."""
        return self._by_sample.get(sample)

    def num_tokens(self, sample: SampleId) -> int:
        partial = self._by_sample.get(sample)
        return 0 if partial is None else len(partial.response_tokens)

    def figures(self) -> dict[str, float]:
        """The counts by the names of the progress's metrics. Empty before the first move."""
        if not self.num_moves and not self.num_lost_tokens:
            return {}
        return {
            "num_moves": float(self.num_moves),
            "num_moved_tokens": float(self.num_moved_tokens),
            "num_lost_tokens": float(self.num_lost_tokens),
        }

    def end(self, sample: SampleId) -> None:
        """The response is complete."""
        self._by_sample.pop(sample, None)


def finish_of(
    response: samples_pb2.Sample, *, max_new_tokens: int, end_ids: Collection[int]
) -> samples_pb2.FinishReason.ValueType:
    """Why the response ends. A server that aborts a request at its last token may call a complete one unfinished."""
    if response.finish != samples_pb2.FINISH_REASON_ABORT or not response.response_tokens:
        return response.finish
    if response.response_tokens[-1] in end_ids:
        return samples_pb2.FINISH_REASON_STOP
    is_full = len(response.response_tokens) >= max_new_tokens
    return samples_pb2.FINISH_REASON_LENGTH if is_full else samples_pb2.FINISH_REASON_ABORT
