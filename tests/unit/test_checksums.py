"""The checksums of files, and of sets of files."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from tidegate.checksums import FileDigest, combined_checksum, file_checksum

CONTENTS = [b"", b"weights", bytes(range(256)) * 9000]


@pytest.fixture(params=CONTENTS, ids=["nothing", "a few bytes", "more than a block"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "rank0"
    path.write_bytes(request.param)
    return path


def test_a_files_checksum_is_marked_and_another_for_every_flipped_bit(file: Path) -> None:
    want = file_checksum(file)
    assert want.startswith("xxh3:")
    assert file_checksum(file, like=want) == want
    content = bytearray(file.read_bytes())
    for at in {0, len(content) // 2, len(content) - 1} if content else set():
        for bit in range(8):
            content[at] ^= 1 << bit
            file.write_bytes(content)
            assert file_checksum(file) != want
            content[at] ^= 1 << bit


def test_a_checksum_of_an_earlier_release_is_compared_by_its_own_kind(file: Path) -> None:
    earlier = hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
    assert file_checksum(file, like=earlier) == earlier


def test_bytes_that_come_in_parts_have_the_files_checksum(file: Path) -> None:
    content = file.read_bytes()
    for like in ("", file_checksum(file), hashlib.blake2b(content, digest_size=16).hexdigest()):
        digest = FileDigest(like)
        for at in range(0, len(content), 1000):
            digest.update(content[at : at + 1000])
        assert digest.checksum() == file_checksum(file, like=like)


def test_the_checksum_of_a_set_depends_on_names_and_contents_and_no_order() -> None:
    files = {"a": "1", "b": "2"}
    assert combined_checksum(files) == combined_checksum(dict(reversed(files.items())))
    assert combined_checksum(files) != combined_checksum({"a": "2", "b": "1"})
