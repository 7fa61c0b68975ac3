"""What a move changes in greedy responses of an engine: they are continued from several positions, and compared.

A move replaces the KV cache of the tokens so far, which single steps filled, by that of one prefill. Both have other
rounding. A response that is only generated again differs too, because other requests are in its batch at each step; so
this is measured beside it.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from services.rollout.engine import Engine, GenerationRequest, Response

POSITIONS = (1, 32, 128, 224)
"""The tokens that a response has when it moves, of 256."""

Run = Callable[[Engine, Sequence[GenerationRequest]], Mapping[str, Response]]


@dataclass
class Drift:
    """How responses differ from others of the same requests, behind the first `begin` tokens that they share."""

    num_same: int = 0
    num_responses: int = 0
    distances: list[float] = field(default_factory=list)
    """|difference of log-probabilities| of each token, up to the first token that differs."""
    same_tokens: list[int] = field(default_factory=list)
    """For each response that differs, the tokens before its first difference."""

    def take(self, other: Response, unmoved: Response, *, begin: int) -> None:
        pairs = list(zip(other.tokens, unmoved.tokens, strict=True))
        end = next((index for index, (one, two) in enumerate(pairs) if one != two), len(pairs))
        self.num_responses += 1
        self.num_same += end == len(pairs)
        if end < len(pairs):
            self.same_tokens.append(end - begin)
        log_probs = zip(other.log_probs[begin:end], unmoved.log_probs[begin:end], strict=True)
        self.distances += [abs(one - two) for one, two in log_probs]

    def figures(self, name: str) -> dict[str, float]:
        return {
            f"{name}_same_share": self.num_same / self.num_responses,
            f"{name}_drift_mean_nats": statistics.mean(self.distances),
            f"{name}_drift_max_nats": max(self.distances),
            f"{name}_same_tokens_median": float(statistics.median(self.same_tokens)) if self.same_tokens else 0.0,
        }


def begun(response: Response, num_tokens: int) -> Response:
    """The response as it was handed over."""
    spans = [replace(span, end=min(span.end, num_tokens)) for span in response.versions if span.start < num_tokens]
    return Response(response.tokens[:num_tokens], response.log_probs[:num_tokens], tuple(spans))


def move_figures(
    engine: Engine, requests: Sequence[GenerationRequest], unmoved: Mapping[str, Response], run: Run
) -> dict[str, float]:
    """Raises RuntimeError where a moved part lost its own values."""
    again, moved = Drift(), Drift()
    for name, response in run(engine, requests).items():
        again.take(response, unmoved[name], begin=0)
    for position in POSITIONS:
        continued = [replace(request, partial=begun(unmoved[request.id], position)) for request in requests]
        for name, response in run(engine, continued).items():
            if begun(response, position) != begun(unmoved[name], position):
                raise RuntimeError(f"response {name} has other values before its move at {position}")
            moved.take(response, unmoved[name], begin=position)
    return again.figures("again") | moved.figures("moved")
