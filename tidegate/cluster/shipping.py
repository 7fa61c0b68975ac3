"""What a job takes along when it is submitted: the small files that its config names, as they were when it was checked.

    OUTPUT_DIR/.files/DIGEST/...    on the storage of the jobs, named by what is in it

A job may wait for hours, and a person goes on editing. Other machines may not have the person's folders. So the code of
a reward, the tokenizer and the template are copied, and the config names the copies. A reward's code is its whole
folder, because it may import or read what is beside it. A folder that is too large stays where it is, and so do models
and data. Whether a copy does what the original does, the check of the job tells.

A person may submit from a machine without that storage. Then the files travel with the call, in place of their copies
(`packed`), and are copied where it arrives (`unpacked`).

Invariants:
- What is shipped is what was there. [test_shipping: goes_on_with_what_was_there]
- What travels becomes the copy that would have been made there. [test_shipping: the_same_as_its_copy]
- Equal files have one copy, which is mended where somebody has changed it. [test_shipping: equal_files_have_one_copy]
  [test_shipping: that_was_changed]
- A copy stays while a config names it. [test_shipping: that_nobody_names]
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path, PurePosixPath
from typing import Any, Protocol

from tidegate.cluster.folder import ClusterFolder
from tidegate.config.job_config import ConfigError, JobConfig
from tidegate.config.sections.data import TOKENIZERS_TEMPLATE, RewardName
from tidegate.huggingface.checkpoint import TOKENIZER
from tidegate.launcher.claim import sync_folder
from tidegate.short_lists import counted
from tidegate.sizes import size_text
from tidegate.tasks.tokenizer_config import CONFIG_FILE, TEMPLATE_FILE

NAME = ".files"
MOST_BYTES = 16 * 2**20
"""The most that a folder may have. A tokenizer of 150,000 tokens has 11 MB."""
MOST_FILES = 1000
_COPY = re.compile(rf"/{re.escape(NAME)}/(\w+)")
"""What a config says of a copy."""
UNUSED_S = 7 * 24 * 3600.0
"""A copy that no config names goes after that: its job may not be in the queue yet, or in a backup of it."""
SHIPPED = Path("/tidegate-shipped")
"""Stands in a config for the folder of the copies, where it travels."""
_LOCK = "lock"


class _Stays(Exception):
    """Why a folder is not copied."""


@dataclass(frozen=True, slots=True)
class File:
    content: bytes
    is_program: bool


Files = Mapping[Path, File]
"""Those of a folder, by their names in it."""


def shipped(config: JobConfig, *, notes: list[str]) -> JobConfig:
    """The config that names copies. `notes` gets a line for each folder: what is copied of it, or why nothing is."""
    output_dir = Path(config.output_dir)
    found = _with_copies(config, lambda files: _copy(files, output_dir / NAME), notes)
    _remove_unused(output_dir)
    return found


def packed(config: JobConfig, *, notes: list[str]) -> tuple[JobConfig, list[Files]]:
    """The config with `SHIPPED` in place of the copies' folder, and the folders that travel with it. A folder that is
    not on this machine is the other one's. ConfigError for one that is here and cannot travel."""
    travelling: dict[str, Files] = {}

    def take(files: Files) -> Path:
        digest = _digest(files)
        travelling[digest] = files
        return SHIPPED / digest

    return _with_copies(config, take, notes, travels=True), list(travelling.values())


def unpacked(config: str, folders: Iterable[Files], output_dir: Path) -> str:
    """Makes the copies of what has travelled. Gives the config, as JSON, that names them. ValueError: they are none."""
    for files in folders:
        if len(files) > MOST_FILES or sum(len(file.content) for file in files.values()) > MOST_BYTES:
            raise ValueError(f"a folder of the job has more than {size_text(MOST_BYTES)}, or than {MOST_FILES} files")
        for name in files:
            parts = PurePosixPath(name).parts
            if not parts or name.is_absolute() or ".." in parts:
                raise ValueError(f"{str(name)!r} is no name of a file in a folder")
        _copy(files, output_dir / NAME)
    _remove_unused(output_dir)
    return config.replace(f"{SHIPPED}/", f"{json.dumps(str(output_dir / NAME))[1:-1]}/")


def _with_copies(
    config: JobConfig, keep: Callable[[Files], Path], notes: list[str], *, travels: bool = False
) -> JobConfig:
    """`keep` gives the folder that the config is to name for these files. OSError. `travels`: what stays on this
    machine is not where the job reads it."""
    output_dir = Path(config.output_dir)
    values = config.model_dump(mode="json")

    def ship(key: str, folder: Path, names: Iterable[str] | None = None) -> Path:
        """The copy of these files of the folder, or of all; or the folder itself."""
        root = output_dir / NAME
        if root in folder.parents:
            with suppress(OSError), _locked(root):
                os.utime(root / folder.relative_to(root).parts[0])
            return folder
        if travels and not (folder if names is None else folder / next(iter(names))).exists():
            return folder
        try:
            paths = _all(folder, leave=output_dir) if names is None else {Path(name): folder / name for name in names}
            if sum(path.stat().st_size for path in paths.values()) > MOST_BYTES:
                raise _Stays(f"it has more than {size_text(MOST_BYTES)}")
            files = {name: File(path.read_bytes(), os.access(path, os.X_OK)) for name, path in paths.items()}
            copy = keep(files)
        except (_Stays, OSError) as why:
            if travels:
                raise ConfigError(
                    f"{key}: {folder} cannot travel with the job: {why}; put it on the storage of the cluster, and "
                    "name that path"
                ) from why
            notes.append(f"{key} is not copied, but read when the job starts: {folder}: {why}")
            return folder
        num_bytes = sum(len(file.content) for file in files.values())
        notes.append(f"{key}: {counted(len(files), 'file')} of {folder} ({num_bytes:,} bytes) are copied for the job")
        return copy

    for number, reward in enumerate(values["rewards"]):
        if reward["name"] == RewardName.FUNCTION:
            _ship_reward(reward, f"rewards.{number}", ship)
    if config.model.tokenizer:
        file = Path(config.model.tokenizer)
        file = file / TOKENIZER if file.is_dir() else file
        beside = [name for name in (CONFIG_FILE, TEMPLATE_FILE) if (file.parent / name).is_file()]
        values["model"]["tokenizer"] = str(ship("model.tokenizer", file.parent, (file.name, *beside)) / file.name)
    if config.data is not None and config.data.chat_template not in ("", TOKENIZERS_TEMPLATE):
        file = Path(config.data.chat_template)
        values["data"]["chat_template"] = str(ship("data.chat_template", file.parent, (file.name,)) / file.name)
    return JobConfig.from_json(json.dumps(values))


class _Ship(Protocol):
    def __call__(self, key: str, folder: Path) -> Path: ...


def _ship_reward(reward: dict[str, Any], key: str, ship: _Ship) -> None:
    """Changes the paths of a function's reward."""
    module, _, function = reward["path"].rpartition(":")
    base = Path(reward["import_from"]) if reward["import_from"] else None
    if module.endswith(".py"):
        file = Path(os.path.normpath((base or Path("/")) / module))
        if base is None or base not in file.parents or any(map(_is_hidden, file.relative_to(base).parts)):
            reward["path"] = f"{ship(key, file.parent) / file.name}:{function}"
            return
        copy = ship(key, base)
        reward["path"] = f"{copy / file.relative_to(base)}:{function}" if os.path.isabs(module) else reward["path"]
    elif base is not None and PathFinder.find_spec(module.partition(".")[0], [str(base)]) is not None:
        copy = ship(key, base)
    else:
        return  # of a package that is installed
    reward["import_from"] = str(copy)


def _all(folder: Path, *, leave: Path) -> dict[Path, Path]:
    """The files below a folder, but for hidden ones, by their names in it. `leave`: a folder that is left out."""
    found: dict[Path, Path] = {}
    seen = {leave.resolve(), folder.resolve()}
    for at, folders, names in os.walk(folder, followlinks=True):
        here = Path(at)
        deeper = []
        for name in sorted(folders):
            if not _is_hidden(name) and (real := (here / name).resolve()) not in seen:
                seen.add(real)
                deeper.append(name)
        folders[:] = deeper
        own = [here / name for name in names if not _is_hidden(name)]
        found |= {path.relative_to(folder): path for path in own if path.is_file()}
        if len(found) > MOST_FILES:
            raise _Stays(f"it has more than {MOST_FILES} files")
    return found


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _digest(files: Files) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for name, file in sorted(files.items()):
        digest.update(os.fsencode(name) + f"\0{file.is_program:d}{len(file.content)}\0".encode() + file.content)
    return digest.hexdigest()


def _copy(files: Files, root: Path) -> Path:
    """The folder of a copy. OSError."""
    own = root / _digest(files)
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with _locked(root):
        if own.is_dir():
            if all(_has(own / name, file) for name, file in files.items()):
                os.utime(own)
                return own
            _remove(own)
        partial = root / f".{secrets.token_hex(8)}"
        partial.mkdir(mode=0o700)
        try:
            for name, file in files.items():
                path = partial / name
                path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                with path.open("xb") as stream:
                    stream.write(file.content)
                    stream.flush()
                    os.fsync(stream.fileno())
                path.chmod(0o500 if file.is_program else 0o400)
            partial.rename(own)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        sync_folder(root)
    return own


def _has(path: Path, file: File) -> bool:
    try:
        return path.read_bytes() == file.content and bool(path.stat().st_mode & stat.S_IXUSR) is file.is_program
    except OSError:
        return False


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Nobody else copies or removes within the block."""
    fd = os.open(root / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _remove(copy: Path) -> None:
    """Under another name first: what is left of a removal that was killed is no copy."""
    aside = copy.with_name(f".{secrets.token_hex(8)}")
    copy.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)


def _remove_unused(output_dir: Path) -> None:
    """Removes old copies that no config of a job names, in its folder or in the queue; none where a config cannot be
    read."""
    root, oldest_s = output_dir / NAME, time.time() - UNUSED_S
    with suppress(OSError, ValueError), _locked(root):
        old = [path for path in root.iterdir() if path.name != _LOCK and path.stat().st_mtime < oldest_s]
        if old:
            configs = [*output_dir.glob("*/config.json"), *ClusterFolder.of(output_dir).queue.glob("configs/*.json")]
            named = {name for path in configs for name in _COPY.findall(path.read_text())}
            for path in old:
                if path.name not in named:
                    _remove(path)
