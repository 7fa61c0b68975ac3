"""An update some of whose portions have run, on one rank of the layout.

Gradients of portions are in Megatron's buffers. `reduce` adds them up over the ranks and moves them out, each to the
rank whose optimizer owns it, in fp32. From there a reshard can carry them, and the buffers' memory is given back. The
update adds them to the gradients of later portions, after those have been reduced.

Invariants:
- It has the gradients of all its `portions`, each once. [test_carried_portions: is_that_of_an_undisturbed_trainer]
- Random numbers are seeded anew after a reduction, because building a layout draws some.
  [test_carried_portions: do_not_depend_on_what_was_built]
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

from tidegate.elastic.epoch.world import peers_needed
from tidegate.elastic.minibatch import Minibatch, RankPlace
from tidegate.elastic.model.skeleton import Skeleton
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state.carried import CarriedGradients
from tidegate.elastic.state.rng import seed_update
from tidegate.megatron.reproducible import updater
from tidegate.megatron.updates import ReducedPortions, Update


class OpenUpdate:
    """The module's head describes it."""

    def __init__(
        self,
        skeleton: Skeleton,
        settings: ElasticSettings,
        *,
        num_sums: int,
        portions: tuple[Minibatch, ...] = (),
        carried: CarriedGradients | None = None,
    ) -> None:
        """`carried`: the reduced gradients of `portions`, which a reshard brought here."""
        self.portions = portions
        self._skeleton = skeleton
        self._seed = settings.seed
        self._num_sums = num_sums
        self._updater = updater(
            skeleton.chunks,
            skeleton.optimizer,
            skeleton.groups,
            num_sums=num_sums,
            num_logical_shards=settings.num_logical_shards,
        )
        self._carried = carried
        self._has_buffers = False

    def begin(self, num_updates: int, me: int) -> None:
        """Prepare for portions after `num_updates` updates. Does nothing between two portions. Raises ArenaFull."""
        if not self._has_buffers:
            self._skeleton.materialise_gradients()
            seed_update(self._seed, num_updates, self._skeleton.mesh, me, num_portions=len(self.portions))
            self._has_buffers = True

    def accumulate(self, portion: Minibatch, place: RankPlace) -> None:
        self._updater.accumulate(*portion.of_rank(place))
        self.portions += (portion,)

    def update(
        self,
        minibatch: Minibatch,
        place: RankPlace,
        learning_rate: float,
        *,
        applying: Callable[[], AbstractContextManager[None]],
    ) -> Update:
        batches, on_logits = minibatch.of_rank(place)
        return self._updater.update(
            batches, on_logits, learning_rate, scale=minibatch.scale, reduced=self._reduced(), applying=applying
        )

    def take_room(self, make: Callable[[Skeleton], CarriedGradients]) -> None:
        """Have memory for reduced gradients. Nothing else changes. `make` makes it, filled with 0. Raises ArenaFull."""
        if self._carried is None:
            self._carried = make(self._skeleton)
            self._carried.sums = (0.0,) * self._num_sums

    def reduce(self) -> CarriedGradients:
        """Reduce the gradients in the buffers, and give the buffers' memory back. All ranks of the layout call it.

        Call `take_room` first. Raises PeerLost; the update must be dropped then.
        """
        carried = self._carried
        assert carried is not None
        if self._has_buffers:
            with peers_needed(f"reducing {len(self.portions)} portions"):
                sums = self._updater.reduce()
            for name, gradient in self._skeleton.gradients().items():
                carried.gradients[name].add_(gradient)
            carried.sums = tuple(map(sum, zip(carried.sums, sums, strict=True)))
            self._has_buffers = False
        # A layout that was just switched to has buffers in which nothing is yet.
        self._skeleton.release_gradients()
        return carried

    def drop(self) -> None:
        """Give back what it holds besides the buffers. It must not be used any more."""
        self._updater.drop()
        if self._carried is not None:
            self._carried.discard()

    def _reduced(self) -> ReducedPortions | None:
        if self._carried is None:
            return None
        places = self._skeleton.gradients()
        pairs = [(gradient, places[name]) for name, gradient in self._carried.gradients.items()]
        return ReducedPortions(pairs, self._carried.sums)
