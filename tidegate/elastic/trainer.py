"""A Megatron trainer that changes its layout between two updates or within one: the interface of the library.

Every process of a membership epoch has one and makes the same calls. A process that the layout does not use stands by.

Order of a reshard:
1. `prepare` builds, fills and checks the new layout beside the old one.
2. The members vote.
3. After the decision, `commit` switches to the new layout, or `abort` gives it back.

`reshard` does all three steps, with the decision in the epoch's store.

A minibatch may come in portions: `accumulate` for each, and `train_minibatch` with the last. Until then their gradients
are uncommitted. A reshard carries them where it gets the portions. Whatever else may change the tensors drops them.

Invariants:
- Until the decision nothing of the old layout is written but uncommitted gradients, so any failure leaves it as it was.
  [test_refusals: a_failure_of_one_member_before_the_decision]
- An update has the gradients of all its portions or is not made. [test_portions: dropped_by_a_reshard]
- An update whose portions a reshard carried is that of another layout, but for rounding.
  [test_carried_portions: is_that_of_an_undisturbed_trainer]
- The old tensors stay until every member has switched, or until a member is lost on the way.
  [test_kill_matrix: a_kill_leaves_the_old_or_the_new_layout]
- No update is applied after a switch that is not proved, and nothing is saved. [test_late_proof: wrong_element]
  [test_late_proof: uses_the_state]
- Parameters, optimizer state, progress, learning rate and random numbers continue as if the job had always been in its
  layout. [test_training_after_switch: updates_after_a_switch_are_those]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from megatron.core.optimizer import OptimizerConfig
from pydantic import JsonValue

from tidegate.elastic.agreement import PortionsRefused
from tidegate.elastic.ahead import build_ahead
from tidegate.elastic.carried_update import CarriedUpdate
from tidegate.elastic.epoch import coordinator
from tidegate.elastic.epoch.decision import StoreDecision
from tidegate.elastic.epoch.joint_step import run_on_all
from tidegate.elastic.epoch.world import PeerLost, World, peers_needed
from tidegate.elastic.epoch_cache import EpochCache
from tidegate.elastic.late_proof import LateProof, is_known_to_hold
from tidegate.elastic.minibatch import Minibatch, RankPlace
from tidegate.elastic.model import param_groups
from tidegate.elastic.model.memory import ArenaReader
from tidegate.elastic.model.provider import ModelProvider
from tidegate.elastic.open_update import OpenUpdate
from tidegate.elastic.plan.layout import LayoutRefused, Mesh
from tidegate.elastic.plan.recovery import NUM_SLOTS
from tidegate.elastic.report import ReshardReport, Stopwatch
from tidegate.elastic.reshard_preparation import OnPoint, Preparation, PreparedReshard, ReshardAborted, ignore_point
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state.arena_files import sweep
from tidegate.elastic.state.location import RankState, StateLocation, exchange_location
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.state.stamp import Note, encoded
from tidegate.megatron.reproducible import check_data_parallel
from tidegate.megatron.updates import Update
from tidegate.types import Layout


class NotInLayout(RuntimeError):
    """This member stands by: it holds no part of the model."""


class NotStarted(RuntimeError):
    """The trainer has no state yet."""


class JobSuspended(RuntimeError):
    """The state is in host memory alone: reshard it first."""


class ElasticTrainer:
    """The module's head describes it.

    `layouts` are built ahead, over the first members of the epoch. Other layouts are built when they are first used.
    """

    def __init__(
        self,
        model_provider: ModelProvider,
        optimizer_config: OptimizerConfig,
        *,
        world: World,
        layouts: Iterable[Layout] = (),
        settings: ElasticSettings | None = None,
        on_point: OnPoint = ignore_point,
    ) -> None:
        self.provider = model_provider
        self.optimizer_config = optimizer_config
        self._settings = settings or ElasticSettings()
        self._on_point = on_point
        self._cache = EpochCache(model_provider, optimizer_config, world, self._settings)
        # The members that rejoin this epoch ask all of its members, new ones too.
        is_known_to_hold(world, None, None)
        self._location: StateLocation | None = exchange_location(world, None)
        self._progress = Progress()
        self._num_reshards = 0
        self._open: OpenUpdate | None = None
        self._is_suspended = False
        self._proof: LateProof | None = None
        self._certificate = ""
        self._reader = ArenaReader()
        for layout in layouts:
            self._cache.introduce(self.mesh_of(layout, None), beside=None, watch=Stopwatch())

    @property
    def world(self) -> World:
        return self._cache.world

    @property
    def location(self) -> StateLocation | None:
        """Where the job's state is; None before `start`."""
        return self._location

    @property
    def mesh(self) -> Mesh | None:
        """The layout and its ranks."""
        return None if self._location is None else self._location.mesh

    @property
    def progress(self) -> Progress:
        return self._progress

    @property
    def is_suspended(self) -> bool:
        """Whether the state is in host memory alone, until the next reshard."""
        return self._is_suspended

    @property
    def certificate(self) -> str:
        """The certificate of the last switch, once it is proved. Empty before, and on members outside of the layout."""
        return self._certificate

    @property
    def cursor(self) -> Mapping[str, JsonValue]:
        """The caller's place in its data. All members of the layout set the same value between two updates.

        A value that is set after an update is lost if a member dies before the set. Pass it to `train_minibatch`
        instead.
        """
        return self._progress.cursor

    @cursor.setter
    def cursor(self, cursor: Mapping[str, JsonValue]) -> None:
        self._refuse_suspended()
        progress = replace(self._progress, cursor=dict(cursor))
        if self._location is not None and (state := self._location.state) is not None:
            state.stamp.renote(Note(progress, param_groups.values_of(state.skeleton.optimizer)))
        self._progress = progress

    @property
    def state(self) -> RankState:
        """This member's tensors. Raises NotInLayout and JobSuspended."""
        self._refuse_suspended()
        if self._location is None or self._location.state is None:
            raise NotInLayout(
                f"member {self.world.me} stands by: the layout is on members {self.mesh and self.mesh.ranks}"
            )
        return self._location.state

    def start(
        self,
        layout: Layout,
        *,
        ranks: Iterable[int] | None = None,
        fill: Callable[[StateLocation], Progress] | None = None,
    ) -> None:
        """Start with the initial weights, in this layout on these members (by default the first ones). Raises
        LayoutRefused.

        `fill` provides the state instead: every member calls it, and it returns the progress. If it raises, nothing is
        started.
        """
        self.prove()
        mesh = self.mesh_of(layout, ranks)
        location = self._cache.introduce(mesh, beside=None, watch=Stopwatch())
        progress: list[Progress] = []

        def take() -> bytes:
            if location.state is not None:
                location.state.materialise()
            progress.append((fill or self._initialise)(location))
            return b""

        try:
            run_on_all(self.world, take)
        except Exception:
            location.release()
            raise
        (self._progress,) = progress
        self._begin(location)

    @property
    def portions(self) -> tuple[Minibatch, ...]:
        """The portions of the next minibatch whose gradients are accumulated, in order."""
        return () if self._open is None else self._open.portions

    def accumulate(self, portion: Minibatch) -> None:
        """Add the gradients of a portion of the next minibatch. Every member passes the same portion.

        Raises PeerLost; then, and after any other error, all portions are dropped."""
        if self._location is None or self._location.state is None:
            return
        state = self._location.state
        with self._opened(state, portion) as opened:
            with peers_needed(f"portion {len(opened.portions)} of update {self._progress.num_updates + 1}"):
                opened.accumulate(portion, self._place(state))
            # Its micro-batches ran beside the sums. A later proof would keep the old memory for longer.
            self.prove()
            self._open = opened

    def drop_portions(self) -> None:
        """Drop the uncommitted gradients. The next portion is the first of its minibatch."""
        opened, self._open = self._open, None
        if opened is not None:
            opened.drop()

    @contextmanager
    def _opened(self, state: RankState, minibatch: Minibatch) -> Iterator[OpenUpdate]:
        """The open update, or a new one. It ends here, unless the caller opens it again."""
        opened, self._open = self._open, None
        if opened is None:
            opened = OpenUpdate(state.skeleton, self._settings, num_sums=minibatch.num_sums)
        try:
            opened.begin(self._progress.num_updates, self.world.me)
            yield opened
        finally:
            if self._open is not opened:
                opened.drop()

    def _place(self, state: RankState) -> RankPlace:
        skeleton = state.skeleton
        return RankPlace(
            skeleton.mesh, self.world.me, skeleton.groups, self.world.device, self._settings.num_logical_shards
        )

    def train_minibatch(
        self, minibatch: Minibatch, learning_rate: float, *, cursor: Mapping[str, JsonValue] | None = None
    ) -> Update | None:
        """Apply one update over a whole minibatch, or over what is left of it after `portions`. Every member passes the
        same minibatch. Returns None on a standby member.

        `cursor` is the caller's place in its data after the update. It is committed together with the update.

        After a PeerLost, `progress` has the number of updates that this member committed. The report of the next
        reshard has the number that all members have; the state is that of one of those updates.
        """
        self._refuse_suspended()
        if self._location is None or self._location.state is None:
            return None
        state = self._location.state
        skeleton = state.skeleton
        with self._opened(state, minibatch) as opened:
            num_samples = sum(portion.num_samples for portion in (*opened.portions, minibatch))
            progress = replace(
                self._progress,
                num_updates=self._progress.num_updates + 1,
                num_samples=self._progress.num_samples + num_samples,
                cursor=self._progress.cursor if cursor is None else dict(cursor),
            )

            def note() -> Note:
                return Note(progress, param_groups.values_of(skeleton.optimizer))

            # Refuse a note that does not fit its record before anything is applied.
            encoded(note())
            with peers_needed(f"update {progress.num_updates}"):
                update = opened.update(
                    minibatch, self._place(state), learning_rate, applying=lambda: self._applying(state, note)
                )
        if not update.committed:
            # A switch that does not hold may be the reason.
            self.prove()
        else:
            self._progress = progress
            if state.copies is not None and progress.num_updates % self._settings.copy_every == 0:
                state.copies.take(skeleton.tensors(), note(), self.world)
        return update

    @contextmanager
    def _applying(self, state: RankState, note: Callable[[], Note]) -> Iterator[None]:
        self.prove()
        with state.stamp.applying(note):
            yield

    def prove(self) -> None:
        """Wait until the last switch is proved, where its certificate is late. All ranks call it; again is no harm.

        Whatever applies an update, saves, or moves the state calls it. Raises PeerLost where the switch is not proved:
        `rejoin` the next epoch, in which all members have the state in the new layout, or in the old one as it was.
        """
        proof = self._proof
        # A standby has nothing to compare. If the switch does not hold, no rank comes to what they do together next.
        if proof is not None and proof.is_of_rank:
            proof.settle()
            self._end_proof(proof)

    def _end_proof(self, proof: LateProof) -> None:
        self._close_proof()
        self._certificate = proof.digest
        self._retire(proof.prepared)

    def _undo(self, proof: LateProof) -> None:
        self._close_proof()
        self._location = proof.prepared.source
        proof.prepared.target.release()

    def _close_proof(self) -> None:
        if self._proof is not None:
            self._proof.close()
            self._proof = None

    def reset_optimizer(self) -> None:
        """Set the moments to 0; weights and progress stay. All ranks of the layout call it.

        Raises NotInLayout and PeerLost.
        """
        self.prove()
        state, mesh = self.state, self.mesh
        assert mesh is not None
        self.drop_portions()
        state.stamp.spoil()
        # Wait for all stamps to be spoiled: nobody may mistake another rank's old state for the reset one.
        self.world.barrier(mesh.ranks)
        state.skeleton.reset_moments()
        # An older copy has the same number of updates and another state, so overwrite every slot.
        self._note(state, num_copies=NUM_SLOTS)

    def reshard(
        self, layout: Layout, *, ranks: Iterable[int] | None = None, portions: Sequence[Minibatch] = ()
    ) -> ReshardReport:
        """Continue in this layout on these members. All members of the epoch make the same call.

        `portions`: those whose gradients are carried, as in `prepare`.

        Raises:
        - LayoutRefused and PortionsRefused, before anything moves;
        - ReshardAborted, with the old layout as it was;
        - PeerLost, when a member died: `rejoin` the next epoch, in the layout that `mesh` shows.
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
            prepared = self.prepare(mesh, name=name, portions=portions)
        except Exception as error:
            decision.vote(f"{type(error).__name__}: {error}")
            raise
        with prepared.watch.part("vote"):
            decision.vote()
            self._on_point("voted")
            outcome = decision.outcome()
        self._on_point("decided")
        if not outcome.committed:
            self.abort(prepared)
            raise ReshardAborted(
                f"the reshard from {prepared.source.mesh.layout} to {layout} was aborted: {outcome.reason}"
            )
        return self.commit(prepared)

    def prepare(self, mesh: Mesh, *, name: str, portions: Sequence[Minibatch] = ()) -> PreparedReshard:
        """The first phase of the reshard with this name. If it raises, it has given back all that it took.

        `portions`: all portions so far, in order. Their gradients are carried: after `commit` they are `portions` of
        the new layout, and before it the old layout can go on with them. Without any the gradients are dropped.

        Raises LayoutRefused where the state is in this mesh already: the same tensors cannot be both source and target.
        Raises PortionsRefused in reproducible mode, and where a rank of the layout holds others.
        """
        self.prove()
        if self._location is None:
            raise NotStarted("there is no state to reshard: start the trainer, or load a checkpoint, first")
        is_there = (self._location.epoch, self._location.mesh) == (self.world.membership.epoch, mesh)
        if is_there and not self._is_suspended:
            raise LayoutRefused(f"{mesh.layout} on ranks {mesh.ranks} is the layout already: continue training in it")
        if portions and self._settings.num_logical_shards is not None:
            raise PortionsRefused(
                f"{len(portions)} portions to carry with num_logical_shards={self._settings.num_logical_shards}: the "
                "bits of an update depend on the sum of each shard, which a reshard does not keep; pass none and train "
                "them again"
            )
        if not portions:
            self.drop_portions()
        carried = CarriedUpdate(portions, self._open, self._cache, drop=self.drop_portions, on_point=self._on_point)
        preparation = Preparation(self._cache, self._settings, self._reader, self._on_point, carried)
        return preparation.run(name, self._location, mesh, self._progress, may_be_late=not self._is_suspended)

    def build_ahead(self, mesh: Mesh, *, keeps_memory: bool) -> int:
        """Build what the first switch to this mesh would build. Returns the bytes of memory that this member keeps.

        All members of the epoch make the same call, between two updates. It drops portions, since it draws random
        numbers; nothing else of the state changes. Raises NotStarted, and as `ahead.build_ahead`.
        """
        if self._location is None:
            raise NotStarted("there is no state to switch from: start the trainer, or load a checkpoint, first")
        self.prove()
        self.drop_portions()
        return build_ahead(self._cache, self._reader, self._location, mesh, keeps_memory=keeps_memory)

    def commit(self, prepared: PreparedReshard) -> ReshardReport:
        """The second phase: train in the new layout from here on, and give back the old layout's memory.

        Raises PeerLost, in the new layout, when a member does not switch: `rejoin` the next epoch.
        """
        with prepared.watch.part("switch"):
            note = prepared.agreement.note
            self._location, self._progress = prepared.target, note.progress
            ended, self._open = self._open, prepared.carried.resumed(prepared.target, self._settings)
            self._is_suspended = False
            self._certificate = prepared.certificate.digest
            if prepared.target.state is not None:
                param_groups.assign(prepared.target.state.skeleton.optimizer, note.groups)
            self._on_point("switched")
            try:
                self.world.barrier(self.world.membership.members)
                self._on_point("all_switched")
                if prepared.source.epoch != prepared.target.epoch:
                    self._sweep()
            finally:
                self._close_proof()
                if prepared.is_late:
                    self._proof = LateProof(prepared, self.world, self._settings, self._on_point)
                else:
                    self._retire(prepared)
                if ended is not None:
                    ended.drop()
            self._on_point("released")
            if prepared.target.state is not None:
                prepared.target.state.skeleton.materialise_gradients()
        return prepared.report()

    def abort(self, prepared: PreparedReshard) -> None:
        """Stay in the old layout."""
        prepared.target.give_back(prepared.source)
        prepared.carried.give_back()

    def prepare_suspension(self) -> None:
        """The first phase of a suspension: have this member's state in host memory. Nothing else changes.

        Members wait for each other only where a switch is not proved yet. Call it between two updates. Raises
        NotStarted and ArenaFull.
        """
        # In a spent epoch the proof stays open until the next one, and both layouts are kept.
        with suppress(PeerLost):
            self.prove()
        if self._location is None:
            raise NotStarted("there is no state to suspend: start the trainer, or load a checkpoint, first")
        if self._location.state is not None and not self._is_suspended:
            self._location.state.keep(self._progress)

    def suspend(self) -> None:
        """The second phase, once every member has done the first: give back all memory but the host's.

        All members of the epoch call it; no member waits for another. The next `reshard` continues, in any layout on
        any members, in this epoch or a later one.
        """
        assert self._location is not None
        self.drop_portions()
        if self._proof is None or not self._proof.is_of_rank:
            self._cache.make_room(self._location, self._location.mesh)
        if self._location.state is not None:
            self._location.state.rest()
        self._is_suspended = True

    @property
    def kept_bytes(self) -> int:
        """The host memory in which this member keeps a suspended job's state, without copies of earlier updates."""
        state = None if self._location is None else self._location.state
        if state is None or not self._is_suspended:
            return 0
        return state.arena.num_bytes if state.kept is None else state.kept.num_bytes

    def abort_suspension(self) -> None:
        """Stay as before the first phase. Does nothing after the second one."""
        state = None if self._location is None else self._location.state
        if state is not None and state.kept is not None and not self._is_suspended:
            state.kept.release()

    def rejoin(self, world: World) -> None:
        """Continue in another epoch, after a death or with new members. All its members make the same call.

        The state stays where it is: the next `reshard` moves it into the new epoch. A member without a state learns its
        location from the others.
        """
        self.drop_portions()
        cache = EpochCache(self.provider, self.optimizer_config, world, self._settings)
        holds, proof = is_known_to_hold(world, self._location, self._proof), self._proof
        if proof is not None and holds:
            self._end_proof(proof)
        elif proof is not None:
            self._undo(proof)
        location = self._location
        self._cache.discard(but=None if location is None else location.state)
        self._cache = cache
        self._location = exchange_location(world, location)
        # Start from 0: a member that has just joined has counted none.
        self._num_reshards = 0

    def close(self) -> None:
        """Give all memory back. A suspended state's shared files stay: the other members may need them."""
        self._close_proof()
        self.drop_portions()
        self._cache.discard(but=None if self._location is None else self._location.state)
        if self._location is not None and not self._is_suspended:
            self._location.discard()
        self._location = None

    def _initialise(self, location: StateLocation) -> Progress:
        if location.state is not None:
            skeleton = location.state.skeleton
            self.provider.initialise(skeleton.chunks, location.mesh, self.world.me, seed=self._settings.seed)
            skeleton.start_anew()
        return Progress()

    def _begin(self, location: StateLocation) -> None:
        """Adopt the first state, which all ranks of its layout have filled."""
        previous, self._location = self._location, location
        self._is_suspended = False
        if previous is not None and previous.epoch != location.epoch:
            previous.discard()
        self._sweep()
        if location.state is not None:
            self._note(location.state, num_copies=1)

    def _note(self, state: RankState, *, num_copies: int) -> None:
        """Record that the tensors are those of `progress`."""
        note = Note(self._progress, param_groups.values_of(state.skeleton.optimizer))
        state.stamp.set(note)
        if state.copies is not None:
            for _ in range(num_copies):
                state.copies.take(state.skeleton.tensors(), note, self.world)

    def _sweep(self) -> None:
        """Remove the files of earlier epochs from shared memory, dead members' files too: nobody needs them."""
        for folder in {self._settings.shared_memory, self._settings.host_memory} - {None}:
            assert folder is not None
            sweep(folder, epoch=self.world.membership.epoch)
            self._reader = ArenaReader()

    def _refuse_suspended(self) -> None:
        if self._is_suspended:
            raise JobSuspended("the job is suspended: call reshard, in any layout, and continue then")

    def _retire(self, prepared: PreparedReshard) -> None:
        source = prepared.source
        if source.epoch != prepared.target.epoch:
            source.discard()
        elif source.state is not prepared.target.state:
            self._cache.leave(source)
        if source.state is not None and source.state.kept is not None:
            source.state.kept.release()

    def mesh_of(self, layout: Layout, ranks: Iterable[int] | None = None) -> Mesh:
        """The layout on these members, by default the first members of the epoch. Raises LayoutRefused."""
        members = self.world.membership.members
        chosen = members[: layout.num_ranks] if ranks is None else tuple(ranks)
        if strangers := [rank for rank in chosen if rank not in members]:
            raise LayoutRefused(
                f"layout {layout} on ranks {chosen}: {strangers} are not members of epoch "
                f"{self.world.membership.epoch}, whose members are {members}"
            )
        if (num_shards := self._settings.num_logical_shards) is not None:
            try:
                check_data_parallel(layout.dp, num_shards)
            except ValueError as error:
                raise LayoutRefused(f"layout {layout}: {error}") from error
        return self.provider.mesh(layout, chosen)
