"""How a trainer and a rollout that runs ahead of it share the GPUs of a job, by what they measured. Pure.

Where the rollout runs ahead, the stages work side by side all the time. An iteration takes as long as its slowest
stage:

    rollout    tokens / rollout_tokens_s(engines)
    inference  tokens / (inference_tokens_per_gpu_s * GPUs)
    trainer    fixed_s + tokens / trainer_tokens_s(copies)

The rollout's sequences divide over its engines, and a decode step gives each running one a token:

    rollout_tokens_s(engines)  engines * b / step_s(b)
    b                          sequences / engines, and at most max_running

So more engines gain little where a step takes as long with half the sequences.

The fastest split is where they are equal. It moves when responses grow over a training, and when what was assumed of
the rates was wrong. A move has to gain `MIN_GAIN` and to pay for itself in the iterations that are left.

Invariants:
- A split uses no more GPUs than there are, and leaves no stage without any. [test_balance: every_stage_has_gpus]
- Rates as they were told move nothing. [test_balance: the_best_split_stays]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from services.scheduler.state.costs import DecodeStep

MIN_GAIN = 0.03
"""The least part of an iteration's time that a move has to save. Measurements of one iteration differ by as much."""


@dataclass(frozen=True, slots=True)
class Split:
    """The rollout's engines, the trainer's data-parallel copies, and the inference's GPUs."""

    engines: int
    copies: int
    inference: int

    def __str__(self) -> str:
        return f"{self.engines} engines, {self.copies} copies, {self.inference} inference GPUs"


@dataclass(frozen=True, slots=True)
class Sizes:
    """GPUs: of the job, of one engine, of one copy, of one scorer of the inference. `fewest_copies`: those that have
    room for the model. `most_copies`: those that a minibatch divides over."""

    num_gpus: int
    engine: int
    copy: int
    most_copies: int
    fewest_copies: int = 1
    scorer: int = 1

    def splits(self) -> Iterator[Split]:
        """Every split, with all GPUs that make whole engines in the rollout."""
        for copies in range(self.fewest_copies, min(self.most_copies, self.num_gpus // self.copy) + 1):
            for inference in range(self.scorer, self.num_gpus - copies * self.copy, self.scorer):
                if engines := (self.num_gpus - copies * self.copy - inference) // self.engine:
                    yield Split(engines, copies, inference)


@dataclass(frozen=True, slots=True)
class Flow:
    """The work of an iteration in tokens of responses, and the measured rates."""

    num_tokens: float
    rollout_tokens_s: Callable[[int], float]
    inference_tokens_per_gpu_s: float
    trainer_tokens_s: Callable[[int], float]
    fixed_s: float

    def seconds(self, split: Split, sizes: Sizes) -> float:
        """The time of an iteration."""
        return max(
            self.num_tokens / self.rollout_tokens_s(split.engines),
            self.num_tokens / (self.inference_tokens_per_gpu_s * split.inference),
            self.fixed_s + self.num_tokens / self.trainer_tokens_s(split.copies),
        )


@dataclass(frozen=True, slots=True)
class Generating:
    """The rollout's speed by its number of engines.

    `sequences`: how many may run at once, in the mean over an iteration. `kv_tokens`: of one of them. `factor`: the
    measured speed over that of the formula.
    """

    decode: DecodeStep
    sequences: float
    kv_tokens: float
    max_running: int
    factor: float = 1.0

    def tokens_s(self, engines: int) -> float:
        running = min(self.sequences / engines, self.max_running)
        step_s = self.decode.seconds(num_running=running, num_kv_tokens=running * self.kv_tokens)
        return self.factor * engines * running / step_s


def best_split(flow: Flow, sizes: Sizes) -> Split:
    """The fastest split; of equal ones the one with the most engines. ValueError: the GPUs make none."""
    found = min(
        sizes.splits(), key=lambda each: (flow.seconds(each, sizes), -each.engines, -each.inference), default=None
    )
    if found is None:
        raise ValueError(
            f"{sizes.num_gpus} GPUs are too few for an engine of {sizes.engine}, a copy of {sizes.copy} and an "
            "inference GPU: give the job more"
        )
    return found


def balanced(now: Split, flow: Flow, sizes: Sizes, *, iterations_left: int, move_s: float) -> Split:
    """The split of the next iterations. `move_s`: what a change of the split costs."""
    best = best_split(flow, sizes)
    now_s, best_s = flow.seconds(now, sizes), flow.seconds(best, sizes)
    saved_s = now_s - best_s
    if saved_s < MIN_GAIN * now_s or saved_s * iterations_left <= move_s:
        return now
    return best
