"""What each rank's file of a saved state holds, and how the files of all ranks form a source. Pure.

- Of the replicas of a shard one writes: the one with the least load so far.
- Tied copies, and the tensor-parallel copies of a whole parameter, are replicas too. Of those, the first stage and the
  first tp rank write.
- A distributed optimizer's state is written by its owners, as far as they belong to those ranks.
- A source's ranks get ids below 0, apart from living ranks, so that a reader receives everything it needs.
- A file serves for every replica of its content.

Invariants:
- All ranks agree on which rank writes what. [test_files: each_element_of_the_state_is_written_once]
- Over all files each element occurs once. Steps are the exception: each rank that writes other state of the parameter
  writes its step too. [test_files: each_element_of_the_state_is_written_once]
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import JsonValue

from tidegate.elastic.plan.holders import Group, Holders, State
from tidegate.elastic.plan.layout import Mesh
from tidegate.elastic.plan.optimizers import DistributedOptimizer, FlatRange, PlainOptimizer, StateKind, StateTensor
from tidegate.elastic.plan.parameters import Parameter, Whole
from tidegate.elastic.plan.plan import Holding, RegionCopy

_MOST_NAMES_SHOWN = 3

_Key = tuple[str, StateKind]


class SavedStateRefused(ValueError):
    """Intact files that belong to another model or to two saves, or that lack what the caller requests."""


@dataclass(frozen=True, slots=True)
class SavedParameter:
    """What must be the same where the parameter is read. The cut is a text."""

    shape: tuple[int, ...]
    itemsize: int
    cut: str


@dataclass(frozen=True, slots=True)
class SavedOptimizer:
    states: tuple[StateTensor, ...]
    step_itemsize: int | None
    ranges: dict[str, FlatRange] | None
    """The parts of the shards whose state this file has; None for a plain optimizer."""


@dataclass(frozen=True, slots=True)
class FileHead:
    """A file's description of itself."""

    mesh: Mesh
    rank: int
    optimizer: SavedOptimizer | None
    parameters: dict[str, SavedParameter]
    """The parameters of which the file holds something."""
    num_parameters: int
    """The number of parameters of the whole model."""
    notes: dict[str, JsonValue]
    """The caller's notes, the same in all files of a save."""

    def __post_init__(self) -> None:
        if self.rank not in self.mesh.ranks:
            raise ValueError(f"rank {self.rank} is not one of the layout's ranks {self.mesh.ranks}")


def written_by(
    parameters: Sequence[Parameter], state: State, me: int, notes: Mapping[str, JsonValue]
) -> tuple[FileHead, tuple[Holding, ...]]:
    """The head of a rank's file and the tensors that go into it. `state` needs no other rank's ranges."""
    holders, mesh = Holders(state), state.mesh
    at = mesh.coordinates(mesh.ranks.index(me))
    loads: dict[Group, list[int]] = {}
    holdings: list[Holding] = []
    for parameter in parameters:
        group = holders.group(parameter)
        whole = isinstance(parameter.cut, Whole)
        if at.stage != group.stages[0] or group.ep not in (None, at.ep) or (whole and at.tp):
            continue
        replicas = mesh.holders(at.stage, tp=at.tp, ep=group.ep)
        load = loads.setdefault(group, [0] * len(replicas))
        writer = load.index(min(load))
        load[writer] += _size(parameter)
        for slot in holders.slots(parameter):
            if holders.has(parameter, slot, me) if not holders.is_uniform(slot) else replicas[writer] == me:
                holdings += holders.holdings(parameter, slot, me)
    named = {parameter.name: parameter for parameter in parameters}
    descriptions = {name: _description(named[name]) for name in dict.fromkeys(holding.name for holding in holdings)}
    # Ranks by their place in the mesh: members' ids are not part of the state.
    placed = replace(mesh, ranks=tuple(range(len(mesh.ranks))))
    rank = mesh.ranks.index(me)
    return FileHead(placed, rank, _optimizer(state, holdings, me), descriptions, len(named), dict(notes)), tuple(
        holdings
    )


class SavedState:
    """The files of one save, by name: their heads and content.

    Raises SavedStateRefused when they do not belong to one save.
    """

    def __init__(self, files: Mapping[str, tuple[FileHead, Collection[_Key]]]) -> None:
        if not files:
            raise SavedStateRefused("a saved state without files: nothing was saved, or no file is named")
        (first, (head, _)) = next(iter(files.items()))
        for file, (other, _) in files.items():
            if (other.mesh, _kept(other), other.notes) != (head.mesh, _kept(head), head.notes):
                raise SavedStateRefused(
                    f"{file} belongs to {_save(other)}, and {first} to {_save(head)}: read the files of one save"
                )
        self.mesh = head.mesh
        self.optimizer = head.optimizer
        self.notes = head.notes
        self._heads = [other for other, _ in files.values()]
        self._parameters = {name: saved for other, _ in files.values() for name, saved in other.parameters.items()}
        self._files: dict[tuple[str, StateKind, int], str] = {}
        for file, (other, keys) in files.items():
            index = self.mesh.ranks.index(other.rank)
            for name, kind in keys:
                self._files[name, kind, self._shard(name, kind, index)] = file

    def check_model(self, parameters: Iterable[Parameter]) -> None:
        """Raises SavedStateRefused unless the parameters are the saved ones with the same cuts, and all have a file."""
        if len(self._parameters) < self._heads[0].num_parameters:
            raise SavedStateRefused(
                f"the files hold {len(self._parameters)} of {self._heads[0].num_parameters} parameters; {self._named()}"
            )
        model = {parameter.name: _description(parameter) for parameter in parameters}
        for what, names in (
            ("are not in the files", model.keys() - self._parameters.keys()),
            ("are in the files and not in the model", self._parameters.keys() - model.keys()),
        ):
            if names:
                raise SavedStateRefused(
                    f"another model was saved: of {len(model)} parameters here and {len(self._parameters)} there "
                    f"{len(names)} {what}: {_some(names)}"
                )
        differing = sorted(name for name, saved in self._parameters.items() if saved != model[name])
        if differing:
            name = differing[0]
            raise SavedStateRefused(
                f"another model was saved: {len(differing)} parameters differ: {_some(differing)}; {name} is "
                f"{_text(model[name])} here and {_text(self._parameters[name])} there"
            )

    def source(self, *, with_optimizer: bool) -> State:
        """The files as one end of a reshard. Raises SavedStateRefused when optimizer state is requested and missing."""
        mesh = replace(self.mesh, ranks=tuple(_source_rank(index) for index in range(len(self.mesh.ranks))))
        if not with_optimizer:
            return State(mesh)
        if self.optimizer is None:
            raise SavedStateRefused(
                "the files hold weights and no optimizer state: ask for the weights alone, or read a checkpoint"
            )
        states, step = self.optimizer.states, self.optimizer.step_itemsize
        if self.optimizer.ranges is None:
            return State(mesh, PlainOptimizer(states, step))
        ranges = {
            _source_rank(self.mesh.ranks.index(head.rank)): head.optimizer.ranges
            for head in self._heads
            if head.optimizer is not None and head.optimizer.ranges is not None
        }
        return State(mesh, DistributedOptimizer(ranges, states, step))

    def file_of(self, copy: RegionCopy) -> str:
        """The file with the content of a copy from a rank of the source. A replica's file serves too."""
        index = _source_rank(copy.source_rank)
        file = self._files.get((copy.name, copy.kind, self._shard(copy.name, copy.kind, index)))
        if file is None:
            raise SavedStateRefused(
                f"no file holds {copy.name} {copy.kind} of rank {self.mesh.ranks[index]} of {self.mesh.layout}, nor of "
                f"its replicas; {self._named()}"
            )
        return file

    def _named(self) -> str:
        ranks = sorted(head.rank for head in self._heads)
        return f"the files are those of ranks {ranks} of {self.mesh.layout}: name the others too"

    def _shard(self, name: str, kind: StateKind, index: int) -> int:
        """A number that is the same for ranks, by their index, that hold the same part of a tensor."""
        if kind is not StateKind.WEIGHT and self.optimizer is not None and self.optimizer.ranges is not None:
            return index
        whole = kind is StateKind.STEP or self._parameters[name].cut == str(Whole())
        return 0 if whole else self.mesh.coordinates(index).tp


def _source_rank(index: int) -> int:
    """The id of the saved rank at an index of the mesh. The function is its own inverse."""
    return -1 - index


def _optimizer(state: State, holdings: Iterable[Holding], me: int) -> SavedOptimizer | None:
    if state.optimizer is None:
        return None
    ranges: dict[str, FlatRange] | None = None
    if isinstance(state.optimizer, DistributedOptimizer):
        own = state.optimizer.ranges.get(me, {})
        ranges = {holding.name: own[holding.name] for holding in holdings if holding.kind is not StateKind.WEIGHT}
    return SavedOptimizer(state.optimizer.states, state.optimizer.step_itemsize, ranges)


def _save(head: FileHead) -> str:
    mesh = head.mesh
    return f"{mesh.layout} on ranks {mesh.ranks}, stages {mesh.chunks}, with {_kept(head)}, notes {head.notes}"


def _kept(head: FileHead) -> str:
    if head.optimizer is None:
        return "weights"
    form = "whole shards" if head.optimizer.ranges is None else "ranges"
    kinds = ", ".join(tensor.kind for tensor in head.optimizer.states)
    return f"weights, {form} of {kinds}, steps of {head.optimizer.step_itemsize} bytes"


def _size(parameter: Parameter) -> int:
    size = parameter.itemsize
    for extent in parameter.shape:
        size *= extent
    return size


def _description(parameter: Parameter) -> SavedParameter:
    return SavedParameter(parameter.shape, parameter.itemsize, str(parameter.cut))


def _text(parameter: SavedParameter) -> str:
    return f"{parameter.shape} of {parameter.itemsize}-byte elements, {parameter.cut}"


def _some(names: Iterable[str]) -> str:
    shown = sorted(names)
    return ", ".join(shown[:_MOST_NAMES_SHOWN]) + (", ..." if len(shown) > _MOST_NAMES_SHOWN else "")
