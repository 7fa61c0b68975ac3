"""The entry of the `tidegate` command. A Ctrl-C gives exit code 130, from the first import on."""

from __future__ import annotations

import sys
from collections.abc import Sequence

_STOPPED_BY_CTRL_C = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code; see `cli.command`."""
    try:
        # Import here, where a Ctrl-C is caught: the import takes a moment.
        from cli.command import execute

        return execute(arguments)
    except KeyboardInterrupt:
        return _STOPPED_BY_CTRL_C


if __name__ == "__main__":
    sys.exit(main())
