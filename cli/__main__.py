"""The `tidegate` command's entry: 130 for a Ctrl-C, from the first import on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_STOPPED_BY_CTRL_C = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code; see `cli.command`."""
    try:
        # Imported here, where a Ctrl-C is caught: it takes a moment.
        from cli.command import execute

        return execute(arguments)
    except KeyboardInterrupt:
        return _STOPPED_BY_CTRL_C


if __name__ == "__main__":
    sys.exit(main())
