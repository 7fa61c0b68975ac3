"""Checksums of files and of sets of files: hex BLAKE2b-128, over the bytes as they lie on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """What a writer tells of its file, for readers to hold it to."""

    file: str
    size_bytes: int
    checksum: str


def file_checksum(path: Path) -> str:
    """Of the file's bytes. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def combined_checksum(files: Mapping[str, str]) -> str:
    """Of a set of files, from their checksums by name; independent of their order."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        digest.update(f"{file}={files[file]}\n".encode())
    return digest.hexdigest()
