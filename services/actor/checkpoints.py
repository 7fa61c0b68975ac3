"""Job checkpoints on disk: all that a resume needs, atomic, the newest few kept.

A checkpoint is a folder `inc<incarnation>-it<next iteration>` with one file per rank and `manifest.json`. The manifest
names the layout, the ledgers, the versions and every file's checksum. A save takes these steps:
1. The ranks write their files into a partial folder.
2. The manifest is written there and synced to disk.
3. The partial folder is renamed to its final name.

Removing older checkpoints is a step of its own.

Invariants:
- A folder with its final name is complete. [test_checkpoints: save_that_did_not_end]
- A folder with its final name never changes. [test_checkpoints: repeat_changes_nothing]
- All files of a checkpoint are checked before it is used. [test_checkpoints: damaged_file_is_named]
- The newest checkpoint is never removed. [test_checkpoints: newest_stay]
- A checkpoint that cannot be used is set aside, not removed. [test_checkpoints: falls_back_to_the_newest_sound]
"""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from services.actor.ledger import LedgerError, SampleLedger
from tidegate.checkpoint_manifest import MANIFEST, manifest_text, read_manifest
from tidegate.checkpoint_names import checkpoint_name, place_of, set_aside
from tidegate.checksums import WrittenFile, file_checksum
from tidegate.codec import check_file_name
from tidegate.json_text import typed, whole_number
from tidegate.lr.checkpoint import decoded, encoded
from tidegate.lr.errors import ForeignCheckpoint, LrError
from tidegate.lr.progress import LrLedger
from tidegate.types import Layout

FORMAT_VERSION = 3
_FORMAT_WITHOUT_LR = 2
"""The format before this one. Its learning rate followed the number of trained samples."""
_PARTIAL = ".partial"


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names the file and the remedy."""


class CheckpointDamaged(CheckpointError):
    """Its contents are not those that were saved, or are gone: no later try finds them."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of a checkpoint besides the ranks' files."""

    next_iteration: int
    version: int
    layout: Layout
    ledger: SampleLedger
    files: tuple[WrittenFile, ...]
    lr: LrLedger | None = None
    """None where the checkpoint predates the learning-rate ledger, or where its counters do not name their unit."""

    @property
    def name(self) -> str:
        return checkpoint_name(self.ledger.incarnation, self.next_iteration)


class CheckpointStore:
    """The checkpoints of one job, in one folder that all its nodes share."""

    def __init__(self, folder: Path, *, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def begin(self) -> Path:
        """An empty folder for the ranks' files. This removes the remains of an unfinished save."""
        partial = self._folder / _PARTIAL
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, checkpoint: Checkpoint) -> Path:
        """Give the partial folder its final name.

        Raises CheckpointError when a file differs from its rank's report.
        """
        partial = self._folder / _PARTIAL
        _check_files(partial, checkpoint.files)
        manifest = {
            "format": FORMAT_VERSION,
            "next_iteration": checkpoint.next_iteration,
            "version": checkpoint.version,
            "layout": asdict(checkpoint.layout),
            "ledger": checkpoint.ledger.to_json(),
            "lr": None if checkpoint.lr is None else encoded(checkpoint.lr),
            "files": [asdict(file) for file in checkpoint.files],
        }
        _write_durably(partial / MANIFEST, manifest_text(manifest))
        final = self._folder / checkpoint.name
        if final.exists():  # avoid a change: a repeated command finds its checkpoint saved
            shutil.rmtree(partial)
            return final
        os.rename(partial, final)
        _sync_folder(self._folder)
        return final

    def prune(self) -> None:
        """Remove the oldest beyond the number to keep.

        Call it only after the newest was announced, for a resume needs it."""
        for name in self.names()[: -self._keep]:
            shutil.rmtree(self._folder / name)

    def names(self) -> list[str]:
        """The complete checkpoints, oldest first."""
        named = ((place_of(path.parent.name), path.parent.name) for path in self._folder.glob(f"*/{MANIFEST}"))
        return [name for _, name in sorted((place, name) for place, name in named if place is not None)]

    def path(self, name: str) -> Path:
        return self._folder / name

    def load_newest(self, name: str) -> tuple[Checkpoint, tuple[str, ...]]:
        """The checkpoint of this name, or the newest older one that is sound. Returns the faults of those passed over.

        Those are set aside. Raises CheckpointError for one that is of another format or cannot be read now, and
        CheckpointDamaged, that of the first, where none is sound: then nothing was changed."""
        place = place_of(name)
        older = [each for each in self.names() if place and _is_before(place_of(each), place)]
        faults: list[CheckpointDamaged] = []
        bad: list[str] = []
        for each in (name, *reversed(older)):
            try:
                found = self.load(each)
            except CheckpointDamaged as error:
                faults.append(error)
                bad.append(each)
                continue
            for damaged in bad:
                set_aside(self._folder / damaged)
            return found, tuple(map(str, faults))
        raise faults[0]

    def load(self, name: str) -> Checkpoint:
        """Read and check a checkpoint.

        Raises CheckpointError when it is incomplete, damaged or of an unknown format."""
        if place_of(name) is None:
            raise CheckpointError(f"{name!r} is no name of a checkpoint; complete: {', '.join(self.names()) or 'none'}")
        folder = self._folder / name
        try:
            raw = read_manifest(folder)
        except (FileNotFoundError, ValueError) as error:
            known = ", ".join(self.names()) or "none"
            raise CheckpointDamaged(
                f"checkpoint {folder} has no readable manifest ({error}); complete: {known}"
            ) from error
        except OSError as error:
            raise CheckpointError(f"checkpoint {folder} cannot be read now ({error}): see to its disk") from error
        if not isinstance(raw.get("format"), int):
            raise CheckpointDamaged(f"checkpoint {folder} has a damaged manifest, without its format")
        if raw["format"] not in (_FORMAT_WITHOUT_LR, FORMAT_VERSION):
            raise CheckpointError(
                f"checkpoint {folder} has format {raw.get('format')}; this version reads {_FORMAT_WITHOUT_LR} and "
                f"{FORMAT_VERSION}"
            )
        try:
            ledger = SampleLedger.from_json(raw["ledger"])
            lr = _lr_ledger(raw.get("lr"))
            files = tuple(map(_written_file, raw["files"]))
            next_iteration, version = (whole_number(raw[name], name) for name in ("next_iteration", "version"))
            layout = Layout(**{axis: typed(int, size, axis) for axis, size in raw["layout"].items()})
        except (LedgerError, LrError) as error:
            raise CheckpointDamaged(f"checkpoint {folder}: {error}; resume from another one") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointDamaged(
                f"checkpoint {folder} has a damaged manifest ({type(error).__name__}: {error}); resume from another one"
            ) from error
        _check_files(folder, files)
        return Checkpoint(next_iteration, version, layout, ledger, files, lr)


def _written_file(fields: Any) -> WrittenFile:
    """ValueError for a name that is a path: nothing outside of the checkpoint is read. KeyError, TypeError."""
    written = WrittenFile(
        file=typed(str, fields["file"], "file"),
        size_bytes=whole_number(fields["size_bytes"], "size_bytes"),
        checksum=typed(str, fields["checksum"], "checksum"),
    )
    check_file_name(written.file, field="file")
    return written


def _lr_ledger(written: Any) -> LrLedger | None:
    """None where the counters do not name their unit: the job's `legacy_policy` then decides how to use them."""
    try:
        return decoded(written) if written is not None else None
    except ForeignCheckpoint:
        return None


def _is_before(place: tuple[int, int] | None, other: tuple[int, int]) -> bool:
    """Whether it is an earlier state of the same lineage. A later incarnation superseded what is ahead of it."""
    return place is not None and place < other and place[1] <= other[1]


def files_of(folder: Path) -> dict[str, str]:
    """The checksums of a complete checkpoint's files, by name. Raises CheckpointError."""
    try:
        return {file.file: file.checksum for file in map(_written_file, read_manifest(folder)["files"])}
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {folder} has no readable manifest ({error})") from error


def _check_files(folder: Path, files: tuple[WrittenFile, ...]) -> None:
    for file in files:
        path = folder / file.file
        if not path.is_file():
            raise CheckpointDamaged(f"checkpoint file {path} is missing; resume from another checkpoint")
        if (found := file_checksum(path, like=file.checksum)) != file.checksum:
            raise CheckpointDamaged(
                f"checkpoint file {path} has checksum {found}, its writer reported {file.checksum}; "
                "resume from another checkpoint"
            )


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
