"""Chooses the GPUs of each component for what a person asks by hand. Else it says why not and what would work. Pure.

A component whose number of GPUs changes keeps its first GPUs. One that grows gets GPUs of its own slots first, then
free ones, then those that others give up; whole replicas inside a node, where they fit. A component that the person
does not name is at home.

Invariants:
- Every component has at least one copy, in a layout that it can run. [test_manual_splits: a_wish_that_cannot_be]
- No GPU has two components, and none is drained or gone. [test_manual_splits: gpus_are_chosen]
- A refusal names numbers or GPUs that work. [test_manual_splits: what_a_refusal_names_works]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from services.scheduler.decide.homes import gone_gpus, home_of, remaining_home
from services.scheduler.evolve import resizes
from services.scheduler.evolve.manual_moves import drained_fault, split_fault
from services.scheduler.policy import Policy
from services.scheduler.state.cluster_state import ClusterState
from services.scheduler.state.components import node_of_instance
from services.scheduler.state.homes import home_spec
from services.scheduler.state.layouts import replica_size, with_dp
from services.scheduler.state.units import but_for, in_units
from services.scheduler.state.values import JobSpec, Placed
from tidegate.config.checks.layouts import replicas_fault
from tidegate.short_lists import first_few
from tidegate.types import GpuId, Layout, NodeId, Role, node_of

LayoutFault = Callable[[Layout], str | None]
"""Why the job's actor can never be in a layout; None when it can."""


class MoveRefused(ValueError):
    """The job can never do what a person asks. The text says why, and what would work."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What a person asks for. `sizes`: numbers of GPUs by role. `layout`, `gpus`: the actor's, in place of its size;
    without `gpus` they are chosen."""

    sizes: Mapping[Role, int]
    layout: Layout | None = None
    gpus: tuple[GpuId, ...] = ()


def split_of(state: ClusterState, policy: Policy, wish: Wish, layout_fault: LayoutFault) -> dict[Role, Placed]:
    """Where each component is to be. MoveRefused: it cannot be."""
    chosen = _Choosing(state, policy, layout_fault).split(wish)
    return _checked(state, policy, chosen)


def migration_of(
    state: ClusterState, policy: Policy, leaving: Sequence[GpuId], coming: Sequence[GpuId]
) -> dict[Role, Placed]:
    """The split in which a component has the GPUs `coming` in place of `leaving`, in the same order. MoveRefused."""
    base = _base(state, policy)
    if len(leaving) != len(coming) or not leaving:
        raise MoveRefused(f"{len(leaving)} GPUs go to {len(coming)}; name as many that come as leave")
    for named, to in ((leaving, "--from"), (coming, "--to")):
        if twice := sorted({gpu for gpu in named if named.count(gpu) > 1}):
            raise MoveRefused(f"{to} names {', '.join(twice)} twice; name each GPU once")
    roles = {role for role in Role if set(leaving) <= set(base[role].gpus)}
    if not roles:
        at_home = "; ".join(f"{role}: {first_few(base[role].gpus, most=8)}" for role in Role)
        raise MoveRefused(f"{', '.join(leaving)}: not at home with one component ({at_home})")
    (role,) = roles
    taken = {gpu: each for each in Role for gpu in base[each].gpus}
    if (fault := drained_fault(state, coming)) is not None:
        raise MoveRefused(fault)
    if owned := [gpu for gpu in coming if gpu in taken]:
        free = [gpu for gpu in _to_be_had(state) if gpu not in taken]
        remedy = f"free: {first_few(free, most=8)}" if free else "no GPU is free: `tidegate scale` takes one away first"
        raise MoveRefused(f"{owned[0]} is the {taken[owned[0]]}'s, and a move needs free GPUs; {remedy}")
    size = replica_size(base[role].layout)
    in_place = dict(zip(leaving, coming, strict=True))
    moved = tuple(in_place.get(gpu, gpu) for gpu in base[role].gpus)
    if absent := sorted({node_of(gpu) for gpu in coming} - _nodes(state, role)):
        raise MoveRefused(f"no instance of the {role} lives on {', '.join(absent)}; {_reachable(state, role)}")
    _refuse_parts(role, size, leaving, base[role].gpus)
    return _checked(state, policy, {**base, role: replace(base[role], gpus=moved)})


def _refuse_parts(role: Role, size: int, leaving: Sequence[GpuId], gpus: tuple[GpuId, ...]) -> None:
    """Avoid a copy across two places by accident: the rollout's and the inference's move whole."""
    if role is Role.ACTOR or size == 1:
        return
    copies = [gpus[start : start + size] for start in range(0, len(gpus), size)]
    for copy in copies:
        if 0 < len(set(copy).intersection(leaving)) < size:
            raise MoveRefused(f"{', '.join(copy)} are one copy of the {role} and move together; name all {size}")


def drained_by(state: ClusterState, policy: Policy, targets: Iterable[str], *, is_undone: bool) -> tuple[GpuId, ...]:
    """The GPUs that the targets, GPUs and nodes, name. MoveRefused: a component would have no copy without them, or the
    job has no such GPU."""
    spec = _spec(state)
    named: dict[GpuId, None] = {}
    for target in targets:
        found = [gpu for gpu in spec.gpus if target in (gpu, node_of(gpu))]
        if not found:
            nodes = sorted({node_of(gpu) for gpu in spec.gpus})
            raise MoveRefused(
                f"{target!r} is no GPU and no node of the job; it has {first_few(spec.gpus, most=8)} on "
                f"{', '.join(nodes)}"
            )
        named |= dict.fromkeys(found)
    if not named:
        raise MoveRefused("no GPU is named; name GPUs or nodes of the job")
    gpus, drained = tuple(named), set(state.manual.drained)
    if is_undone:
        if strange := sorted(set(gpus) - drained):
            listed = ", ".join(state.manual.drained) or "none"
            raise MoveRefused(f"{', '.join(strange)}: not drained; drained are {listed}")
        return gpus
    closed = frozenset(drained.union(gpus)) | gone_gpus(state)
    if remaining_home(home_spec(state, spec), closed, policy) is None:
        raise MoveRefused(_no_copy_left(state, policy, gpus))
    return gpus


def _no_copy_left(state: ClusterState, policy: Policy, gpus: tuple[GpuId, ...]) -> str:
    spec, gone = _spec(state), gone_gpus(state)
    closed = gone.union(state.manual.drained)
    home = home_spec(state, spec)
    sizes = ", ".join(f"{role} {len(home.placement[role].gpus)}" for role in Role)
    rest = len(set(spec.gpus).difference(closed, gpus))
    # The actor gives up its GPUs for no other component, so which GPUs are left matters, not their number alone.
    others = but_for(spec.gpus, closed)
    works = [gpu for gpu in others if remaining_home(home, closed | {gpu}, policy) is not None]
    remedy = f"each of these alone can be: {first_few(works, most=8)}" if works else "no other GPU may be drained"
    lost = f" and the lost {', '.join(sorted(gone))}" if gone else ""
    without = f"without {', '.join(gpus)}{lost} the job has {rest} GPUs"
    lacks = f"{without}, and a component would have no copy (home: {sizes})"
    return f"{lacks}; {remedy}"


def _spec(state: ClusterState) -> JobSpec:
    assert state.spec is not None, "a job without a config has no GPUs"
    return state.spec


def _base(state: ClusterState, policy: Policy) -> dict[Role, Placed]:
    """Where the components are to be by now: as a person asked last, else at home."""
    if state.manual.split:
        return dict(state.manual.split)
    placement = dict(home_of(state, _spec(state), policy).spec.placement)
    asked = state.asked_next or state.asked
    return {**placement, Role.ACTOR: asked} if asked is not None else placement


def _to_be_had(state: ClusterState) -> list[GpuId]:
    """The job's GPUs that are not drained and not gone."""
    return but_for(_spec(state).gpus, gone_gpus(state).union(state.manual.drained))


def _nodes(state: ClusterState, role: Role) -> set[NodeId]:
    return {node_of_instance(name) for name in state.living(role=role)}


def _reachable(state: ClusterState, role: Role) -> str:
    return f"its instances live on {', '.join(sorted(_nodes(state, role))) or 'no node'}"


def _checked(state: ClusterState, policy: Policy, placement: dict[Role, Placed]) -> dict[Role, Placed]:
    """MoveRefused where the split cannot be, or where the job's policy cannot go on from there."""
    if (fault := split_fault(state, placement)) is not None:
        raise MoveRefused(fault)
    try:
        policy.check(replace(_spec(state), placement=placement))
    except ValueError as error:
        raise MoveRefused(f"the job's policy cannot go on from there: {error}") from error
    return placement


class _Choosing:
    """Chooses GPUs for sizes."""

    def __init__(self, state: ClusterState, policy: Policy, layout_fault: LayoutFault) -> None:
        self._state = state
        self._spec = _spec(state)
        self._layout_fault = layout_fault
        self._base = _base(state, policy)
        self._pool = _to_be_had(state)

    def split(self, wish: Wish) -> dict[Role, Placed]:
        sizes = dict(wish.sizes)
        layouts = {role: self._base[role].layout for role in Role}
        if wish.layout is not None:
            layouts[Role.ACTOR], sizes[Role.ACTOR] = wish.layout, wish.layout.num_ranks
        for role, size in sizes.items():
            layouts[role] = self._layout(role, layouts[role], size, sizes)
        kept = {role: self._kept(role, sizes.get(role)) for role in Role}
        placed = {role: Placed(kept[role], layouts[role]) for role in Role}
        if wish.gpus:
            placed[Role.ACTOR] = self._named(wish.gpus, layouts[Role.ACTOR], kept)
        for role in Role:
            if len(placed[role].gpus) < layouts[role].num_ranks:
                gpus = self._grown(role, placed, layouts, sizes)
                placed[role] = Placed(gpus, layouts[role])
        return placed

    def _layout(self, role: Role, layout: Layout, size: int, sizes: Mapping[Role, int]) -> Layout:
        """The layout with the copies that fill the GPUs. MoveRefused with sizes that work."""
        unit = replica_size(layout)
        num_copies, rest = divmod(size, unit)
        if rest or not num_copies:
            copies = f"{size} GPUs make no whole copies of the {role}, which is {layout}, {unit} GPUs a copy"
            change = "; --layout changes the copies" if role is Role.ACTOR else ""
            raise MoveRefused(f"{copies}{self._sizes_that_work(role, layout, sizes)}{change}")
        if (fault := self._fault(role, layout, num_copies)) is not None:
            raise MoveRefused(f"{fault}{self._sizes_that_work(role, layout, sizes)}")
        found = with_dp(layout, num_copies)
        assert found is not None, "checked above"
        return found

    def _fault(self, role: Role, layout: Layout, num_copies: int) -> str | None:
        shards = self._spec.num_logical_shards if role is Role.ACTOR else None
        found = with_dp(layout, num_copies)
        if found is None:
            return f"{num_copies} copies of the {role} do not fit its experts: dp * cp % ep must be 0 in {layout}"
        if role is not Role.ACTOR:
            return None
        num_samples = self._spec.num_samples_per_minibatch
        return replicas_fault(found, num_samples=num_samples, num_shards=shards) or self._layout_fault(found)

    def _sizes_that_work(self, role: Role, layout: Layout, sizes: Mapping[Role, int]) -> str:
        """What the role can have where the others have what they are to have; empty where no number fits the layout."""
        unit = replica_size(layout)
        others = sum(sizes.get(each, len(self._base[each].gpus)) for each in Role if each is not role)
        most = (len(self._pool) - others) // unit
        works = [copies * unit for copies in range(1, most + 1) if self._fault(role, layout, copies) is None]
        if works:
            return f"; with the others so, the {role} can have {first_few(map(str, works), most=12)}"
        left = max(0, len(self._pool) - others)
        return "" if most > 0 else f"; the others leave {left} GPUs to the {role}: give one of them fewer"

    def _kept(self, role: Role, size: int | None) -> tuple[GpuId, ...]:
        gpus = tuple(gpu for gpu in self._base[role].gpus if gpu in self._pool)
        return gpus if size is None else gpus[:size]

    def _named(self, gpus: tuple[GpuId, ...], layout: Layout, kept: Mapping[Role, tuple[GpuId, ...]]) -> Placed:
        """The actor on the GPUs that the person names. MoveRefused: others have them, or they are drained."""
        if (fault := drained_fault(self._state, gpus)) is not None:
            raise MoveRefused(fault)
        others = {gpu: role for role in Role if role is not Role.ACTOR for gpu in kept[role]}
        if owned := [gpu for gpu in gpus if gpu in others]:
            role = others[owned[0]]
            fewer = len(kept[role]) - replica_size(self._base[role].layout)
            remedy = f"--{role} {fewer} takes GPUs from it" if fewer > 0 else "it has one copy alone"
            raise MoveRefused(f"{owned[0]} is the {role}'s; {remedy}, or name others of {self._free_of(kept)}")
        placed = Placed(gpus, layout)
        standby = tuple(but_for(self._pool, {*others, *self._base[Role.ACTOR].gpus}))
        spec = replace(self._spec, placement=self._base, standby=standby)
        if (fault := resizes.fault(spec, placed)) is not None:
            raise MoveRefused(fault)
        return placed

    def _free_of(self, kept: Mapping[Role, tuple[GpuId, ...]]) -> str:
        others = {gpu for role in Role if role is not Role.ACTOR for gpu in kept[role]}
        return first_few(but_for(self._pool, others), most=8) or "none"

    def _grown(
        self,
        role: Role,
        placed: Mapping[Role, Placed],
        layouts: Mapping[Role, Layout],
        sizes: Mapping[Role, int],
    ) -> tuple[GpuId, ...]:
        kept, num_ranks, size = placed[role].gpus, layouts[role].num_ranks, replica_size(layouts[role])
        held = {gpu for each in Role for gpu in placed[each].gpus}
        nodes = _nodes(self._state, role)
        pool = [gpu for gpu in but_for(self._pool, held) if node_of(gpu) in nodes]
        own = [gpu for gpu in pool if gpu in self._spec.slots(role)]
        free = [gpu for gpu in pool if gpu not in own and self._is_free(gpu)]
        missing = num_ranks - len(kept)
        for some in (own, own + free, pool):
            if len(some) >= missing:
                return (*kept, *in_units(some, size, missing, near={node_of(gpu) for gpu in kept}))
        wanted = ", ".join(f"{each} {layouts[each].num_ranks}" for each in Role)
        num_wanted = sum(layouts[each].num_ranks for each in Role)
        raise MoveRefused(
            f"{wanted} are {num_wanted} GPUs, and the job has {len(self._pool)}{self._without()}"
            f"{self._sizes_that_work(role, layouts[role], sizes)}; {_reachable(self._state, role)}"
        )

    def _without(self) -> str:
        drained = self._state.manual.drained
        return f" besides the drained {', '.join(drained)}" if drained else ""

    def _is_free(self, gpu: GpuId) -> bool:
        record = self._state.gpus.get(gpu)
        return record is not None and resizes.is_free(record)
