"""Situations as a policy sees them, from a job's GPU counts and how far its iteration is."""

from __future__ import annotations

from services.scheduler.policy.situation import Choice, Inference, Situation, Trainer
from services.scheduler.state.costs import Costs, DecodeStep, LengthLaw
from services.scheduler.state.layouts import placed_gpus
from services.scheduler.state.observed import ENDED, QUEUED, Engine, Generation, Inferring, TrainerRate, Training
from services.scheduler.state.remembered import Assignment, Remembered
from services.scheduler.state.values import JobSpec, Placed
from tests.unit.scheduler.fake_parts import gpu
from tidegate.types import GpuId, Layout, Role

COSTS = Costs(
    decode=DecodeStep(floor_s=0.01, base_s=0.0, per_sequence_s=0.0, per_kv_token_s=0.0),
    update_s=0.0,
    release_s=2.0,
    acquire_s=1.5,
    resubmit_s=1.0,
    prefill_tokens_per_s=1e12,
    reshard_s=1.0,
    load_s=5.0,
    inference_start_s=2.0,
)

LENGTHS = LengthLaw(log_mean=4.6, sigma_prompt=0.5, sigma_group=0.25, sigma_hint=0.3)


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
    """A job in the placement that RLinf needs: actor, rollout, inference, from GPU 0."""
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


def generation(
    spec: JobSpec,
    engines: tuple[tuple[GpuId, ...], ...],
    *,
    lengths: tuple[int, ...],
    places: tuple[int, ...],
    kv_use: float = 0.1,
    max_running: int = 1024,
) -> Generation:
    """A picture of the rollout. All sequences of an engine run, and the queue is in the order of the prompts."""
    return Generation(
        engines=tuple(
            Engine(each, places.count(index), 0, round(kv_use * 1000), 1000, max_running, 50.0)
            for index, each in enumerate(engines)
        ),
        group_size=spec.group_size,
        lengths=lengths,
        places=places,
        queue=tuple(index for index, place in enumerate(places) if place == QUEUED),
    )


def ending(
    spec: JobSpec, *, num_engines: int, num_unfinished: int, num_unsubmitted: int, length: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Lengths and places. The last sequences are unfinished and half as long as the others. Some are queued."""
    count = spec.num_prompts * spec.group_size
    first, first_queued = count - num_unfinished, count - num_unsubmitted
    lengths = tuple(length if index < first else length // 2 for index in range(count))
    running = tuple(index % num_engines for index in range(first, first_queued))
    return lengths, ((ENDED,) * first + running + (QUEUED,) * num_unsubmitted)


def seen(
    spec: JobSpec,
    assignment: Assignment,
    *,
    num_unfinished: int = 0,
    num_unsubmitted: int = 0,
    picture: Generation | None = None,
    are_inferred: bool = True,
    ready: tuple[int, ...] | None = None,
    num_done: int = 0,
    num_taken: int = 0,
    is_at_boundary: bool = True,
    measured: tuple[TrainerRate, ...] = (),
    length: int = 100,
    kv_use: float = 0.1,
    max_running: int = 1024,
    moving: tuple[GpuId, ...] = (),
    remembered: Remembered | None = None,
    now_ms: int = 0,
) -> Situation:
    """A situation in which components are where `assignment` places them. Other GPUs are free or `moving`.
    `are_inferred`: the finished groups are inferred, unless `ready` names the groups."""
    if picture is None:
        lengths, places = ending(
            spec,
            num_engines=len(assignment.engines),
            num_unfinished=num_unfinished,
            num_unsubmitted=num_unsubmitted,
            length=length,
        )
        picture = generation(
            spec, assignment.engines, lengths=lengths, places=places, kv_use=kv_use, max_running=max_running
        )
    if ready is None:
        finished = (group for group, num in enumerate(picture.unfinished_by_group.tolist()) if num == 0)
        ready = tuple(finished) if are_inferred else ()
    taken = {*assignment.gpus, *moving}
    training = Training(num_done, num_taken, is_at_boundary, closes_at_ms=None, measured=measured)
    return Situation(
        now_ms=now_ms,
        incarnation=0,
        iteration=0,
        spec=spec,
        generation=picture,
        inference=Inference(assignment.inference, 1e9, Inferring(ready)),
        trainer=Trainer(assignment.trainer, training),
        free=tuple(each for each in placed_gpus(spec) if each not in taken),
        moving=moving,
        costs=COSTS,
        lengths=LENGTHS,
        remembered=remembered or Remembered(iteration=0, assignment=assignment),
    )


def after(choice: Choice) -> Remembered:
    """The memory after a choice in the iteration of `seen`."""
    return Remembered(iteration=0, assignment=choice.assignment, trains=choice.trains, own=choice.memory)
