"""The record of a run with iterations from the simulator, with known costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from simulator.cost_model import Costs, EngineCosts, InferenceCosts, SyncCosts, TrainerCosts
from simulator.happenings import What
from simulator.lengths import LengthSection, draw_lengths
from simulator.workload import Workload
from simulator.world import Placement, World
from tests.component_bench import job_config
from tidegate.megatron.batching import Limits
from tidegate.recorded import Minibatch, RecordedIteration, RecordedRun
from tidegate.types import MinibatchOrder, Role

PROMPT_TOKENS = 5
TRUTH = Costs(
    engine=EngineCosts(
        gpus_per_engine=1,
        max_running=32,
        step_floor_s=0.0,
        step_base_s=4e-3,
        step_per_sequence_s=2e-4,
        step_per_kv_token_s=0.0,
        kv_capacity_tokens=2560,
        prefill_tokens_per_s=1e9,
    ),
    trainer=TrainerCosts(fixed_s=0.11, rate_tokens_per_s=5_000.0, rate_gpus=2),
    inference=InferenceCosts(rate_tokens_per_s=7_000.0),
    sync=SyncCosts(fixed_s=0.6),
)


def recorded_run(
    tmp_path: Path, costs: Costs = TRUTH, *, num_iterations: int = 8, limits: Limits | None = None
) -> RecordedRun:
    """A job of 16 groups of 8 on two nodes. The simulator makes its iterations, with these limits of micro-batches."""
    algorithm = {"prompts_per_iteration": 16, "group_size": 8, "n_minibatches": 4, "iterations": num_iterations}
    config = job_config(tmp_path, algorithm=algorithm, actor={"streams_minibatches": False})
    has = {role: config.placement(role) for role in Role}
    placement = Placement(
        config.cluster.gpus(), has[Role.ROLLOUT], has[Role.INFERENCE], has[Role.ACTOR], config.actor.layout.layout()
    )
    law = LengthSection(median_tokens=9, sigma_prompt=0.7, sigma_group=0.25, min_tokens=1, max_tokens=64)
    rng = np.random.default_rng(1)
    iterations = []
    for _ in range(num_iterations):
        lengths = draw_lengths(law, num_prompts=16, group_size=8, rng=rng)
        workload = Workload(
            lengths, 4, PROMPT_TOKENS, MinibatchOrder.FIXED, streams=False, limits=limits, scores_ahead=True
        )
        iterations.append(iteration_of(World(workload, costs, placement), costs))
    return RecordedRun(config, PROMPT_TOKENS, costs.engine.kv_capacity_tokens, tuple(iterations))


def iteration_of(world: World, costs: Costs) -> RecordedIteration:
    history = list(world.happenings())
    at_s = {what: [each.at_s for each in history if each.what is what] for what in What}
    finished = [each for each in history if each.what is What.MINIBATCH_FINISHED]
    num_tokens = sum(each.count for each in finished)
    lengths = tuple(
        tuple(sequence.generated for sequence in world.rollout.sequences if sequence.group == group)
        for group in range(16)
    )
    return RecordedIteration(
        lengths=lengths,
        seconds=history[-1].at_s,
        generating_s=at_s[What.ROLLOUT_FINISHED][0],
        inferring_s=num_tokens / costs.inference.rate_tokens_per_s,
        minibatches=tuple(
            Minibatch(each.count, each.at_s - began)
            for each, began in zip(finished, at_s[What.MINIBATCH_STARTED], strict=True)
        ),
    )
