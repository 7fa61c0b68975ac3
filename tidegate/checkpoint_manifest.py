"""The manifest of a checkpoint: a JSON file with a checksum of its own content.

Files of ranks have their checksums in it. A flipped bit in the manifest itself would else be taken for a number of
iterations or a learning rate.

Invariant: a manifest that differs from what was written is refused. [test_checkpoint_manifest: every_flipped_bit]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tidegate.json_text import parse_json, typed

MANIFEST = "manifest.json"
_CHECKSUM = "checksum"
_CHECKSUM_BYTES = 16


def manifest_text(fields: Mapping[str, Any]) -> str:
    """The text of the file."""
    return json.dumps({**fields, _CHECKSUM: _checksum(fields)}, indent=1)


def read_manifest(folder: Path) -> dict[str, Any]:
    """The fields, without the checksum. One without a checksum is of an earlier release. OSError. ValueError: it is
    damaged."""
    fields = typed(dict, parse_json((folder / MANIFEST).read_bytes()), MANIFEST)
    written = fields.pop(_CHECKSUM, None)
    if written not in (None, found := _checksum(fields)):
        raise ValueError(f"{MANIFEST} has checksum {found}, its writer noted {written}")
    return fields


def _checksum(fields: Mapping[str, Any]) -> str:
    return blake2b(json.dumps(fields, sort_keys=True).encode(), digest_size=_CHECKSUM_BYTES).hexdigest()
