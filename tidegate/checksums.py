"""Checksums of files and of sets of files: hex BLAKE2b-128 over the bytes on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_READ_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A file as its writer describes it. Readers check the file against this."""

    file: str
    size_bytes: int
    checksum: str


def file_checksum(path: Path) -> str:
    """The checksum of the file's bytes. Raises OSError."""
    digest = hashlib.blake2b(digest_size=16)
    with path.open("rb") as stream:
        while block := stream.read(_READ_BYTES):
            digest.update(block)
    return digest.hexdigest()


def combined_checksum(files: Mapping[str, str]) -> str:
    """The checksum of a set of files, from their checksums by name. The order of `files` does not matter."""
    digest = hashlib.blake2b(digest_size=16)
    for file in sorted(files):
        digest.update(f"{file}={files[file]}\n".encode())
    return digest.hexdigest()
