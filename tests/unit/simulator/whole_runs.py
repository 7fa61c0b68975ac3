"""Properties of every simulated run that ends."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from simulator.happenings import What
from simulator.run import Run
from simulator.scenario import Scenario


def numbers_of(run: Run, what: What) -> list[int]:
    return [happening.number for happening in run.history if happening.what is what]


def check_whole(run: Run, scenario: Scenario) -> None:
    """Each sample is trained once, and each GPU's time is accounted for."""
    own = scenario.algorithm
    want = own.prompts_per_iteration * own.group_size
    assert (run.num_samples, run.num_lost) == (want, 0)
    assert Counter(numbers_of(run, What.SEQUENCE_FINISHED)) == Counter(range(want))
    for spans in run.timeline.values():
        assert spans[0].start_s == 0
        assert spans[-1].end_s == run.iteration_s
        assert all(each.end_s == after.start_s for each, after in pairwise(spans))
        assert all(each.state is not after.state for each, after in pairwise(spans))
