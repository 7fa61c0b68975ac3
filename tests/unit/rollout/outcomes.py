"""What tests of the rollout's lead ask about an iteration, whichever engines made it, and the release of engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tests.component_bench import JOB, Bench, task_of
from tests.unit.rollout.fake_engines import RolloutBench, response
from tidegate.codec import decode_sample_id, encode_grants, encode_layout, fate_of
from tidegate.ports.bus import Stage
from tidegate.types import Grant, Layout, SampleId
from tidegate.v1 import commands_pb2
from tidegate.v1 import workers_pb2 as wire


async def groups_on_stream(of: Bench[Any, Any], *, incarnation: int = 1, iteration: int = 0) -> list[Any]:
    """The groups of an iteration on the stream, in the order of prompts. None is acknowledged."""

    async def never(letter: object) -> None:
        raise AssertionError(f"dead letter {letter}")

    consumer = await of.bus.samples.consumer(JOB, Stage.GENERATED, "reader", on_dead_letter=never)
    groups = [delivery.group for delivery in await consumer.fetch(100, timeout_s=0)]
    mine = [group for group in groups if (group.incarnation, group.iteration) == (incarnation, iteration)]
    return sorted(mine, key=lambda group: group.prompt)


def all_ids(of: RolloutBench, *, incarnation: int = 1, iteration: int = 0) -> list[SampleId]:
    algorithm = of.config.algorithm
    first = iteration * algorithm.prompts_per_iteration
    return [
        SampleId(incarnation, iteration, prompt, draw)
        for prompt in range(first, first + algorithm.prompts_per_iteration)
        for draw in range(algorithm.group_size)
    ]


async def assert_whole_iteration(of: RolloutBench, *, version: int = 0, iteration: int = 0) -> None:
    """Check that each group is there once, that each response follows from its seed, and that the report matches."""
    report = (await of.published("iteration_reported"))[-1]
    groups = await groups_on_stream(of, iteration=iteration)
    ids = [decode_sample_id(sample.id) for group in groups for sample in group.samples]
    assert ids == all_ids(of, iteration=iteration)
    assert report.iteration_reported.generated == fate_of(ids)
    job = of.leads[-1].job
    for group in groups:
        assert group.version == version
        assert list(group.prompt_tokens) == job.tokenizer.encode_prompt(task_of(job).prompt(group.prompt).text)
        for sample in group.samples:
            seed = job.sampling_seed(decode_sample_id(sample.id))
            want = response(job, wire.GenerationRequest(id=sample.id, seed=seed), version=version)
            text = job.tokenizer.decode_response(want.response_tokens)
            want.reward = task_of(job).reward(task_of(job).prompt(group.prompt), text)
            want.rewards["countdown"] = want.reward
            assert sample == want


def scale_down(
    of: Bench[Any, Any], grants: Sequence[Grant], members: Sequence[Grant] = ()
) -> commands_pb2.ScaleDownRequest:
    return commands_pb2.ScaleDownRequest(
        header=of.header(transition="leave"),
        grants=encode_grants(grants),
        members=encode_grants(members),
        layout=encode_layout(Layout(dp=len(members))) if members else None,
    )
