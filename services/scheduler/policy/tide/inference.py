"""When inference hands lots on, in a segment of a forecast. Pure numpy: one row a plan.

Without scoring ahead a lot is one piece of work, which can begin when the lot ends (Lindley, see `forecast`). Where
responses are scored as they end, a lot is handed on when the latest of three ends is reached:

1. The last responses of its groups are scored. The same formula holds, with their tokens alone.
2. One copy alone has scored the longest of these.
3. All tokens of this lot and the lots before it are scored.

While complete groups wait, all GPUs share each of them. Afterwards inference scores ahead, one response a copy, and
most copies wait for the longest: n copies do n**-unevenness of their work (`outlook`). Where groups come in bursts this
forecast is late: it takes inference for never behind again once it has caught up.

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
from numpy.typing import NDArray

from services.scheduler.policy.tide.cluster import Cluster
from services.scheduler.policy.tide.outlook import Outlook
from services.scheduler.policy.tide.segments import At, Segment
from services.scheduler.state.observed import Floats, Ints


@dataclass(frozen=True)
class Inference:
    """By plan and place: `order` has the lots in the order of their ends, and `ended_s` those ends."""

    left: Outlook
    cluster: Cluster
    at: At
    segment: Segment
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

    def handed_on_s(self) -> Floats:
        """By plan and place: when inference hands the lot on. A lot that a segment's end interrupts begins again, but
        for what was scored ahead."""
        is_left, since, rate = self._is_left, self._since, self._rate
        if self.left.num_tokens_ahead is None:
            return np.where(is_left, _served(self._left_tokens / rate, since), self.at.inferred_s)
        last = np.where(is_left, self.last_tokens, 0.0)
        longest = np.where(is_left, self.left.lots.longest_tokens[self.order], 0.0)
        alone = since + longest / max(self.cluster.copy_size * self.cluster.inference_rate, 1e-3)
        seconds = self._unscored / rate
        after = np.maximum(seconds - self._caught_up_s, 0.0)
        scored = self._begin + seconds + after * (1.0 / self._share_ahead - 1.0)
        ends = np.maximum(np.maximum(_served(last / rate, since), alone), scored)
        return np.where(is_left, ends, self.at.inferred_s)

    def tokens_ahead(self, inferred_s: Floats, end_s: Floats) -> Floats:
        """By plan: the tokens that are scored at `end_s`, of lots that are not handed on by then."""
        if self.left.num_tokens_ahead is None:
            return self.at.ahead_tokens
        is_left = inferred_s > end_s[:, None]
        handed_on = np.where(self._is_left & ~is_left, self.tokens, 0.0).sum(axis=1)
        seconds = np.maximum(end_s[:, None] - self._begin, 0.0)
        after = np.maximum(seconds - self._caught_up_s, 0.0)
        scored = ((seconds - after * (1.0 - self._share_ahead)) * self._rate)[:, 0]
        scored = self.at.ahead_tokens + scored - handed_on
        share = np.minimum(np.maximum(end_s[:, None] / np.maximum(self.ended_s, 1e-3), 0.0), 1.0)
        ended = self.left.lots.ended_tokens[self.order]
        early = ended + share * np.maximum(self.tokens - self.last_tokens - ended, 0.0)
        there = np.where(is_left, np.where(share < 1.0, early, self.tokens), 0.0).sum(axis=1)
        ahead: Floats = np.minimum(np.maximum(scored, 0.0), there)
        return ahead

    @cached_property
    def _begin(self) -> Floats:
        return (self.at.t + self.segment.infer_after_s)[:, None]

    @cached_property
    def _is_left(self) -> NDArray[np.bool_]:
        """By plan and place: whether the lot is not handed on when the segment begins."""
        is_left: NDArray[np.bool_] = self.at.inferred_s > self.at.t[:, None]
        return is_left

    @cached_property
    def _left_tokens(self) -> Floats:
        return np.where(self._is_left, self.tokens, 0.0)

    @cached_property
    def _since(self) -> Floats:
        """By plan and place: when the lot can be scored."""
        return np.where(self._is_left, np.maximum(self.ended_s, self._begin), -np.inf)

    @cached_property
    def _unscored(self) -> Floats:
        """By plan and place: the tokens of this lot and those before it that are not scored ahead."""
        return np.maximum(self._left_tokens.cumsum(axis=1) - self.at.ahead_tokens[:, None], 0.0)

    @cached_property
    def _caught_up_s(self) -> Floats:
        """By plan: the seconds from the beginning until no complete group waits."""
        if not self._unscored.shape[1]:
            return np.zeros((len(self._unscored), 1))
        before = np.maximum(self._unscored - self._left_tokens, 0.0) / self._rate
        waits = self._since > self._begin + before
        first = before[np.arange(len(before)), waits.argmax(axis=1)]
        seconds: Floats = np.where(waits.any(axis=1), first, self._unscored[:, -1] / self._rate[:, 0])
        return seconds[:, None]

    @cached_property
    def _share_ahead(self) -> Floats:
        """By plan: the share of its work that inference does while it scores ahead."""
        copies = np.maximum(self.segment.inference / self.cluster.copy_size, 1.0)
        share: Floats = copies**-self.left.unevenness
        return share[:, None]

    @cached_property
    def _rate(self) -> Floats:
        """By plan: tokens a second."""
        rate: Floats = np.maximum(self.segment.inference[:, None] * self.cluster.inference_rate, 1e-3)
        return rate


def _served(work: Floats, since: Floats) -> Floats:
    """By plan and place: when work ends that is done in this order, each not before `since`."""
    done = work.cumsum(axis=1)
    ends: Floats = done + np.maximum.accumulate(since - (done - work), axis=1)
    return ends
