"""Rollouts under the ways to share responses among engines that Seer compares (arXiv 2511.14617).

- `pinned`: each group goes whole to one engine, in turn, and stays there. Engines that have ended stay idle.
- `divided`: each response waits in one queue for the next free engine, and one that must leave an engine goes on
  elsewhere. It is how every rollout of this simulator runs.
- `probed`: as `divided`, one response of each group before all others. Then the groups whose finished responses are
  longest come first; a group without a finished one counts as longer than all others. No hints are needed.

A way sees a length when its response has ended, and no sooner.

Invariants:
- Every response ends with its tokens, whatever the way. [test_probing: every_response_ends]
- The same lengths give the same seconds. [test_probing: the_same_lengths]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from simulator.generation import rollout_world
from simulator.happenings import What
from simulator.lengths import Lengths
from simulator.scenario import Scenario
from simulator.world import World


def pinned_s(scenario: Scenario, lengths: Lengths) -> float:
    """Seconds until the last engine has ended."""
    gpus, size = scenario.cluster.gpus(), scenario.costs.engine.gpus_per_engine
    num_engines = len(gpus) // size
    ends_s = [0.0]
    for engine in range(num_engines):
        own = Lengths(lengths.turns[engine::num_engines], lengths.hints[engine::num_engines])
        if own.turns:
            world = rollout_world(scenario, own, gpus[engine * size : (engine + 1) * size])
            for _ in _ends(world):
                pass
            ends_s.append(world.now_s)
    return max(ends_s)


def divided_s(scenario: Scenario, lengths: Lengths) -> float:
    """Seconds until the last response has ended."""
    world = rollout_world(scenario, lengths)
    for _ in _ends(world):
        pass
    return world.now_s


def probed_s(scenario: Scenario, lengths: Lengths) -> float:
    """Seconds until the last response has ended."""
    world = rollout_world(scenario, lengths)
    size = len(lengths.turns[0])
    longest: dict[int, int] = {}
    world.order_queue(_order(longest, len(lengths.turns), size))
    for number, tokens in _ends(world):
        group = number // size
        if tokens > longest.get(group, 0):
            is_first, longest[group] = group not in longest, tokens
            # The first length of a group says most of it: its later ones would sort the queue a dozen times as often.
            if is_first and world.rollout.waiting:
                world.order_queue(_order(longest, len(lengths.turns), size))
    return world.now_s


def _order(longest: Mapping[int, int], num_groups: int, size: int) -> list[int]:
    """All responses: one of each group, then the others of the groups that look longest. `longest`: by group, the
    tokens of its longest finished response."""
    unknown = max(longest.values(), default=0) + 1
    groups = sorted(range(num_groups), key=lambda group: -longest.get(group, unknown))
    probes = [group * size for group in range(num_groups)]
    return [*probes, *(group * size + member for group in groups for member in range(1, size))]


def _ends(world: World) -> Iterator[tuple[int, int]]:
    """Each response that ends, and its tokens, until all have ended."""
    for happening in world.happenings():
        if happening.what is What.SEQUENCE_FINISHED:
            yield happening.number, happening.count
        if happening.what is What.ROLLOUT_FINISHED:
            return


WAYS: Mapping[str, Callable[[Scenario, Lengths], float]] = {
    "pinned": pinned_s,
    "divided": divided_s,
    "probed": probed_s,
}
"""The seconds of a rollout by the way in which responses are shared."""
