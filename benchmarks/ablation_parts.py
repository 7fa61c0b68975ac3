"""The parts of `tide`, and how an iteration runs without one of them.

A part is left out by other values of names in the policy's modules, while one simulation runs in this process. So the
policy has no switch that only a benchmark would use. A few parts are rules of the policy, which it takes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import numpy as np

from services.scheduler.policy import lengths_law, opening_order, situation, supported_law, trainer_rates
from services.scheduler.policy.lengths_law import Observed
from services.scheduler.policy.situation import Choice, Situation, Split
from services.scheduler.policy.tide import foresight, outlook, plans, prompt_order, seating, tide_policy
from services.scheduler.policy.tide.cluster import Plans, fitting
from services.scheduler.policy.tide.forecast import Forecast
from services.scheduler.policy.tide.foresight import Foresight, TideRules
from services.scheduler.policy.tide.memory import TideMemory
from services.scheduler.policy.tide.segments import Segment
from services.scheduler.policy.tide.tide_policy import TidePolicy
from services.scheduler.state.observed import Floats, Generation, Ints

NOTHING = "nothing"
Change = tuple[float, float, Ints, Ints]


class Kind(StrEnum):
    """Of a setting: minibatches take groups as they come, or fixed ones; an iteration of a minute or two; a policy that
    is told wrong values."""

    ARRIVAL = "arrival"
    FIXED = "fixed"
    SHORT = "short"
    TOLD_WRONG = "told wrong"


TOLD_RIGHT = (Kind.ARRIVAL, Kind.FIXED, Kind.SHORT)
STREAMED = (Kind.ARRIVAL, Kind.SHORT)


@dataclass(frozen=True, slots=True)
class Instead:
    """`name` of a module or class, and what makes its other value of the present one."""

    owner: Any
    name: str
    other: Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Part:
    """`rules`: of the policy, without the part. `kinds`: of the settings in which it may act. `kept_for`: why it stays
    although it gains little; empty for the others."""

    instead: tuple[Instead, ...] = ()
    rules: Mapping[str, Any] = field(default_factory=dict)
    kinds: tuple[Kind, ...] = TOLD_RIGHT
    kept_for: str = ""

    @contextmanager
    def left_out(self) -> Iterator[None]:
        present = [each.owner.__dict__[each.name] for each in self.instead]
        try:
            for each, value in zip(self.instead, present, strict=True):
                setattr(each.owner, each.name, each.other(value))
            yield
        finally:
            for each, value in zip(self.instead, present, strict=True):
                setattr(each.owner, each.name, value)

    def policy(self, rules: TideRules) -> TidePolicy:
        return TidePolicy(replace(rules, **self.rules))


def _value(value: Any) -> Callable[[Any], Any]:
    return lambda present: value


def _of_clusters(**values: Any) -> Instead:
    """Forecasts with other values of the cluster."""
    return Instead(
        foresight, "cluster_of", lambda present: lambda *args, **options: replace(present(*args, **options), **values)
    )


def _without_changes(is_left_out: Callable[[Ints, Ints], Any]) -> Instead:
    """A search without some of the changes, by the GPUs of the trainer and of inference that they move."""

    def other(present: Callable[..., Iterator[Change]]) -> Callable[..., Iterator[Change]]:
        return lambda *args, **options: (
            each for each in present(*args, **options) if not is_left_out(each[2], each[3])
        )

    return Instead(plans, "_changes", other)


def _with_nothing_ahead(present: Callable[..., Any]) -> Callable[..., Any]:
    """Engines that leave ahead of a minibatch's end decode until then."""
    return lambda self, at, engines, slots, leave_s: present(self, at, engines, slots, 0.0)


def _as_long_as_told(picture: Generation, groups: Ints | None = None) -> Observed:
    """No response has shown anything."""
    none, no_int = np.zeros(picture.num_groups), np.zeros(0, dtype=np.int64)
    return Observed(none, none, np.zeros(picture.num_groups, dtype=np.int64), np.zeros(0), no_int)


def _middles(present: Callable[[Ints, int], tuple[Ints, Ints]]) -> Callable[[Ints, int], tuple[Floats, Ints]]:
    """Every member in the middle of its group."""

    def other(group_of: Ints, num_groups: int) -> tuple[Floats, Ints]:
        _, num_open = present(group_of, num_groups)
        return (num_open - 1) / 2, num_open

    return other


def _whole(present: Callable[..., tuple[Segment, Floats]]) -> Callable[..., tuple[Segment, Floats]]:
    """Segments that the rollout's end does not cut."""

    def other(*args: Any) -> tuple[Segment, Floats]:
        segment, trainer = present(*args)
        return replace(segment, is_cut=False), trainer

    return other


def _as_placed(self: TidePolicy, situation: Situation, assigned: Any, memory: TideMemory, *_: Any, **__: Any) -> Choice:
    return tide_policy._chosen(situation, assigned, memory, "an open minibatch stays")


def _stages_split(situation: Situation, memory: TideMemory, num_gpus: int) -> Split:
    assert memory.plan is not None
    stage = memory.plan.stages[0]
    return fitting(situation, Split(0, stage.num_trainer_gpus, stage.num_inference_gpus), num_gpus)


def _has_hints(situation: Situation) -> bool:
    """Whether there are hints, however large their error."""
    return bool(situation.generation.hints)


def _infers_with_it(present: Callable[..., Plans]) -> Callable[..., Plans]:
    def other(*args: Any, infers_ahead: bool = False) -> Plans:
        return present(*args)

    return other


def _law_as_told(picture: Generation, law: Any) -> Any:
    return law


def _no_hints(_: Generation) -> tuple[float, int]:
    """What `variance_of_hints` says where there are none."""
    return 0.0, 0


def _named(owner: Any, name: str, value: Any) -> tuple[Instead, ...]:
    return (Instead(owner, name, _value(value)),)


def _without_probes() -> tuple[Instead, ...]:
    def none(*_: Any, **__: Any) -> tuple[int, ...]:
        return ()

    return _named(tide_policy, "probing_order", none) + _named(prompt_order, "probing_order", none)


_LAW_AS_TOLD = _named(situation, "supported_law", _law_as_told)

PARTS: Mapping[str, Part] = {
    NOTHING: Part(_named(outlook, "GRID", 127)),
    # The opening
    "an opening at home": Part(_named(tide_policy, "_at_home", lambda *_: None)),
    "an order by hints": Part(_named(tide_policy, "orders_at_opening", lambda *_, **__: ((),))),
    "short prompts between long ones": Part(rules={"short_share": 0.0}, kinds=STREAMED),
    "an order by probes": Part(
        _without_probes(),
        kinds=(*STREAMED, Kind.TOLD_WRONG),
        kept_for="hardly a setting here lacks hints; `benchmarks.probes` has eight, where it gains up to 2.7 %",
    ),
    "hints with a large error are ignored": Part(
        _named(opening_order, "hints_tell_apart", _has_hints) + _named(prompt_order, "hints_tell_apart", _has_hints),
        kept_for="no hints that are tried are told with so large an error; with such hints long prompts come last",
    ),
    # The plan and its search
    "inference ahead of the trainer": Part(
        _named(Forecast, "infers_ahead", property(lambda self: False)), kinds=(Kind.FIXED,)
    ),
    "a family of late starts": Part((Instead(foresight, "family", _infers_with_it),), kinds=(Kind.FIXED,)),
    "no start before the first group": Part(
        _named(plans, "not_before", lambda found, earliest_s: found),
        kept_for="told the median twice and another rate, iterations take 3 % longer without it on two other seeds",
    ),
    "a plan that is looked at while it waits": Part(rules={"fresh_share": 1e6}),
    "the remembered plan": Part(_named(foresight, "of_memory", lambda *_: None)),
    "several rounds of a search": Part(rules={"rounds": 1}),
    "a search from two starts": Part(
        _named(plans, "BEGINNINGS", 1),
        kinds=STREAMED,
        kept_for="iterations take 0.3 % longer without it in the mean of twelve settings, twice the error of that mean",
    ),
    "a told rate that is doubted": Part(
        _named(foresight, "DOUBTED_RATE", 1.0),
        kinds=(*TOLD_RIGHT, Kind.TOLD_WRONG),
        kept_for="the worst way of being told wrong takes 1.2 % less with it on twenty seeds",
    ),
    "GPUs from inference to the trainer": Part((_without_changes(lambda trainer, own: np.count_nonzero(own) == 1),)),
    "the same from a minibatch on": Part((_without_changes(lambda trainer, own: np.count_nonzero(own) > 1),)),
    # Moves
    "a move must gain": Part(
        _named(Foresight, "_or_stay", lambda self, forecast, found: found),
        kept_for="a simulated move never fails, and takes as long as told",
    ),
    "idle GPUs in an open minibatch": Part(_named(TidePolicy, "_looked_again", _as_placed)),
    "all GPUs after the rollout": Part(
        _named(tide_policy, "_split_planned", _stages_split),
        kept_for="the forecast gives them to the trainer, so that a plan's own numbers mean nothing then",
    ),
    "engines that leave beside the trainer": Part(
        _named(seating, "_kept", lambda engines, num, near: engines[:num]),
        kept_for="the simulator has one network: a copy of the trainer on two nodes is as fast as on one",
    ),
    # The forecast
    "the trainer's GPUs after the rollout": Part((Instead(Forecast, "_segment", _whole),)),
    "training while GPUs are released": Part(
        _named(Forecast, "_idle_share", lambda self, before, after: np.ones(np.broadcast(before, after).shape))
    ),
    "engines without work": Part(
        (_of_clusters(num_working=None),),
        kept_for="without it GPUs may stay idle beside an open minibatch, as a test of the policy shows",
    ),
    "room for KV tokens": Part(
        (_of_clusters(kv_capacity_tokens=10**12),),
        kept_for="no setting that is tried fills the engines' memory",
    ),
    "the wait of sequences that come back": Part(
        _named(Forecast, "_waits", lambda self, at, *_: np.zeros(at.steps.shape)),
        kept_for="31 settings take 0.4 % longer without it on four seeds each, and 24 ways of being told wrong 0.6 %",
    ),
    "responses scored ahead": Part(
        (
            Instead(
                foresight,
                "outlook",
                lambda present: lambda *args, **options: replace(present(*args, **options), num_tokens_ahead=None),
            ),
        )
    ),
    "engines that leave ahead": Part(
        (Instead(Forecast, "_switched", _with_nothing_ahead),),
        kept_for="the worst way of being told wrong takes 1.062 times as long as told right without it, with it 1.049",
    ),
    "copies that wait for the longest": Part(_named(outlook, "_unevenness", lambda groups: 0.0)),
    "older sequences where few run": Part(
        _named(
            Forecast,
            "_kv_of_each",
            lambda self, u, aged, speed: np.broadcast_arrays(self._kv_tokens[self._interval(u)], aged, speed[:, None])[
                0
            ],
        )
    ),
    "lots in the order of numbers": Part(
        _named(outlook, "_due_tokens", lambda order, first, ends, own, tokens: np.add.reduceat(tokens[order], first)),
        kinds=(Kind.FIXED,),
    ),
    # What is measured and learned
    "levels from responses": Part(
        _named(lengths_law, "observed", _as_long_as_told), kinds=(*TOLD_RIGHT, Kind.TOLD_WRONG)
    ),
    "levels spread over posteriors": Part(
        _named(lengths_law, "_points", lambda nodes, weights: (nodes * weights).sum(axis=1))
    ),
    "members spread over the law": Part((Instead(lengths_law, "_place_in_group", _middles),)),
    "spreads and hints that responses support": Part(_LAW_AS_TOLD, kinds=(*TOLD_RIGHT, Kind.TOLD_WRONG)),
    "spreads that responses support": Part(
        _named(supported_law, "SPREADS", (1.0,)), kinds=(*TOLD_RIGHT, Kind.TOLD_WRONG)
    ),
    "the spread that hints show": Part(
        _named(supported_law, "variance_of_hints", _no_hints) + _named(opening_order, "variance_of_hints", _no_hints),
        kinds=(*TOLD_RIGHT, Kind.TOLD_WRONG),
        kept_for="told half the spread, iterations take 6 % longer without it on three other seeds",
    ),
    "the trainer's measured rate": Part(
        _named(trainer_rates, "_of_copies_like", lambda *_: ()),
        kinds=(*TOLD_RIGHT, Kind.TOLD_WRONG),
        kept_for="a rate that a job is told may be off by more than the 0.7 and 1.3 that are tried",
    ),
    "minibatches that do not divide": Part(
        _named(trainer_rates, "_slowest_share", lambda copies, num: np.ones(np.shape(copies))),
        kept_for="minibatches that are tried have hundreds of sequences; of few, a copy more has up to half more",
    ),
}
