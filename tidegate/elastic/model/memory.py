"""Arenas hold the tensors of one skeleton, so that their memory can be given back and taken again without new tensors.

An arena hands out flat tensors while a skeleton is built. `release` gives the memory back, and `materialise` takes it
again, filled with 0. The tensors and all views of them stay the same objects. Nobody may read or write them while they
are released.

- `OwnArena`: memory of this process on any device. It resizes the tensors' storages to nothing and back.
- `SharedArena`: one file on a tmpfs, mapped once and shared, so that other processes of the host read it in place. The
  file is sparse and as long as the machine's memory. It has pages only for the tensors; a release punches them out. The
  file belongs to the node, not to its process: it outlives a dead process until somebody unlinks it.

Invariants:
- Tensors start at multiples of ALIGNMENT_BYTES. [test_memory: every_tensor_is_aligned]
- A shared tensor's address never changes. [test_memory: tensors_and_views_survive_a_release]
- A full tmpfs raises ArenaFull at `empty` or `materialise`. It is never a bus error later.
  [test_memory: pages_are_taken_before]
- A reader never writes. [test_memory: sees_writes_and_cannot_write]
- A reader reads the file that has the path's name now. [test_memory: notices_that_a_file_was_replaced]
"""

from __future__ import annotations

import errno
import mmap
import os
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

_MADV_POPULATE_READ, _MADV_POPULATE_WRITE = 22, 23
"""Available since Linux 5.14. Python has no names for them."""
ALIGNMENT_BYTES = 64
"""A cache line. No vector instruction and no padding of Megatron's needs a larger alignment."""


class ArenaFull(RuntimeError):
    """There is no room for an arena's tensors."""


class Place(NamedTuple):
    """The place of a shared tensor, for other processes of the host."""

    path: str
    offset_bytes: int
    num_elements: int
    dtype: torch.dtype


class Arena(Protocol):
    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors of the arena, released or not."""

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat tensor of undefined content. Raises ArenaFull. Must not be called while the arena is released."""

    def release(self) -> None:
        """Give the memory back. A second call does nothing."""

    def materialise(self) -> None:
        """Take the memory again, filled with 0. Does nothing without a release.

        Raises ArenaFull; the arena then stays released.
        """


class OwnArena:
    """Memory of this process on `device`. A tensor's address may change over a release."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensors: list[torch.Tensor] = []
        self._is_released = False

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors)

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        assert not self._is_released
        tensor = torch.empty(num_elements, dtype=dtype, device=self._device)
        self._tensors.append(tensor)
        return tensor

    def release(self) -> None:
        for tensor in self._tensors:
            tensor.untyped_storage().resize_(0)
        self._is_released = True

    def materialise(self) -> None:
        if not self._is_released:
            return
        try:
            for tensor in self._tensors:
                tensor.untyped_storage().resize_(tensor.nbytes)
                tensor.zero_()
        except RuntimeError as error:  # torch's allocators raise nothing more exact on every device
            self.release()
            raise ArenaFull(f"no memory on {self._device} for an arena of {self.num_bytes} bytes: {error}") from error
        self._is_released = False


class SharedArena:
    """A file at `path`, which must not exist yet: an existing file may be all that is left of a dead rank."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        # No tmpfs holds more than the machine's memory; the length costs addresses and no pages.
        capacity_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        os.ftruncate(self._file, capacity_bytes)
        self._memory = mmap.mmap(self._file, capacity_bytes)
        self._end_bytes = 0
        self._is_released = False

    @property
    def path(self) -> Path:
        return self._path

    @property
    def num_bytes(self) -> int:
        return self._end_bytes

    def empty(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        assert not self._is_released
        size_bytes = num_elements * dtype.itemsize
        if size_bytes == 0:
            return torch.empty(0, dtype=dtype)
        start = self._end_bytes
        end = start + -(-size_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        self._take_pages(start, end)
        self._end_bytes = end
        return torch.frombuffer(self._memory, dtype=dtype, count=num_elements, offset=start)

    def place(self, tensor: torch.Tensor) -> Place:
        """The place of a contiguous tensor in this arena, whole or a view."""
        start = tensor.data_ptr() - np.frombuffer(self._memory, np.uint8, count=1).ctypes.data
        assert tensor.is_contiguous()
        assert 0 <= start <= start + tensor.nbytes <= self._end_bytes
        return Place(str(self._path), start, tensor.numel(), tensor.dtype)

    def release(self) -> None:
        if self._end_bytes and not self._is_released:
            self._memory.madvise(mmap.MADV_REMOVE, 0, _whole_pages(self._end_bytes))
        self._is_released = True

    def materialise(self) -> None:
        if self._is_released:
            self._take_pages(0, self._end_bytes)
            self._is_released = False

    def unlink(self) -> None:
        """Remove the file's name. Its pages go when the last tensor or reader of it is deleted."""
        self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """The last call. The file stays, and tensors that are still referenced stay readable and writable."""
        os.close(self._file)

    def _take_pages(self, start: int, end: int) -> None:
        """Take pages now: at the first touch a full tmpfs would be a bus error."""
        if start == end:
            return
        if end > len(self._memory):
            raise self._full(end - start)
        try:
            os.posix_fallocate(self._file, start, end - start)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise self._full(end - start) from error
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        # Mapping all pages at once takes two thirds of the time of as many page faults. Older kernels refuse it.
        with suppress(OSError):
            self._memory.madvise(_MADV_POPULATE_WRITE, first, _whole_pages(end) - first)

    def _full(self, more_bytes: int) -> ArenaFull:
        space = os.statvfs(self._path.parent)
        return ArenaFull(
            f"{self._path.parent} has {space.f_bavail * space.f_frsize} bytes free of "
            f"{space.f_blocks * space.f_frsize}, and an arena there needs {more_bytes} more: give it more room "
            "(docker run --shm-size, or mount -o remount,size=), or choose another tmpfs"
        )


class ArenaReader:
    """Maps other processes' arenas read-only, each file once, while it has its name. Not safe for several threads."""

    def __init__(self) -> None:
        self._mapped: dict[str, tuple[tuple[int, int], npt.NDArray[np.uint8], mmap.mmap]] = {}

    def bytes_at(self, path: str) -> npt.NDArray[np.uint8]:
        """The file that has this name now, as one read-only array. Raises FileNotFoundError.

        The array keeps its mapping alive, even after the file has lost its name.
        """
        found = os.stat(path)
        identity = (found.st_dev, found.st_ino)
        known = self._mapped.get(path)
        if known is None or known[0] != identity:
            self._forget_nameless()
            self._mapped[path] = known = _mapped(path)
        return known[1]

    def array_at(self, place: Place) -> npt.NDArray[Any]:
        """A shared tensor's bits, as unsigned integers of its itemsize."""
        return self._slice(place).view(f"u{place.dtype.itemsize}")

    def map_pages(self, place: Place) -> None:
        """Map a shared tensor's pages now. Otherwise the first read of each takes a page fault."""
        found = self._slice(place)
        if found.size == 0:
            return
        first = place.offset_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        end = place.offset_bytes + found.size
        # Older kernels refuse it.
        with suppress(OSError):
            self._mapped[place.path][2].madvise(_MADV_POPULATE_READ, first, _whole_pages(end) - first)

    def tensor_at(self, place: Place) -> torch.Tensor:
        """A shared tensor. A process that writes to it gets a segmentation fault."""
        found = self._slice(place)
        if place.num_elements == 0:
            return torch.empty(0, dtype=place.dtype)
        return torch.from_numpy(memory_at(found.ctypes.data, (found.size,), (1,), owner=found)).view(place.dtype)

    def _forget_nameless(self) -> None:
        """Drop the mappings of files that have lost their name, so that their memory can be freed."""
        for path, (identity, _, _) in list(self._mapped.items()):
            if _identity(path) != identity:
                del self._mapped[path]

    def _slice(self, place: Place) -> npt.NDArray[np.uint8]:
        end_bytes = place.offset_bytes + place.num_elements * place.dtype.itemsize
        found = self.bytes_at(place.path)
        if not 0 <= place.offset_bytes <= end_bytes <= found.size:
            raise ValueError(f"{place.path} has {found.size} bytes, and {place} is not in it")
        return found[place.offset_bytes : end_bytes]


def memory_at(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...], *, owner: object
) -> npt.NDArray[np.uint8]:
    """The bytes at an address that `owner` keeps valid. Nothing checks that they exist."""
    return np.asarray(_Memory(address, shape, strides, owner))


class _Memory:
    """Implements numpy's array interface over memory that numpy has not allocated.

    The array is marked writable, because torch warns about every read-only array.
    """

    def __init__(self, address: int, shape: tuple[int, ...], strides: tuple[int, ...], owner: object) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (address, False),
            "shape": shape,
            "strides": strides,
        }
        self._owner = owner


def _identity(path: str) -> tuple[int, int] | None:
    """The file's device and inode; None where no file has this name."""
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _mapped(path: str) -> tuple[tuple[int, int], npt.NDArray[np.uint8], mmap.mmap]:
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(file)
        memory = mmap.mmap(file, found.st_size, prot=mmap.PROT_READ)
        return (found.st_dev, found.st_ino), np.frombuffer(memory, np.uint8), memory
    finally:
        os.close(file)


def _whole_pages(size_bytes: int) -> int:
    return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
