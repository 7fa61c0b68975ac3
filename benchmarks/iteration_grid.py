"""The grid of physics over which the policies are compared: one GRPO iteration on 64 GPUs, in `CELLS`.

The base cell is `examples/scenarios/grpo_7b_64gpu.yaml` as it is: a 7B model on H100, times computed. Each other cell
has other values of the physics, of the lengths or of the job, one assumption at a time, and the last ones several at
once. The values are the ends of public ranges (`P`), or ours (`A`). Policies know the law and the rates of their cell.

Each cell has seeds of its own, on which nothing was chosen. `best_split` is searched in each cell, with its values, on
further seeds. A cell whose model has no room is refused with the numbers when it is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.contenders import ROOFLINE, compared, ratios, rivals
from benchmarks.report import spread
from simulator.policies import Contender
from simulator.scenario import Scenario, load_scenario

FIRST_SEED = 1000
SEEDS = 5
"""Of each cell. From seed to seed the ratio of two policies varies by 1.6 %: the median of two tells nothing of 1 %."""
FIXED = ("algorithm.minibatch_order=fixed",)

# P: 6N of the peak, 0.10 to 0.15 badly packed and 0.39 to 0.46 well packed; the log-probabilities are 0.2 to 0.35 of it
SLOW_TRAINER = ("physics.trainer.kernel_efficiency=0.23", "physics.trainer.inference_efficiency=0.2")
FAST_TRAINER = ("physics.trainer.kernel_efficiency=0.8", "physics.trainer.inference_efficiency=0.6")
# P: twice the GPUs train 1.5 to 1.85 times as fast; from 32 to 64 it is 1.7 here. A: the two values that do it
BAD_SCALING = ("physics.trainer.straggler_micro_batches=6", "physics.trainer.update_s=10")
# P: log-probabilities take 0.7 of the training in a poor implementation
DEAR_INFERENCE = ("physics.trainer.inference_efficiency=0.125",)
# P: weights are read at 44 to 77 % of the bandwidth, and the host adds up to 2 ms to a step
SLOW_DECODING = (
    "physics.decode.weight_bandwidth_share=0.5",
    "physics.decode.kv_bandwidth_share=0.7",
    "physics.decode.host_s=0.002",
)
# P: engines beside a trainer have 0.4 to 0.7 of the memory
SMALL_CACHE = ("physics.decode.memory_share=0.4",)
# P: an engine moves in 2 to 10 s, a trainer in 0.5 to 3 s and up to 5 s more for new communicators
DEAR_MOVES = (
    "physics.moves.sleep_s=5",
    "physics.moves.wake_s=5",
    "physics.moves.trainer_wake_s=10",
    "costs.switch.reshard_setup_s=1.5",
    "costs.switch.communicators_s=5",
)
CHEAP_MOVES = (
    "physics.moves.sleep_s=1",
    "physics.moves.wake_s=0.5",
    "physics.moves.trainer_wake_s=2",
    "costs.switch.reshard_setup_s=0.2",
    "costs.switch.communicators_s=0.03",
)
# A: fresh prompts, whose hints tell nothing, and are told so
NO_HINTS = ("lengths.hint_sigma=3",)
NOISY_HINTS = ("lengths.hint_sigma=0.45",)
# P: 55 to 70 % of the variance is between prompts; it is 80 % in the base cell
WIDE_GROUPS = ("lengths.sigma_prompt=0.45", "lengths.sigma_group=0.35")
# A: a tenth between engines, between steps and between portions
NOISE = ("noise.engine_sigma=0.1", "noise.step_sigma=0.1", "noise.portion_sigma=0.1")
SHORT = ("lengths.median_tokens=2000", "lengths.max_tokens=8192")
LONG = ("lengths.median_tokens=12000",)
# P: instruct models' longest responses are 5 to 20 times their mean
LONG_TAILS = ("lengths.law=long_tailed", "lengths.median_tokens=3000")
COMPLETE = ("algorithm.streams=false",)
H20, H800 = ("physics.hardware=H20",), ("physics.hardware=H800",)
# P: the rollout's TP of 32B is 4 in DynaRL, the trainer's is 8
MODEL_32B = (
    "physics.model=Qwen2.5-32B",
    "costs.engine.gpus_per_engine=4",
    "actor_layout.tp=8",
    "actor_layout.dp=2",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """`is_fixed`: minibatches have fixed groups, and count for the figures of the fixed order only."""

    name: str
    overrides: Sequence[str]
    seeds: Sequence[int]
    is_fixed: bool = False

    def scenario(self) -> Scenario:
        return load_scenario(ROOFLINE, self.overrides)


_ARRIVAL: Mapping[str, Sequence[str]] = {
    "base": (),
    "slow trainer": SLOW_TRAINER,
    "fast trainer": FAST_TRAINER,
    "a trainer that scales badly": BAD_SCALING,
    "dear log-probabilities": DEAR_INFERENCE,
    "slow decoding": SLOW_DECODING,
    "small cache": SMALL_CACHE,
    "dear moves": DEAR_MOVES,
    "cheap moves": CHEAP_MOVES,
    "no hints": NO_HINTS,
    "wide groups": WIDE_GROUPS,
    "noise": NOISE,
    "short lengths": SHORT,
    "long lengths": LONG,
    "long tails": LONG_TAILS,
    "complete minibatches": COMPLETE,
    "H20": H20,
    "32B": MODEL_32B,
    "hard to plan: slow trainer, dear moves, no hints, wide groups, noise": (
        *SLOW_TRAINER,
        *DEAR_MOVES,
        *NO_HINTS,
        *WIDE_GROUPS,
        *NOISE,
    ),
    "kind to moves: fast trainer that scales badly, slow decoding, cheap moves": (
        *FAST_TRAINER,
        *BAD_SCALING,
        *SLOW_DECODING,
        *CHEAP_MOVES,
    ),
    "H800, noisy hints, noise, small cache, dear log-probabilities": (
        *H800,
        *NOISY_HINTS,
        *NOISE,
        *SMALL_CACHE,
        *DEAR_INFERENCE,
    ),
}
_FIXED: Mapping[str, Sequence[str]] = {
    "base": (),
    "fast trainer": FAST_TRAINER,
    "slow decoding": SLOW_DECODING,
    "dear moves, no hints, noise": (*DEAR_MOVES, *NO_HINTS, *NOISE),
}


def _cells() -> tuple[Cell, ...]:
    """The base cell has the first seeds, and each later cell the next ones."""
    named = [(name, words, False) for name, words in _ARRIVAL.items()]
    named += [(f"fixed order: {name}", (*FIXED, *words), True) for name, words in _FIXED.items()]
    cells, first = [], FIRST_SEED
    for name, words, is_fixed in named:
        cells.append(Cell(name, words, range(first, first + SEEDS), is_fixed))
        first += SEEDS
    return tuple(cells)


CELLS = _cells()
BASE = CELLS[0]


def case_of(cell: Cell, seeds: Sequence[int], among: Mapping[str, Contender]) -> dict[str, Any]:
    """`among`: the contenders in this cell."""
    rows = [compared(among, seed, directly=True) for seed in seeds]
    return case_from(cell, seeds, rows, split=among["best_split"].note)


def case_from(cell: Cell, seeds: Sequence[int], rows: Sequence[Mapping[str, float]], *, split: str) -> dict[str, Any]:
    """Medians of the seconds over the seeds, and each ratio by seed. `rows`: the seconds by seed; `split`: the best
    one."""
    medians = {name: median(row[name] for row in rows) for name in rows[0]}
    by_seed = [ratios(row) for row in rows]
    return {
        "case": cell.name,
        "is_fixed": cell.is_fixed,
        "seeds": list(seeds),
        **{f"{name}_s": seconds for name, seconds in medians.items()},
        "by_seed_s": {name: [row[name] for row in rows] for name in rows[0]},
        "split": split,
        "best_other": min(rivals(medians), key=medians.__getitem__),
        **{key: [row[key] for row in by_seed] for key in by_seed[0]},
    }


def figures_of(cases: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Medians over the cells of their medians over seeds; `_min` and `_max` are the range over both.

    `worst_cell_vs_best_other` is over all cells, those of the fixed order included.
    """
    streamed, fixed = ([case for case in cases if case["is_fixed"] == is_fixed] for is_fixed in (False, True))
    keys = [key for key in cases[0] if key.startswith(("tide_vs_", "best_schedule_vs_", "bound_vs_"))]
    figures: dict[str, float] = {}
    for group, suffix in ((streamed, ""), (fixed, "_fixed")):
        for key in keys if group else ():
            found = spread([value for case in group for value in case[key]])
            own = key + suffix
            figures |= {own: median(median(case[key]) for case in group)}
            figures |= {f"{own}_min": found["min"], f"{own}_max": found["max"]}
    return figures | {"worst_cell_vs_best_other": min(median(case["tide_vs_best_other"]) for case in cases)}
