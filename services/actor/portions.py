"""Decides which groups of the open minibatch the ranks train next. Pure.

A portion is a run of the minibatch's groups, in the order of their training. It is ready in these cases:
- The groups that have come complete the minibatch. Then all that are left are the last portion.
- The job streams minibatches, and each data-parallel rank can get a full bundle. Then as many are taken as leave each
  rank equally many. The others wait for more.

Where a reshard carries gradients, it waits for the portion under way. So there a portion has at most `most_tokens`,
and at least one bundle for each rank. What is left of a complete minibatch is cut too, where each rank gets a bundle of
both parts.

Filtered groups are trained by nobody. They go with the groups before them.

Invariants:
- No portion cuts a bundle. [test_portions: no_portion_cuts_a_bundle]
- Each group of a minibatch is in one portion. [test_portions: every_group_is_in_one_portion]
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

from tidegate.megatron.batching import Limits
from tidegate.megatron.bundles import Bundles, bundles_of

PORTION_S = 2.0
"""Where a resize carries gradients, a portion is cut to take no longer, as far as each rank has work. That is about as
long as two cold switches; shorter portions deal the work less evenly (record 0034)."""


class Assembly(Protocol):
    """The groups that have come for the open minibatch, in the order of their training."""

    @property
    def joining(self) -> tuple[int, ...]:
        """The prompts that may join it now, up to the one that fills it."""

    @property
    def is_filled_by_joining(self) -> bool:
        """Whether it is full with them."""


@dataclass(frozen=True, slots=True)
class Portion:
    prompts: tuple[int, ...]
    bundle_sizes: tuple[int, ...]
    """The number of samples of each bundle of the groups that are trained."""
    is_last: bool


def next_portion(
    assembly: Assembly,
    lengths: Mapping[int, Sequence[int]],
    limits: Limits,
    *,
    dp: int,
    streams: bool,
    most_tokens: float = math.inf,
) -> Portion | None:
    """The next portion. None while none is ready. `lengths` are those of the samples of each group that is trained."""
    joining, is_last = assembly.joining, assembly.is_filled_by_joining
    if not joining or not (is_last or streams):
        return None
    trained = [prompt for prompt in joining if prompt in lengths]
    bundles = bundles_of([lengths[prompt] for prompt in trained], limits)
    tokens_by_groups = list(accumulate((sum(lengths[prompt]) for prompt in trained), initial=0))
    tokens_by_bundles = [tokens_by_groups[groups] for groups in accumulate(bundles.sizes, initial=0)]
    counts = _counts(bundles, dp=dp, is_last=is_last)
    within = [count for count in counts if tokens_by_bundles[count] <= most_tokens]
    # The least portion has its place in any case.
    sizes = bundles.sizes[: max(within or counts[:1], default=0)]
    is_last = is_last and len(sizes) == len(bundles.sizes)
    if not is_last:
        if not sizes:
            return None
        joining = joining[: joining.index(trained[sum(sizes) - 1]) + 1]
    groups = iter(trained)
    bundle_sizes = tuple(sum(len(lengths[next(groups)]) for _ in range(size)) for size in sizes)
    return Portion(joining, bundle_sizes, is_last)


def _counts(bundles: Bundles, *, dp: int, is_last: bool) -> list[int]:
    """The numbers of bundles that a portion may have, the least first."""
    num_bundles = len(bundles.sizes)
    if is_last:
        return [*range(dp, num_bundles - dp + 1, dp), num_bundles]
    return list(range(dp, bundles.num_full + 1, dp))
