"""Situations as a policy sees them, from a job's GPU counts and how far its iteration is."""

from __future__ import annotations

from services.scheduler.policy.situation import (
    Costs,
    DecodeStep,
    Engine,
    Group,
    GroupStage,
    Inference,
    Sequence,
    Situation,
    Trainer,
    TrainerRate,
    placed_gpus,
)
from services.scheduler.remembered import Assignment, Remembered
from services.scheduler.values import JobSpec, Placed
from tests.unit.scheduler.fake_cluster import gpu
from tidegate.types import GpuId, Layout, Role

COSTS = Costs(
    decode=DecodeStep(floor_s=0.01, base_s=0.0, per_sequence_s=0.0, per_kv_token_s=0.0),
    release_s=2.0,
    acquire_s=1.5,
    resubmit_s=1.0,
    prefill_tokens_per_s=1e12,
    reshard_s=1.0,
    load_s=5.0,
    inference_start_s=2.0,
)


def gpus(start: int, end: int) -> tuple[GpuId, ...]:
    return tuple(gpu("n0", index) for index in range(start, end))


def job(
    *,
    actor: int,
    rollout: int,
    inference: int,
    actor_tp: int = 1,
    rollout_tp: int = 1,
    prompts: int,
    group_size: int = 1,
    minibatches: int,
) -> JobSpec:
    """Placed as RLinf wants it: actor, rollout, inference, from GPU 0."""
    return JobSpec(
        placement={
            Role.ACTOR: Placed(gpus(0, actor), Layout(tp=actor_tp, dp=actor // actor_tp)),
            Role.ROLLOUT: Placed(gpus(actor, actor + rollout), Layout(tp=rollout_tp, dp=rollout // rollout_tp)),
            Role.INFERENCE: Placed(gpus(actor + rollout, actor + rollout + inference), Layout(dp=inference)),
        },
        num_iterations=2,
        num_prompts=prompts,
        group_size=group_size,
        num_minibatches=minibatches,
        seed=7,
        uses_reference=False,
        max_actor_restarts=3,
        command_deadline_ms=1000,
    )


def groups_of(
    spec: JobSpec, *, num_engines: int, num_unfinished: int, num_unsubmitted: int, stage: GroupStage, length: int
) -> tuple[Group, ...]:
    """The last sequences are unfinished, half as long as the others; the very last have no engine."""
    size = spec.group_size
    first = spec.num_prompts * size - num_unfinished
    groups = []
    for prompt in range(spec.num_prompts):
        members = range(prompt * size, (prompt + 1) * size)
        unfinished = tuple(
            Sequence(length // 2, None if index - first >= num_unfinished - num_unsubmitted else index % num_engines)
            for index in members
            if index >= first
        )
        finished = (length,) * (size - len(unfinished))
        groups.append(Group(GroupStage.GENERATING if unfinished else stage, finished, unfinished))
    return tuple(groups)


def seen(
    spec: JobSpec,
    assignment: Assignment,
    *,
    num_unfinished: int = 0,
    num_unsubmitted: int = 0,
    num_done: int = 0,
    is_at_boundary: bool = True,
    stage: GroupStage = GroupStage.INFERRED,
    groups: tuple[Group, ...] | None = None,
    length: int = 100,
    kv_use: float = 0.1,
    max_running: int = 1024,
    measured: tuple[TrainerRate, ...] = (),
    moving: tuple[GpuId, ...] = (),
    remembered: Remembered | None = None,
    now_ms: int = 0,
) -> Situation:
    """`assignment` is where everything is; what it leaves out is free, or on its way. `stage`: of finished groups."""
    shown = groups or groups_of(
        spec,
        num_engines=len(assignment.engines),
        num_unfinished=num_unfinished,
        num_unsubmitted=num_unsubmitted,
        stage=stage,
        length=length,
    )
    held = [each.engine for group in shown for each in group.unfinished]
    taken = {*assignment.gpus, *moving}
    return Situation(
        now_ms=now_ms,
        incarnation=0,
        iteration=0,
        spec=spec,
        engines=tuple(
            Engine(each, held.count(index), 0, round(kv_use * 1000), 1000, max_running, 50.0)
            for index, each in enumerate(assignment.engines)
        ),
        groups=shown,
        trainer=Trainer(assignment.trainer, num_done, is_at_boundary, measured),
        inference=Inference(assignment.inference, 1e9),
        free=tuple(each for each in placed_gpus(spec) if each not in taken),
        moving=moving,
        costs=COSTS,
        remembered=remembered or Remembered(iteration=0, assignment=assignment, is_begun=True, num_answered=num_done),
    )
