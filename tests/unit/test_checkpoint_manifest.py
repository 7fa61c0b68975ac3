"""A checkpoint's manifest, whole and damaged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tidegate.checkpoint_manifest import MANIFEST, manifest_text, read_manifest

FIELDS = {"next_iteration": 3, "lr": '{"logical_minibatch": 4}', "files": [{"file": "rank0", "checksum": "ab"}]}


def test_what_was_written_is_read(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(manifest_text(FIELDS))
    assert read_manifest(tmp_path) == FIELDS


def test_every_flipped_bit_of_a_value_is_refused(tmp_path: Path) -> None:
    whole = manifest_text(FIELDS).encode()
    for at in range(len(whole)):
        flipped = bytearray(whole)
        flipped[at] ^= 1
        (tmp_path / MANIFEST).write_bytes(flipped)
        try:
            found = read_manifest(tmp_path)
        except ValueError:
            continue
        # A bit in a space, or in the name of the checksum itself, changes no value.
        assert {key: found.get(key) for key in FIELDS} == FIELDS


def test_a_manifest_of_an_earlier_release_has_no_checksum(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(json.dumps(FIELDS))
    assert read_manifest(tmp_path) == FIELDS


def test_the_refusal_has_both_checksums(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text(manifest_text(FIELDS).replace('"next_iteration": 3', '"next_iteration": 4'))
    with pytest.raises(ValueError, match=r"manifest\.json has checksum [0-9a-f]{32}, its writer noted [0-9a-f]{32}"):
        read_manifest(tmp_path)
