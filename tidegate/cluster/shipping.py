"""What a job takes along when it is submitted: the small files that its config names, as they were when it was checked.

    OUTPUT_DIR/.files/DIGEST/...    on the storage of the jobs, named by what is in it

A job may wait for hours, and a person goes on editing. Other machines may not have the person's folders. So the code of
a reward, the tokenizer and the template are copied, and the config names the copies. A reward's code is its whole
folder, because it may import or read what is beside it. A folder that is too large stays where it is, and so do models
and data.

Invariants:
- What is shipped is what was there. [test_shipping: goes_on_with_what_was_there]
- Equal files have one copy, which stays while a config names it. [test_shipping: equal_files_have_one_copy]
  [test_shipping: that_nobody_names]
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from tidegate.cluster.folder import ClusterFolder
from tidegate.config.job_config import JobConfig
from tidegate.config.sections.data import TOKENIZERS_TEMPLATE, RewardName
from tidegate.huggingface.checkpoint import TOKENIZER
from tidegate.sizes import size_text
from tidegate.tasks.tokenizer_config import CONFIG_FILE, TEMPLATE_FILE

NAME = ".files"
MOST_BYTES = 16 * 2**20
"""Of a folder. A tokenizer of 150,000 tokens has 11 MB."""
MOST_FILES = 1000
UNUSED_S = 24 * 3600.0
"""A copy that no config names goes after that: its job may not be in the queue yet."""


class _Stays(Exception):
    """Why a folder is not copied."""


def shipped(config: JobConfig, *, notes: list[str]) -> JobConfig:
    """The config that names copies. `notes` gets a line for what is not copied."""
    output_dir = Path(config.output_dir)
    values = config.model_dump(mode="json")

    def ship(key: str, folder: Path, names: Iterable[str] | None = None) -> Path:
        """The copy of these files of the folder, or of all; or the folder itself."""
        try:
            files = _all(folder, leave=output_dir) if names is None else {Path(name): folder / name for name in names}
            return _copy(files, output_dir / NAME)
        except (_Stays, OSError) as why:
            notes.append(f"{key} is not copied, but read when the job starts: {folder}: {why}")
            return folder

    for number, reward in enumerate(values["rewards"]):
        if reward["name"] != RewardName.FUNCTION:
            continue
        module, _, function = reward["path"].rpartition(":")
        if os.path.isabs(module):
            file = Path(module)
            reward["path"] = f"{ship(f'rewards.{number}.path', file.parent) / file.name}:{function}"
        if reward["import_from"]:
            reward["import_from"] = str(ship(f"rewards.{number}.import_from", Path(reward["import_from"])))
    if config.model.tokenizer:
        file = Path(config.model.tokenizer)
        file = file / TOKENIZER if file.is_dir() else file
        beside = [name for name in (CONFIG_FILE, TEMPLATE_FILE) if (file.parent / name).is_file()]
        values["model"]["tokenizer"] = str(ship("model.tokenizer", file.parent, (file.name, *beside)) / file.name)
    if config.data is not None and config.data.chat_template not in ("", TOKENIZERS_TEMPLATE):
        file = Path(config.data.chat_template)
        values["data"]["chat_template"] = str(ship("data.chat_template", file.parent, (file.name,)) / file.name)
    _remove_unused(output_dir)
    return JobConfig.from_json(json.dumps(values))


def _all(folder: Path, *, leave: Path) -> dict[Path, Path]:
    """The files below a folder, but for hidden ones, by their names in it. `leave`: a folder that is left out."""
    found: dict[Path, Path] = {}
    for at, folders, names in os.walk(folder, followlinks=True):
        here = Path(at)
        folders[:] = [
            name for name in sorted(folders) if not _is_hidden(name) and (here / name).resolve() != leave.resolve()
        ]
        own = [here / name for name in names if not _is_hidden(name)]
        found |= {path.relative_to(folder): path for path in own if path.is_file()}
        if len(found) > MOST_FILES:
            raise _Stays(f"it has more than {MOST_FILES} files")
    return found


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == "__pycache__"


def _copy(files: Mapping[Path, Path], root: Path) -> Path:
    """The folder of a copy."""
    if sum(file.stat().st_size for file in files.values()) > MOST_BYTES:
        raise _Stays(f"it has more than {size_text(MOST_BYTES)}")
    contents = {name: file.read_bytes() for name, file in files.items()}
    digest = hashlib.blake2b(digest_size=16)
    for name, content in sorted(contents.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    own = root / digest.hexdigest()
    if own.is_dir():
        os.utime(own)  # its job may not be in the queue yet
        return own
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    partial = root / f".{secrets.token_hex(8)}"
    for name, content in contents.items():
        (partial / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        (partial / name).write_bytes(content)
    try:
        partial.rename(own)
    except OSError:  # somebody else was quicker
        shutil.rmtree(partial)
        if not own.is_dir():
            raise
    return own


def _remove_unused(output_dir: Path) -> None:
    """Removes old copies that no config of a job names, in its folder or in the queue."""
    oldest_s = time.time() - UNUSED_S
    with suppress(FileNotFoundError):  # another submission removes the same
        old = [path for path in (output_dir / NAME).iterdir() if path.stat().st_mtime < oldest_s]
        if old:
            configs = [*output_dir.glob("*/config.json"), *ClusterFolder.of(output_dir).queue.glob("configs/*.json")]
            named = [path.read_text() for path in configs]
            for path in old:
                if not any(path.name in text for text in named):
                    shutil.rmtree(path, ignore_errors=True)
