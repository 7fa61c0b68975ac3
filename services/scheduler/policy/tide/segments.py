"""The values that pass from one segment of a forecast to the next, one row a plan.

Invariant: a plan is changed by its own segments alone. [test_foresight: the_same_alone_and_among_others]
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from services.scheduler.state.observed import Floats, Ints


@dataclass(frozen=True)
class At:
    """How far each plan is.

    t, u, engines: by plan. `engines` have sequences.
    aged: by plan, the steps of a sequence that runs all the time. They are more than u where fewer slots than the
      outlook's ran, or sequences went back to the queue.
    scale: by plan, the running sequences over those of the outlook.
    has_started, steps, ended_s: by plan and lot; `steps` from its start, or from now, to its end.
    inferred_s: by plan and place in the order of the ends.
    ahead_tokens: by plan, the tokens that inference has scored of lots that it has not handed on.
    is_mid: by plan, whether the segment ended in a minibatch, of which `trained_tokens` are trained.
    """

    t: Floats
    u: Floats
    aged: Floats
    engines: Floats
    scale: Floats
    has_started: NDArray[np.bool_]
    steps: Floats
    ended_s: Floats
    inferred_s: Floats
    ahead_tokens: Floats
    trained_tokens: Floats
    is_mid: NDArray[np.bool_]


_NAMES = tuple(each.name for each in fields(At))


@dataclass(frozen=True)
class Segment:
    """One segment, by plan.

    rate: the trainer's tokens a second.
    train_after_s, infer_after_s: seconds of switching before the trainer, or inference, works.
    leave_s: engines that leave are asked so long before the segment begins, and do nothing until then.
    minibatch: the one that is trained; None: the segment ends after `train_after_s`.
    fixed_s: seconds of a minibatch that no GPU makes shorter.
    is_cut: the segment ends when the rollout is over, at the latest. A minibatch is not cut in the groups of its last
      lot.
    """

    engines: Floats
    inference: Floats
    rate: Floats
    train_after_s: Floats
    infer_after_s: Floats
    minibatch: int | None
    fixed_s: float
    leave_s: float = 0.0
    is_cut: bool = False


@dataclass(frozen=True)
class Trained:
    """When a segment's minibatch ends, by plan; when its lots begin and how long they take, by plan and lot.

    last_s: by plan, how long the groups of the last lot take. In a fixed order others wait for them, and come before.
    """

    end_s: Floats
    begins_s: Floats
    work_s: Floats
    last_s: Floats

    @property
    def last_begins_s(self) -> Floats | float:
        """-inf where no lot is left: the update alone cannot be cut."""
        if not self.begins_s.shape[1]:
            return -np.inf
        begins_s: Floats = self.begins_s[:, -1] + (self.work_s[:, -1] - self.last_s)
        return begins_s

    def seconds_until(self, at_s: Floats) -> Floats:
        """Seconds of work that are done at this time."""
        since_s = np.maximum(at_s[:, None] - self.begins_s, 0.0)
        seconds: Floats = np.minimum(since_s, self.work_s).sum(axis=1)
        return seconds


def rows_of(at: At, rows: Ints) -> At:
    """The values of some plans, in this order."""
    return At(**{name: getattr(at, name)[rows] for name in _NAMES})


def merged(at: At, rows: Ints, rest: At) -> At:
    """`rest` for the plans in these rows, `at` for the others."""

    def of(name: str) -> Any:
        values = np.array(getattr(at, name))
        values[rows] = getattr(rest, name)
        return values

    return At(**{name: of(name) for name in _NAMES})
