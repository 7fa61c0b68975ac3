"""The order in which an iteration's groups go to engines, as the scheduler's last command gave it. Pure.

An order may come before its iteration opens. The iteration's end, and a newer incarnation, end it.

Invariants:
- An order names each group at most twice, and only groups that the iteration may have.
  [test_group_order: refused_with_its_numbers]
- An order holds for its own iteration only. [test_group_order: another_iteration_begins_without]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from tidegate.order_of_responses import MOST_PLACES

_MOST_NAMED = 8
"""The most groups that a refusal names."""


@dataclass(frozen=True, slots=True)
class GroupOrder:
    """`groups` are counted from the iteration's first prompt. Empty: the prompts go in their own order."""

    incarnation: int = 0
    iteration: int = 0
    groups: tuple[int, ...] = ()

    def prompts(self, *, incarnation: int, iteration: int, first_prompt: int) -> tuple[int, ...]:
        """The prompts of this iteration in the order. Empty where the order is of another iteration."""
        if (incarnation, iteration) != (self.incarnation, self.iteration):
            return ()
        return tuple(first_prompt + group for group in self.groups)


def order_fault(groups: Sequence[int], *, num_groups: int) -> str | None:
    """What is wrong with the order of an iteration that has at most `num_groups` groups. None: nothing."""
    beyond = [group for group in groups if group >= num_groups]
    if beyond:
        return f"names {_listed(beyond)}; the iteration has at most {num_groups} groups: name 0 to {num_groups - 1}"
    too_often = [group for group, count in Counter(groups).items() if count > MOST_PLACES]
    if not too_often:
        return None
    return f"names {_listed(too_often)} more than twice: once for its first response, and once for its others"


def _listed(groups: Sequence[int]) -> str:
    named = ", ".join(map(str, groups[:_MOST_NAMED]))
    more = f" and {len(groups) - _MOST_NAMED} more" if len(groups) > _MOST_NAMED else ""
    return f"group{'s' if len(groups) > 1 else ''} {named}{more}"
