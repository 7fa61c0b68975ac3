"""A Megatron trainer that changes its layout between two updates: the library's face.

Every process of a membership epoch has one and calls it alike; a process that the layout does not need stands by.
Order of a reshard: `prepare` builds, fills and checks the new layout beside the old one; the members vote; at the
decision `commit` switches, or `abort` gives the new one back. `reshard` is all of it, decided in the epoch's store.
Invariants: until the decision nothing of the old layout is written, so that any failure leaves it as it was; the old
tensors stay until every member has switched, or one is lost on the way; parameters, optimizer state, progress, learning
rate and random numbers go on as if the job had always been in its layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from megatron.core.optimizer import OptimizerConfig
from pydantic import JsonValue

from tidegate.elastic.epoch import coordinator
from tidegate.elastic.epoch.decision import StoreDecision
from tidegate.elastic.epoch.together import of_all
from tidegate.elastic.epoch.world import World, peers_needed
from tidegate.elastic.epoch_cache import EpochCache
from tidegate.elastic.minibatch import Minibatch, RankPlace
from tidegate.elastic.model import param_groups
from tidegate.elastic.model.memory import ArenaReader
from tidegate.elastic.model.provider import ModelProvider
from tidegate.elastic.plan.layout import LayoutRefused, Mesh
from tidegate.elastic.preparing import At, Prepared, Preparing, ReshardAborted, nowhere
from tidegate.elastic.report import ReshardReport, Stopwatch
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state import held as holding
from tidegate.elastic.state.arena_files import sweep
from tidegate.elastic.state.copies import NUM_SLOTS
from tidegate.elastic.state.held import Held, RankState
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.rng import seed_update
from tidegate.elastic.state.stamp import Note, encoded
from tidegate.megatron.reproducible import check_data_parallel, updater
from tidegate.megatron.updates import Update
from tidegate.types import Layout


class NotInLayout(RuntimeError):
    """This member stands by: it holds no part of the model."""


class NotStarted(RuntimeError):
    """There is no state yet."""


class ElasticTrainer:
    """See the module. `layouts` are built ahead, over the first members that they need; others when first asked for."""

    def __init__(
        self,
        model_provider: ModelProvider,
        optimizer_config: OptimizerConfig,
        *,
        world: World,
        layouts: Iterable[Layout] = (),
        settings: ElasticSettings | None = None,
        at: At = nowhere,
    ) -> None:
        self.provider = model_provider
        self.optimizer_config = optimizer_config
        self._settings = settings or ElasticSettings()
        self._at = at
        self._cache = EpochCache(model_provider, optimizer_config, world, self._settings)
        self._held: Held | None = holding.shared(world, None)
        self._progress = Progress()
        self._num_reshards = 0
        self._reader = ArenaReader()
        for layout in layouts:
            self._cache.introduce(self.mesh_of(layout, None), beside=None, watch=Stopwatch())

    @property
    def world(self) -> World:
        return self._cache.world

    @property
    def held(self) -> Held | None:
        """Where the job's state is; None before `start`."""
        return self._held

    @property
    def mesh(self) -> Mesh | None:
        """The layout and its ranks."""
        return None if self._held is None else self._held.mesh

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def cursor(self) -> Mapping[str, JsonValue]:
        """The caller's place in its data, to be set alike on all members of the layout between two updates.

        What is set after an update is lost by a death before it is set: give it to `train_minibatch` instead.
        """
        return self._progress.cursor

    @cursor.setter
    def cursor(self, cursor: Mapping[str, JsonValue]) -> None:
        progress = replace(self._progress, cursor=dict(cursor))
        if self._held is not None and (state := self._held.state) is not None:
            state.stamp.renote(Note(progress, param_groups.values_of(state.skeleton.optimizer)))
        self._progress = progress

    @property
    def state(self) -> RankState:
        """This member's tensors. Raises NotInLayout."""
        if self._held is None or self._held.state is None:
            raise NotInLayout(f"member {self.world.me} stands by: the layout is on {self.mesh and self.mesh.ranks}")
        return self._held.state

    def start(
        self, layout: Layout, *, ranks: Iterable[int] | None = None, fill: Callable[[Held], Progress] | None = None
    ) -> None:
        """Take the initial weights, in this layout on these members (the first ones). Raises LayoutRefused.

        `fill` gives the state instead, on every member, and says how far it is; what it raises leaves nothing started.
        """
        mesh = self.mesh_of(layout, ranks)
        held = self._cache.introduce(mesh, beside=None, watch=Stopwatch())
        filled: list[Progress] = []

        def take() -> bytes:
            if held.state is not None:
                held.state.materialise()
            filled.append((fill or self._fill_anew)(held))
            return b""

        try:
            of_all(self.world, take)
        except Exception:
            held.release()
            raise
        (self._progress,) = filled
        self._begin(held)

    def train_minibatch(
        self, minibatch: Minibatch, learning_rate: float, *, cursor: Mapping[str, JsonValue] | None = None
    ) -> Update | None:
        """One update over a whole minibatch, which every member is given alike; None on a member that stands by.

        `cursor` is the caller's place in its data from the update on, committed with it.

        After a PeerLost `progress` says how many updates this member has committed, and the next reshard's report of
        how many all have; the state is that of one of them.
        """
        if self._held is None or self._held.state is None:
            return None
        state = self._held.state
        skeleton = state.skeleton
        skeleton.materialise_gradients()
        place = RankPlace(
            skeleton.mesh, self.world.me, skeleton.groups, self.world.device, self._settings.num_logical_shards
        )
        batches, on_logits = minibatch.of_rank(place)
        seed_update(self._settings.seed, self._progress.num_updates, skeleton.mesh, self.world.me)
        updates = updater(
            skeleton.chunks,
            skeleton.optimizer,
            skeleton.groups,
            num_sums=minibatch.num_sums,
            num_logical_shards=self._settings.num_logical_shards,
        )
        progress = replace(
            self._progress,
            num_updates=self._progress.num_updates + 1,
            num_samples=self._progress.num_samples + minibatch.num_samples,
            cursor=self._progress.cursor if cursor is None else dict(cursor),
        )

        def note() -> Note:
            return Note(progress, param_groups.values_of(skeleton.optimizer))

        # What it cannot be written down with is refused before anything is applied.
        encoded(note())
        with peers_needed(f"update {progress.num_updates}"):
            update = updates.update(batches, on_logits, learning_rate, applying=lambda: state.stamp.applying(note))
        if update.committed:
            self._progress = progress
            if state.copies is not None and progress.num_updates % self._settings.copy_every == 0:
                state.copies.take(skeleton.tensors(), note(), self.world)
        return update

    def reset_optimizer(self) -> None:
        """Forget what past gradients were; weights and progress stay. Called by all ranks of the layout alike.

        Raises NotInLayout and PeerLost."""
        state, mesh = self.state, self.mesh
        assert mesh is not None
        state.stamp.spoil()
        # Nobody has reset while another's state of before could be taken for that of after.
        self.world.barrier(mesh.ranks)
        state.skeleton.reset_moments()
        # A copy of before has the same count of updates and another state, so that none may be left.
        self._note(state, num_copies=NUM_SLOTS)

    def reshard(self, layout: Layout, *, ranks: Iterable[int] | None = None) -> ReshardReport:
        """Go on in this layout on these members; called by all members of the epoch alike.

        Raises LayoutRefused before anything moves; ReshardAborted, with the old layout as it was; PeerLost when a
        member died: `rejoin` the next epoch, in the layout that `mesh` says.
        """
        mesh = self.mesh_of(layout, ranks)
        self._num_reshards += 1
        name = str(self._num_reshards)
        coordinator.announce(self.world.store, name)
        decision = StoreDecision(
            self.world.store,
            name,
            me=self.world.me,
            participants=self.world.membership.members,
            timeout_s=self._settings.timeout_s,
        )
        try:
            prepared = self.prepare(mesh, name=name)
        except Exception as error:
            decision.vote(f"{type(error).__name__}: {error}")
            raise
        with prepared.watch.part("vote"):
            decision.vote()
            self._at("voted")
            outcome = decision.outcome()
        self._at("decided")
        if not outcome.committed:
            self.abort(prepared)
            raise ReshardAborted(f"no reshard from {prepared.source.mesh.layout} to {layout}: {outcome.reason}")
        return self.commit(prepared)

    def prepare(self, mesh: Mesh, *, name: str) -> Prepared:
        """The first phase, of the reshard of this name. Whatever it raises, it has given back what it took.

        Raises LayoutRefused where the state is in this mesh already, whose tensors cannot be both ends.
        """
        if self._held is None:
            raise NotStarted("there is no state to reshard: start the trainer, or load a checkpoint, first")
        if (self._held.epoch, self._held.mesh) == (self.world.membership.epoch, mesh):
            raise LayoutRefused(f"{mesh.layout} on ranks {mesh.ranks} is the layout already: go on training in it")
        preparing = Preparing(self._cache, self._settings, self._reader, self._at)
        return preparing.run(name, self._held, mesh, self._progress)

    def commit(self, prepared: Prepared) -> ReshardReport:
        """The second phase: train in the new layout from here on, and give the old one's memory back.

        Raises PeerLost, in the new layout, when a member does not switch: `rejoin` the next epoch.
        """
        with prepared.watch.part("switch"):
            note = prepared.agreement.note
            self._held, self._progress = prepared.target, note.progress
            if prepared.target.state is not None:
                param_groups.assign(prepared.target.state.skeleton.optimizer, note.groups)
            self._at("switched")
            try:
                self.world.barrier(self.world.membership.members)
                self._at("all_switched")
                if prepared.source.epoch != prepared.target.epoch:
                    self._sweep()
            finally:
                self._retire(prepared)
            self._at("released")
            if prepared.target.state is not None:
                prepared.target.state.skeleton.materialise_gradients()
        return prepared.report()

    def abort(self, prepared: Prepared) -> None:
        """Stay in the old layout."""
        prepared.target.release()

    def rejoin(self, world: World) -> None:
        """Go on in another epoch, after a death or for new members; called by its members alike.

        The state stays where it is: the next `reshard` brings it into the new epoch. A member that knows of none takes
        over what the others know.
        """
        held = self._held
        self._cache.discard(but=None if held is None else held.state)
        self._cache = EpochCache(self.provider, self.optimizer_config, world, self._settings)
        self._held = holding.shared(world, held)
        # Counted anew, for a member that has just joined has seen none.
        self._num_reshards = 0

    def close(self) -> None:
        """Give all memory back."""
        self._cache.discard(but=None if self._held is None else self._held.state)
        if self._held is not None:
            self._held.discard()
        self._held = None

    def _fill_anew(self, held: Held) -> Progress:
        if held.state is not None:
            skeleton = held.state.skeleton
            self.provider.initialise(skeleton.chunks, held.mesh, self.world.me, seed=self._settings.seed)
            skeleton.start_anew()
        return Progress()

    def _begin(self, held: Held) -> None:
        """Hold the first state, which all ranks of its layout have filled in."""
        lost, self._held = self._held, held
        if lost is not None and lost.epoch != held.epoch:
            lost.discard()
        self._sweep()
        if held.state is not None:
            self._note(held.state, num_copies=1)

    def _note(self, state: RankState, *, num_copies: int) -> None:
        """Its tensors are those of `progress`."""
        note = Note(self._progress, param_groups.values_of(state.skeleton.optimizer))
        state.stamp.set(note)
        if state.copies is not None:
            for _ in range(num_copies):
                state.copies.take(state.skeleton.tensors(), note, self.world)

    def _sweep(self) -> None:
        """What earlier epochs left in shared memory, dead members' files too, is of no use to anybody any more."""
        if (folder := self._settings.shared_memory) is not None:
            sweep(folder, epoch=self.world.membership.epoch)
            self._reader = ArenaReader()

    def _retire(self, prepared: Prepared) -> None:
        if prepared.source.epoch == prepared.target.epoch:
            self._cache.leave(prepared.source)
        else:
            prepared.source.discard()

    def mesh_of(self, layout: Layout, ranks: Iterable[int] | None = None) -> Mesh:
        """The layout on these members, by default the first of the epoch. Raises LayoutRefused."""
        members = self.world.membership.members
        chosen = members[: layout.num_ranks] if ranks is None else tuple(ranks)
        if strangers := [rank for rank in chosen if rank not in members]:
            raise LayoutRefused(
                f"layout {layout} on ranks {chosen}: {strangers} are no members of epoch "
                f"{self.world.membership.epoch}, which has {members}"
            )
        if (num_shards := self._settings.num_logical_shards) is not None:
            try:
                check_data_parallel(layout.dp, num_shards)
            except ValueError as error:
                raise LayoutRefused(f"layout {layout}: {error}") from error
        return self.provider.mesh(layout, chosen)
