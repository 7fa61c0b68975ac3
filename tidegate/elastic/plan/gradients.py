"""The part of a rank that also carries gradients: each goes the way of a moment of Adam, whose ranges and size it has.

Invariant: the gradients' copies are the moments', with another kind. [test_gradients: gradients_go_the_way_of_a_moment]
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.plan import Holding, Part, RegionCopy

_LIKE = StateKind.EXP_AVG


def with_gradients(part: Part) -> Part:
    """The part of a plan for Adam, with the gradients of all trained parameters."""
    return replace(
        part,
        source_holdings=(*part.source_holdings, *_of_holdings(part.source_holdings)),
        target_holdings=(*part.target_holdings, *_of_holdings(part.target_holdings)),
        local=(*part.local, *_of_copies(part.local)),
        sends=(*part.sends, *_of_copies(part.sends)),
        receives=(*part.receives, *_of_copies(part.receives)),
    )


def _of_holdings(holdings: Iterable[Holding]) -> tuple[Holding, ...]:
    return tuple(replace(holding, kind=StateKind.GRADIENT) for holding in holdings if holding.kind is _LIKE)


def _of_copies(copies: Iterable[RegionCopy]) -> tuple[RegionCopy, ...]:
    return tuple(copy._replace(kind=StateKind.GRADIENT) for copy in copies if copy.kind is _LIKE)
