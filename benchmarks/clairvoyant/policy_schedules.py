"""The run of a policy as a schedule, at which a search begins.

A schedule has fewer moves than a policy may make, so it may take longer than the run, or less.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.clairvoyant.orders import Order
from benchmarks.clairvoyant.schedules import Schedule, in_parts
from simulator.happenings import What
from simulator.iteration import SimulatedIteration
from simulator.outcome import Run
from tidegate.types import MinibatchOrder


def as_schedule(run: Run, simulated: SimulatedIteration) -> Schedule:
    """The schedule of a policy's run: the GPUs of trainer and inference at the beginning of each minibatch.

    It leaves out the policy's order of prompts.
    """
    with_trainer = [each for each in run.decisions if each.assignment.trainer is not None]
    begins = [each.at_s for each in run.history if each.what is What.MINIBATCH_STARTED]
    trainer, inference = [], []
    for at_s in begins[: simulated.spec.num_minibatches]:
        latest = [each for each in with_trainer if each.at_s <= at_s][-1].assignment
        assert latest.trainer is not None, "the list has only assignments with a trainer"
        trainer.append(len(latest.trainer.gpus))
        inference.append(max(1, len(latest.inference)))
    start_s = with_trainer[0].at_s
    over_s, inferred_s = (min(_times(run, what)) for what in (What.ROLLOUT_FINISHED, What.INFERENCE_FINISHED))
    ahead = [each for each in run.decisions if each.assignment.inference and each.at_s < min(start_s, over_s)]
    if ahead:
        inference[0] = len(ahead[-1].assignment.inference)
    return Schedule(
        # A start after the inference comes with its end, whenever that is.
        start_s if start_s < inferred_s else run.iteration_s,
        tuple(trainer),
        in_parts(tuple(inference)),
        infer_s=ahead[0].at_s if ahead else None,
    )


def _times(run: Run, what: What) -> list[float]:
    return [each.at_s for each in run.history if each.what is what]


def begins_of(run: Run, name: str, simulated: SimulatedIteration) -> Iterator[tuple[Schedule, Order, str]]:
    """The schedule of a policy's run, with the orders that policies have."""
    schedule, plain = as_schedule(run, simulated), Order(sorts_members=False)
    longest = replace(plain, share=0.0)
    if simulated.spec.minibatch_order is MinibatchOrder.FIXED:
        yield schedule, replace(longest, by_minibatch=True), name
        yield schedule, longest, name
    else:
        yield schedule, longest if schedule.start_s >= run.iteration_s else plain, name
