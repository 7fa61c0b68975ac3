"""The open update that a reshard carries from the old layout to the new one, as one member does it.

Order:
1. The members agree on the portions (`agreement`).
2. `reduce`: the ranks of the old layout reduce what the portions have added.
3. `allocate`: the ranks of the new layout take memory for it.
4. The gradients move with the state, by the plan, transport and certificate of a moment.
5. `resumed` is the open update of the new layout; or `give_back` gives its memory back.

Invariants:
- The old layout's open update can go on until the switch. [test_carried_portions: stays_open_in_the_old_layout]
- A reshard that carries no portion does none of this. [test_carried_portions: takes_no_memory]
- If the reduction fails on one member, the portions are dropped on all: they may be reduced in a part only.
  [test_carried_update: a_failed_reduction_drops]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from tidegate.elastic.epoch.joint_step import run_on_all
from tidegate.elastic.epoch_cache import EpochCache
from tidegate.elastic.minibatch import Minibatch
from tidegate.elastic.model.memory import Place
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.open_update import OpenUpdate
from tidegate.elastic.plan.gradients import with_gradients
from tidegate.elastic.plan.plan import Part
from tidegate.elastic.report import Stopwatch
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state.carried import Announcement, CarriedGradients, decode, encode
from tidegate.elastic.state.location import StateLocation

REDUCING = "reducing"
"""The point at which a member begins to reduce: the others may be in it already. Only a reshard that carries has it."""


class CarriedUpdate:
    """The module's head describes it. Without `portions` it does nothing."""

    def __init__(
        self,
        portions: Sequence[Minibatch],
        opened: OpenUpdate | None,
        cache: EpochCache,
        *,
        drop: Callable[[], None],
        on_point: Callable[[str], None] = lambda point: None,
    ) -> None:
        """`opened`: this member's open update, which `drop` ends. None on a member without one. `on_point` hears of
        REDUCING on a member with one."""
        self.portions = tuple(portions)
        self._opened = opened
        self._cache = cache
        self._drop = drop
        self._on_point = on_point
        self._announced: Mapping[int, Announcement] = {}
        self._source: CarriedGradients | None = None
        self._target: CarriedGradients | None = None

    @property
    def held(self) -> tuple[Minibatch, ...]:
        """The portions whose gradients this member has."""
        return () if self._opened is None else self._opened.portions

    def reduce(self, watch: Stopwatch) -> None:
        """All members call it, those outside of the old layout too. Raises ArenaFull, MemberFailed and PeerLost."""
        if not self.portions:
            return
        world = self._cache.world
        with watch.part("allocation"):
            run_on_all(world, self._take_room)
        with watch.part("transfer"):
            try:
                answers = run_on_all(world, self._reduce)
            except BaseException:  # raised again; an interrupt too may leave gradients reduced in a part only
                self._drop()
                raise
        self._announced = {member: decode(answer) for member, answer in answers.items() if answer}

    def allocate(self, target: StateLocation) -> None:
        """Take memory in the new layout. Raises ArenaFull."""
        if self.portions and target.state is not None:
            (sums, *_) = (announced.sums for announced in self._announced.values())
            self._target = self._cache.empty_gradients(target.state.skeleton)
            self._target.sums = sums

    def in_part(self, part: Part) -> Part:
        """The part, with the gradients."""
        return with_gradients(part) if self.portions else part

    def source_tensors(self) -> Tensors:
        return {} if self._source is None else self._source.tensors()

    def target_tensors(self) -> Tensors:
        return {} if self._target is None else self._target.tensors()

    def places(self, rank: int) -> Mapping[TensorKey, Place]:
        """Where a rank's gradients lie in shared memory."""
        return self._announced[rank].by_key() if rank in self._announced else {}

    def resumed(self, target: StateLocation, settings: ElasticSettings) -> OpenUpdate | None:
        """The open update of the new layout. None where the member is not in it, or nothing is carried."""
        carried, self._target = self._target, None
        if carried is None or target.state is None:
            return None
        return OpenUpdate(
            target.state.skeleton, settings, num_sums=len(carried.sums), portions=self.portions, carried=carried
        )

    def give_back(self) -> None:
        """Give back the memory in the new layout; again is no harm."""
        target, self._target = self._target, None
        if target is not None:
            target.discard()

    def _take_room(self) -> bytes:
        if self._opened is not None:
            self._opened.take_room(self._cache.empty_gradients)
        return b""

    def _reduce(self) -> bytes:
        if self._opened is None:
            return b""
        self._on_point(REDUCING)
        self._source = self._opened.reduce()
        return encode(self._source.announcement())
