"""One iteration on a virtual clock. It takes moves as calls and reports happenings as frozen values.

This is the interface to the deciding side. A run is

    for happening in world.happenings():
        ...            # any of the moves below, which take effect at world.now_s

and ends with ITERATION_FINISHED. Moves correspond to commands of a scheduler:
- `release_engines`, `acquire_engines`: ScaleDown and ScaleUp of the rollout
- `migrate`, `order_queue`
- `resize_inference`, and `resize_trainer` with the target layout
- `hold_training` until an instant, and `wake_at` for another decision

Happenings correspond to events. An adapter makes the scheduler's own values from them and from the state of the
components, and moves from the scheduler's commands. The world chooses no move. It carries moves out by the rules of the
components, which are in `rollout`, `inference` and `training`. Two components never wait for the same free GPU: a move
to a GPU that is promised to another component is refused.

Invariants:
- A GPU has one holder. [test_simulator: every_sequence_ends_once]
- A refused move changes nothing. [test_world: a_refused_move_changes_nothing]
- The same workload, costs, placement, faults and moves give the same history, byte for byte.
  [test_simulator: the_same_moves_give_the_same_history]
- A run that cannot end raises Stalled with the waiting work. [test_world: work_without_gpus_stalls]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from simulator.clock import Clock
from simulator.cost_model import CostLaws
from simulator.engines import Sequence
from simulator.faults import EngineFault, Fault, GpuFault, LateFault, NodeFault
from simulator.gpus import Gpus, Holder, MoveRefused
from simulator.happenings import Happening, Shared, What
from simulator.inference import Inference
from simulator.model import ModelSection
from simulator.noise import EXACT, Noise
from simulator.rollout import Rollout
from simulator.training import Resize, Trainer
from simulator.workload import Workload
from tidegate.types import GpuId, Layout, node_of


class Unfinished(RuntimeError):
    """The iteration cannot end."""


class Stalled(Unfinished):
    """Nothing is due and the iteration has not ended: work waits for GPUs that no move gives it."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The GPUs of each component at the iteration's beginning, all awake. The rest of `cluster` is free."""

    cluster: tuple[GpuId, ...]
    rollout: tuple[GpuId, ...]
    inference: tuple[GpuId, ...] = ()
    actor: tuple[GpuId, ...] = ()
    layout: Layout | None = None
    """The actor's layout. None: it has no GPUs."""


class World:
    """One iteration. MoveRefused: a component cannot have its placement.

    `model` is the model that the trainer's reshards move. None: each reshard takes `costs.switch.reshard_s`.
    """

    def __init__(
        self,
        workload: Workload,
        costs: CostLaws,
        placement: Placement,
        faults: Iterable[Fault] = (),
        model: ModelSection | None = None,
        noise: Noise = EXACT,
    ) -> None:
        self.workload, self.costs = workload, costs
        self.history: list[Happening] = []
        self._clock = Clock()
        self.gpus = Gpus(placement.cluster)
        self._unreported: deque[Happening] = deque()
        self._late: list[LateFault] = []
        self._lost_by: dict[GpuId, list[Fault]] = {}
        """The present faults of each GPU. It is available again after the last one."""
        shared = Shared(self._clock, self.gpus, self._publish, self._freed)
        self._shared = shared
        self.trainer = Trainer(workload, costs, shared, model, noise)
        self.inference = Inference(workload, costs, shared, self._group_inferred)
        self.rollout = self._new_rollout(shared, noise)
        self._check_layout(placement.actor, placement.layout)
        self.rollout.start(placement.rollout)
        self.inference.start(placement.inference)
        self.trainer.start(placement.actor, placement.layout)
        for fault in faults:
            self._clock.schedule(fault.at_s, partial(self._fail, fault))

    @property
    def now_s(self) -> float:
        return self._clock.now_s

    def happenings(self) -> Iterator[Happening]:
        """Each happening at its report, up to the end of the iteration. Stalled: the iteration cannot end."""
        self.rollout.fill()
        while True:
            while self._unreported:
                happening = self._unreported.popleft()
                self.history.append(happening)
                yield happening
                if happening.what is What.ITERATION_FINISHED:
                    return
            if not self._unreported and not self._clock.step():
                raise Stalled(self._stalled())

    @property
    def all_reported(self) -> bool:
        """Whether all happenings of this instant so far are reported."""
        return not self._unreported

    def release_engines(self, names: Iterable[int]) -> None:
        self.rollout.release(names)

    def acquire_engines(self, gpus: Iterable[GpuId], *, cold: bool = False) -> None:
        """Start engines on free GPUs that are promised to no component, `gpus_per_engine` for each, in this order."""
        target = tuple(gpus)
        for gpu in target:
            self._refuse_promised(gpu, self.trainer_promised() | self._inference_promised(), "the rollout")
        self.rollout.acquire(target, cold=cold)

    def migrate(self, sequences: Iterable[int]) -> None:
        self.rollout.migrate(sequences)

    def order_queue(self, sequences: Iterable[int]) -> None:
        self.rollout.order(sequences)

    def resize_inference(self, gpus: Iterable[GpuId]) -> None:
        """Set all GPUs of the inference. A GPU that is not free yet joins when it is."""
        target = tuple(gpus)
        self._refuse_twice(target)
        for gpu in target:
            self._refuse_promised(gpu, self.trainer_promised(), "the inference")
            self._refuse_held(gpu, Holder.INFERENCE, "the inference")
        self.inference.resize(target)

    def resize_trainer(self, gpus: Iterable[GpuId], layout: Layout | None) -> None:
        """Set all GPUs of the trainer in rank order, from the next boundary on. No GPUs and no layout: release all."""
        target = tuple(gpus)
        self._refuse_twice(target)
        self._check_layout(target, layout)
        for gpu in target:
            self._refuse_promised(gpu, self._inference_promised(), "the actor")
            self._refuse_held(gpu, Holder.ACTOR, "the actor")
        self.trainer.resize(Resize(target, layout))

    def hold_training(self, until_s: float) -> None:
        self.trainer.hold(until_s)

    def wake_at(self, at_s: float, number: int = 0) -> None:
        """Report WOKE with this number at `at_s`."""
        self._clock.schedule(at_s, partial(self._shared.report, What.WOKE, number))

    def trainer_promised(self) -> frozenset[GpuId]:
        """The GPUs of a waiting resize of the trainer."""
        waiting = self.trainer.waiting_resize
        return frozenset(waiting.gpus) if waiting else frozenset()

    def promised(self) -> frozenset[GpuId]:
        """The GPUs that a component shall have: it cannot take them yet, or has them already."""
        return self.trainer_promised() | self._inference_promised()

    def may_get(self, gpu: GpuId, to: Holder) -> bool:
        """Whether a resize of the inference or the actor may name the GPU: it is free, will be free, or is its own."""
        others = self.trainer_promised() if to is Holder.INFERENCE else self._inference_promised()
        return gpu not in others and self._comes_free(gpu, to)

    def _inference_promised(self) -> frozenset[GpuId]:
        return frozenset(self.inference.target_gpus)

    def _refuse_twice(self, gpus: tuple[GpuId, ...]) -> None:
        if len(set(gpus)) < len(gpus):
            raise MoveRefused(f"a GPU is named twice in {', '.join(gpus)}: name each once")

    def _refuse_promised(self, gpu: GpuId, promised: frozenset[GpuId], to: str) -> None:
        if gpu in promised:
            raise MoveRefused(
                f"GPU {gpu} is promised to another component and cannot go to {to}: resize that one first"
            )

    def _refuse_held(self, gpu: GpuId, own: Holder, to: str) -> None:
        if not self._comes_free(gpu, own):
            held = self.gpus.holder(gpu)
            raise MoveRefused(f"GPU {gpu} is {held} and cannot go to {to}: it must be released before it is acquired")

    def _comes_free(self, gpu: GpuId, own: Holder) -> bool:
        held, waiting = self.gpus.holder(gpu), self.trainer.waiting_resize
        return (
            held in (Holder.FREE, Holder.LEAVING, own)
            or (held is Holder.INFERENCE and gpu not in self.inference.target_gpus)
            or (held is Holder.ACTOR and waiting is not None and gpu not in waiting.gpus)
        )

    def _check_layout(self, gpus: tuple[GpuId, ...], layout: Layout | None) -> None:
        num_ranks = layout.num_ranks if layout else 0
        if num_ranks != len(gpus):
            raise MoveRefused(f"layout {layout} has {num_ranks} ranks and the actor {len(gpus)} GPUs: give one a rank")

    def _new_rollout(self, shared: Shared, noise: Noise) -> Rollout:
        return Rollout(self.workload, self.costs, shared, self._sequence_ended, noise)

    def _group_inferred(self, group: int, num_tokens: int) -> None:
        self.trainer.add(group, num_tokens)

    def _sequence_ended(self, sequence: Sequence, is_last: bool) -> None:
        self.inference.add(sequence.group, sequence.num_tokens, is_last=is_last)

    def _freed(self) -> None:
        self.inference.go()
        self.trainer.go()

    def _publish(self, happening: Happening) -> None:
        for fault in self._late:
            if fault.what is happening.what:
                self._late.remove(fault)
                reported_s = self.now_s + fault.late_s
                self._clock.schedule(
                    reported_s, partial(self._unreported.append, replace(happening, reported_s=reported_s))
                )
                return
        self._unreported.append(happening)

    def _fail(self, fault: Fault) -> None:
        match fault:
            case LateFault():
                self._late.append(fault)
            case GpuFault(gpu=gpu):
                self._lose(gpu, fault)
                if fault.back_after_s is not None:
                    self._clock.schedule(self.now_s + fault.back_after_s, partial(self._come_back, gpu, fault))
            case NodeFault():
                self._lose_node(fault)
            case EngineFault(engine=name):
                if name in self.rollout.engines:
                    self._free_after_death(self.rollout.kill(name))
                else:
                    self._shared.report(What.FAULT_MISSED, name, len(self.rollout.engines))

    def _lose(self, gpu: GpuId, fault: Fault) -> None:
        self._lost_by.setdefault(gpu, []).append(fault)
        before = self.gpus.lose(gpu, self.now_s)
        if before is Holder.LOST:
            return
        self._shared.report(What.GPU_LOST, gpus=(gpu,))
        match before:
            case Holder.ROLLOUT:
                name = self.rollout.engine_on(gpu)
                others = self.rollout.forget_start(gpu) if name is None else self.rollout.kill(name)
                self._free_after_death(tuple(other for other in others if other != gpu))
            case Holder.ACTOR:
                self.trainer.lose(gpu, self.gpus.held_by(Holder.ACTOR))
        self.inference.lose(gpu)
        self.trainer.drop_waiting(gpu)

    def _lose_node(self, fault: NodeFault) -> None:
        gpus = tuple(gpu for gpu in self.gpus.cluster if node_of(gpu) == fault.node)
        self._shared.report(What.NODE_LOST, gpus=gpus)
        for gpu in gpus:
            self._lose(gpu, fault)
        if fault.back_after_s is not None:
            self._clock.schedule(self.now_s + fault.back_after_s, partial(self._node_comes_back, gpus, fault))

    def _node_comes_back(self, gpus: tuple[GpuId, ...], fault: NodeFault) -> None:
        self._shared.report(What.NODE_BACK, gpus=gpus)
        for gpu in gpus:
            self._come_back(gpu, fault)

    def _come_back(self, gpu: GpuId, fault: Fault) -> None:
        """Free the GPU, unless another fault still holds it lost."""
        self._lost_by[gpu].remove(fault)
        if not self._lost_by[gpu]:
            self.gpus.move([gpu], Holder.LOST, Holder.FREE, self.now_s)
            self._shared.report(What.GPUS_FREED, gpus=(gpu,))
            self._freed()

    def _free_after_death(self, gpus: tuple[GpuId, ...]) -> None:
        self.gpus.move(gpus, Holder.ROLLOUT, Holder.LEAVING, self.now_s)
        self._clock.schedule(self.now_s + self.costs.switch.detect_s, partial(self.rollout.free, gpus))

    def _stalled(self) -> str:
        rollout, inference, trainer = self.rollout, self.inference, self.trainer
        return (
            f"after {self.now_s:.1f} s nothing is due and the iteration has not ended: "
            f"{rollout.num_unfinished} sequences are unfinished on {len(rollout.engines)} engines, "
            f"{len(inference.backlog)} groups wait for {len(inference.gpus)} inference GPUs, {len(trainer.ready)} for "
            f"{len(trainer.gpus)} GPUs of the trainer, which has made {trainer.minibatch} optimizer steps; "
            f"{len(self.gpus.held_by(Holder.FREE))} GPUs are free: a move must give them to a component with work"
        )
