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
components, which are in `rollout`, `inference` and `training`. Faults are in `striking`. Two components never wait for
the same free GPU: a move to a GPU that is promised to another component is refused.

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
from dataclasses import dataclass
from functools import partial

from simulator.clock import Clock
from simulator.cost_model import CostLaws
from simulator.engines import Sequence
from simulator.faults import Fault, Outage
from simulator.gpus import Gpus, Holder, MoveRefused
from simulator.happenings import Happening, Shared, What
from simulator.inference import Inference
from simulator.model import ModelSection
from simulator.noise import EXACT, Noise
from simulator.rollout import Rollout
from simulator.striking import Stages, Striking
from simulator.training import Resize, Trainer
from simulator.workload import Workload
from tidegate.types import GpuId, Layout


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


@dataclass(frozen=True, slots=True)
class Opening:
    """The instant at which an iteration begins, and the outages of earlier iterations that last until then."""

    at_s: float = 0.0
    outages: tuple[Outage, ...] = ()


AT_START = Opening()


class World:
    """One iteration. MoveRefused: a component cannot have its placement.

    `faults` have times of the job. A fault whose time is over strikes at the beginning. `model` is the model that the
    trainer's reshards move. None: each reshard takes `costs.switch.reshard_s`.
    """

    def __init__(
        self,
        workload: Workload,
        costs: CostLaws,
        placement: Placement,
        faults: Iterable[Fault] = (),
        model: ModelSection | None = None,
        noise: Noise = EXACT,
        opening: Opening = AT_START,
    ) -> None:
        self.workload, self.costs, self.began_s = workload, costs, opening.at_s
        self.history: list[Happening] = []
        self._clock = Clock(opening.at_s)
        self.gpus = Gpus(placement.cluster, opening.at_s)
        self._unreported: deque[Happening] = deque()
        shared = Shared(self._clock, self.gpus, self._publish, self._freed)
        self._shared = shared
        self._striking = Striking(faults, costs, shared, self._unreported.append)
        self.trainer = Trainer(workload, costs, shared, model, noise)
        self.inference = Inference(workload, costs, shared, self._group_inferred)
        self.rollout = self._new_rollout(shared, noise)
        self._check_layout(placement.actor, placement.layout)
        self._striking.go_on(opening.outages)
        self.rollout.start(placement.rollout)
        self.inference.start(placement.inference)
        self.trainer.start(placement.actor, placement.layout)
        self._striking.strike_on(Stages(self.rollout, self.inference, self.trainer))

    @property
    def pending_faults(self) -> tuple[Fault, ...]:
        """The faults that have had no effect yet."""
        return self._striking.pending

    @property
    def outages(self) -> tuple[Outage, ...]:
        """What is lost now, in the order of the losses."""
        return tuple(self._striking.outages)

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
        if not self._striking.delays(happening):
            self._unreported.append(happening)

    def _stalled(self) -> str:
        rollout, inference, trainer = self.rollout, self.inference, self.trainer
        return (
            f"after {self.now_s:.1f} s nothing is due and the iteration has not ended: "
            f"{rollout.num_unfinished} sequences are unfinished on {len(rollout.engines)} engines, "
            f"{len(inference.backlog)} groups wait for {len(inference.gpus)} inference GPUs, {len(trainer.ready)} for "
            f"{len(trainer.gpus)} GPUs of the trainer, which has made {trainer.minibatch} optimizer steps; "
            f"{len(self.gpus.held_by(Holder.FREE))} GPUs are free: a move must give them to a component with work"
        )
