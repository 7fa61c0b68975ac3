"""Saved state as safetensors files, one per rank, which any rank of any layout reads.

A file has the tensors of its rank, flat as they are held, as `KIND/NAME`. Its metadata has the layout, ranges and
parameters.

Order of a write: a partial file, fsync, rename.

Order of a read:
1. The heads of all files.
2. The plan.
3. The checksum of each file that is needed.
4. The regions, from memory maps straight into the targets. Each rank begins with another file.

Invariants:
- A file never changes after it has its name. [test_files: a_file_appears_under_its_name_only_when_whole]
- No value is taken from a file with an unexpected checksum. [test_files: a_changed_byte_is_noticed]
- Nothing is written to a target before all files that it needs are known to be good.
  [test_files: a_changed_byte_is_noticed]
- Values arrive unchanged, bit for bit, each needed one once. [test_files: any_layout_reads_what_any_other_wrote]
- Elements in no region (padding) are not written. [test_files: padding_of_a_target_is_not_written]
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from pydantic import JsonValue, TypeAdapter
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file

from tidegate.checksums import WrittenFile, combined_checksum, file_checksum
from tidegate.elastic.carry.transport import copy_regions
from tidegate.elastic.check.sums import WeightedSums
from tidegate.elastic.model.tensors import TensorKey, Tensors
from tidegate.elastic.plan.holders import State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.plan.parameters import Parameter
from tidegate.elastic.plan.plan import Holding, RegionCopy
from tidegate.elastic.plan.planner import Planner
from tidegate.elastic.plan.saved_state import FileHead, SavedState, written_by
from tidegate.types import Layout

_HEAD = TypeAdapter(FileHead)
_HEAD_KEY = "tidegate.head"


class FileCorrupt(ValueError):
    """A file of a saved state is missing, unreadable, or not what its writer recorded."""


def write_rank(
    folder: Path,
    file: str,
    *,
    parameters: Sequence[Parameter],
    state: State,
    me: int,
    tensors: Tensors,
    notes: Mapping[str, JsonValue] | None = None,
) -> WrittenFile | None:
    """Write a rank's share of the state as `folder/file`. Returns None when the rank's replicas write all that it
    holds.

    `tensors` are all that the rank holds; its share is selected from them. `state` needs no other rank's ranges.
    `notes` are the same for all ranks. Raises ValueError, before anything is written, when a tensor does not match
    `state`.
    """
    head, holdings = written_by(parameters, state, me, notes or {})
    if not holdings:
        return None
    tensors = {(holding.name, holding.kind): _checked(holding, tensors, "to write") for holding in holdings}
    on_host = {_key(*key): tensor.detach().cpu() for key, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f".{file}.partial"
    # By address: `save_file` refuses views of one buffer, which would have to be copied for it.
    specs = {
        key: TensorSpec(
            dtype=str(of.dtype).removeprefix("torch."), shape=[of.numel()], data_ptr=of.data_ptr(), data_len=of.nbytes
        )
        for key, of in on_host.items()
    }
    serialize_file(specs, partial, metadata={_HEAD_KEY: _HEAD.dump_json(head).decode()})
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    written = WrittenFile(file=file, size_bytes=partial.stat().st_size, checksum=file_checksum(partial))
    os.rename(partial, folder / file)
    return written


def weights_sum(parameters: Sequence[Parameter], state: State, me: int, tensors: Tensors) -> int:
    """The sum of the weights that `write_rank` would write.

    The sums of all ranks add up, modulo 2**64, to a sum of the model's weights, bit for bit and name for name. It is
    the same in every layout.
    """
    _, holdings = written_by(parameters, state, me, {})
    weights = [holding for holding in holdings if holding.kind is StateKind.WEIGHT]
    totals = WeightedSums().of_each((tensors[of.name, of.kind], of.blocks) for of in weights)
    return sum(_odd_number(of.name) * total for of, total in zip(weights, totals, strict=True)) % (1 << 64)


class StateFiles:
    """The files of one save on this node, by name with their checksums.

    Raises FileCorrupt when one is missing or has no readable head, and SavedStateRefused when they belong to two saves.
    """

    def __init__(self, folder: Path, checksums: Mapping[str, str]) -> None:
        self._folder = folder
        self._checksums = dict(sorted(checksums.items()))
        self._good: set[str] = set()
        self._saved = SavedState({file: _head(folder / file) for file in self._checksums})
        self.checksum = combined_checksum(checksums)

    @property
    def mesh(self) -> Mesh:
        """The layout in which the state was saved."""
        return self._saved.mesh

    @property
    def notes(self) -> Mapping[str, JsonValue]:
        """The notes of the writers."""
        return self._saved.notes

    def read(self, *, parameters: Sequence[Parameter], state: State, me: int, targets: Tensors) -> None:
        """Fill all flat tensors that a rank of `state` holds. Without an optimizer in `state`, the weights alone.

        Raises:
        - SavedStateRefused when another model or no optimizer state was saved;
        - FileCorrupt;
        - SourceMissing when needed files are not named;
        - ValueError when a target does not match `state`.
        """
        holdings, copies = self._planned(parameters, state, me)
        for holding in holdings:
            _checked(holding, targets, "to read into")
        with torch.no_grad():
            self._fill(copies, targets, first=state.mesh.ranks.index(me))

    def read_whole(self, parameters: Sequence[Parameter]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each unsharded weight, without padding. Raises the errors of `read`, once iteration begins.

        A weight that lies whole in one file is a view of the file, which stays as it is and readable without its name.
        """
        alone = State(Mesh(Layout(), (0,), even_chunks(self.mesh.num_layers, pp=1)))
        holdings, copies = self._planned(parameters, alone, 0)
        by_name: defaultdict[str, list[RegionCopy]] = defaultdict(list)
        for copy in copies:
            by_name[copy.name].append(copy)
        for parameter, holding in zip(parameters, holdings, strict=True):
            key = (parameter.name, StateKind.WEIGHT)
            of_one, size = by_name[parameter.name], torch.Size(parameter.shape).numel()
            if len(of_one) == 1 and _is_run(of_one[0], size):
                flat = self._tensor(of_one[0])
            else:
                flat = torch.empty(holding.num_elements, dtype=self._tensor(of_one[0]).dtype)
                self._fill(of_one, {key: flat}, first=0)
            yield parameter.name, flat[:size].view(parameter.shape)

    def _planned(
        self, parameters: Sequence[Parameter], state: State, me: int
    ) -> tuple[tuple[Holding, ...], tuple[RegionCopy, ...]]:
        self._saved.check_model(parameters)
        source = self._saved.source(with_optimizer=state.optimizer is not None)
        part = Planner(parameters, source, state).part(me)
        return part.target_holdings, part.receives

    def _fill(self, copies: Iterable[RegionCopy], targets: Tensors, *, first: int) -> None:
        by_file: defaultdict[str, defaultdict[TensorKey, list[RegionCopy]]] = defaultdict(lambda: defaultdict(list))
        for copy in copies:
            by_file[self._saved.file_of(copy)][copy.name, copy.kind].append(copy)
        for file in by_file:
            self._check(file)
        names = sorted(by_file)
        begin = first % len(names) if names else 0
        jobs: list[tuple[list[RegionCopy], Tensors]] = []
        for file in (*names[begin:], *names[:begin]):
            with safe_open(self._folder / file, framework="pt") as opened:
                for key, of_tensor in by_file[file].items():
                    source, target = opened.get_tensor(_key(*key)), targets[key]
                    if source.dtype != target.dtype:
                        raise ValueError(
                            f"{_key(*key)} was saved in {source.dtype}, the target is {target.dtype}: both must agree"
                        )
                    jobs.append((of_tensor, {key: source}))
        for of_tensor, sources in jobs:
            copy_regions(of_tensor, sources, targets)

    def _tensor(self, copy: RegionCopy) -> torch.Tensor:
        """The whole tensor of which this is a region, mapped. Its file is checked first."""
        file = self._saved.file_of(copy)
        self._check(file)
        with safe_open(self._folder / file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(_key(copy.name, copy.kind))
            return tensor

    def _check(self, file: str) -> None:
        path, want = self._folder / file, self._checksums[file]
        if file not in self._good:
            if (found := file_checksum(path, like=want)) != want:
                raise FileCorrupt(f"file {path} has checksum {found}, its writer recorded {want}: fetch it again")
            self._good.add(file)


def _head(path: Path) -> tuple[FileHead, tuple[TensorKey, ...]]:
    if not path.is_file():
        raise FileCorrupt(f"file {path} is missing: its version was dropped or never arrived")
    try:
        with safe_open(path, framework="pt") as opened:
            head = _HEAD.validate_json((opened.metadata() or {})[_HEAD_KEY])
            keys = [key.split("/", 1) for key in opened.keys()]  # noqa: SIM118 - not a mapping
            return head, tuple((name, StateKind(kind)) for kind, name in keys)
    except (SafetensorError, KeyError, ValueError) as error:
        raise FileCorrupt(f"file {path} has no readable head ({error}): fetch it again") from error


def _checked(holding: Holding, tensors: Tensors, verb: str) -> torch.Tensor:
    tensor = tensors.get((holding.name, holding.kind))
    found = None if tensor is None else (tuple(tensor.shape), tensor.itemsize, tensor.is_contiguous())
    if tensor is None or found != ((holding.num_elements,), holding.itemsize, True):
        raise ValueError(
            f"{holding.name} {holding.kind} {verb}: {holding.num_elements} elements of {holding.itemsize} bytes, flat, "
            f"are expected, and there is {'nothing' if tensor is None else f'{tensor.dtype} {tuple(tensor.shape)}'}"
        )
    return tensor


def _is_run(copy: RegionCopy, size: int) -> bool:
    """Whether the copy is of the first `size` elements at both ends, in their order."""
    strides = {copy.source_stride, copy.target_stride}
    begins = copy.source_offset == copy.target_offset == 0
    return begins and copy.num_elements == size and (copy.rows == 1 or strides == {copy.cols})


def _odd_number(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) | 1


def _key(name: str, kind: StateKind) -> str:
    return f"{kind}/{name}"
