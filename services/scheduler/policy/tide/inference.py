"""When inference hands lots on, in a segment of a forecast. Pure numpy: one row a plan.

Without scoring ahead a lot is one piece of work, which can begin when the lot ends (Lindley, see `forecast`). Where
responses are scored as they end, a lot is handed on when the latest of three ends is reached:

1. The last responses of its groups are scored. The same formula holds, with their tokens alone.
2. One GPU alone has scored the longest of these.
3. All tokens of this lot and the lots before it are scored. Inference is busy from the segment's beginning on.

A segment begins with what was scored before it (`At`): no more than inference could score, nor than responses that
have ended. A lot's responses, all but the last, end evenly between now and the lot's end.

Invariants:
- With one GPU, scoring ahead hands no lot on later. [test_forecast: scoring_ahead_is_not_later]
- What is scored ahead is not scored again. [test_forecast: what_is_scored_ahead_shortens]
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from services.scheduler.policy.tide.cluster import Cluster
from services.scheduler.policy.tide.outlook import Outlook
from services.scheduler.policy.tide.segments import At, Segment
from services.scheduler.state.observed import Floats, Ints


@dataclass(frozen=True)
class Inference:
    """By plan and place: `order` has the lots in the order of their ends, and `ended_s` those ends."""

    left: Outlook
    cluster: Cluster
    order: Ints
    ended_s: Floats

    @cached_property
    def tokens(self) -> Floats:
        """By plan and place: the lot's tokens."""
        return self.left.lots.tokens[self.order]

    @cached_property
    def last_tokens(self) -> Floats:
        """By plan and place: those of the last response of each of the lot's groups."""
        return self.left.lots.last_tokens[self.order]

    def handed_on_s(self, at: At, segment: Segment) -> Floats:
        """By plan and place: when inference hands the lot on. A lot that a segment's end interrupts begins again, but
        for what was scored ahead."""
        begin = (at.t + segment.infer_after_s)[:, None]
        is_left = at.inferred_s > at.t[:, None]
        tokens = np.where(is_left, self.tokens, 0.0)
        since, rate = np.where(is_left, np.maximum(self.ended_s, begin), -np.inf), self._rate(segment)
        if self.left.num_tokens_ahead is None:
            return np.where(is_left, _served(tokens / rate, since), at.inferred_s)
        last = np.where(is_left, self.last_tokens, 0.0)
        alone = since + last / max(self.cluster.inference_rate, 1e-3)
        unscored = np.maximum(tokens.cumsum(axis=1) - at.ahead_tokens[:, None], 0.0)
        ends = np.maximum(np.maximum(_served(last / rate, since), alone), begin + unscored / rate)
        return np.where(is_left, ends, at.inferred_s)

    def tokens_ahead(self, at: At, segment: Segment, inferred_s: Floats, end_s: Floats) -> Floats:
        """By plan: the tokens that are scored at `end_s`, of lots that are not handed on by then."""
        if self.left.num_tokens_ahead is None:
            return at.ahead_tokens
        was_left, is_left = at.inferred_s > at.t[:, None], inferred_s > end_s[:, None]
        handed_on = np.where(was_left & ~is_left, self.tokens, 0.0).sum(axis=1)
        seconds = np.maximum(end_s - at.t - segment.infer_after_s, 0.0)
        scored = at.ahead_tokens + seconds * segment.inference * self.cluster.inference_rate - handed_on
        share = np.minimum(np.maximum(end_s[:, None] / np.maximum(self.ended_s, 1e-3), 0.0), 1.0)
        ended = self.left.lots.ended_tokens[self.order]
        early = ended + share * np.maximum(self.tokens - self.last_tokens - ended, 0.0)
        there = np.where(is_left, np.where(share < 1.0, early, self.tokens), 0.0).sum(axis=1)
        ahead: Floats = np.minimum(np.maximum(scored, 0.0), there)
        return ahead

    def _rate(self, segment: Segment) -> Floats:
        """By plan: tokens a second."""
        rate: Floats = np.maximum(segment.inference[:, None] * self.cluster.inference_rate, 1e-3)
        return rate


def _served(work: Floats, since: Floats) -> Floats:
    """By plan and place: when work ends that is done in this order, each not before `since`."""
    done = work.cumsum(axis=1)
    ends: Floats = done + np.maximum.accumulate(since - (done - work), axis=1)
    return ends
