"""`tidegate get WHAT --watch`: what the command prints, again as it changes, until Ctrl-C.

On a terminal it replaces what was there. Elsewhere each change is printed after the others, so that a program reads
one line of JSON, or one document of YAML, for each.

Invariant: what has not changed is not printed again. [test_watch: printed_once]
"""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout
from typing import NoReturn

from cli.top import BEAT_S, CLEAR


async def watch(command: Callable[[], Awaitable[int]], *, between: str = "", beat_s: float = BEAT_S) -> NoReturn:
    """`command` prints on stdout. What it raises ends the watch. `between`: what is printed between two pages, but not
    on a terminal."""
    out = sys.stdout
    begin, shown = CLEAR if out.isatty() else "", None
    while True:
        with redirect_stdout(io.StringIO()) as page:
            await command()
        if (text := page.getvalue()) != shown:
            print(f"{begin}{text}", end="", file=out, flush=True)
            shown = text
            begin = begin or between
        await asyncio.sleep(beat_s)
