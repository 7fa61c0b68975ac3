"""What a person typed wrong on the command line, in the form of every other wrong input: one line, with its remedy.

Invariant: a line says which argument, what was given, and what may stand there or where that is said; argparse's lines
of usage, which bury it, are left to `--help`.
"""

from __future__ import annotations

import argparse
import difflib
import reprlib
from typing import NoReturn

MOST_SEED = 2**32 - 1


class BadUsage(ValueError):
    """Arguments that are no command."""


class Parser(argparse.ArgumentParser):
    """Its subcommands are parsed by others of the same kind."""

    def error(self, message: str) -> NoReturn:
        """BadUsage, in place of an exit."""
        raise BadUsage(f"{message.removeprefix('argument ')}; `{self.prog} --help` says what may be given")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """As argparse's, with the nearest choice."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(known)}{hint}")


def seed(text: str) -> int:
    """Of random draws; ArgumentTypeError for what numpy takes for none."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_SEED)) and int(text) <= MOST_SEED):
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is no whole number from 0 to {MOST_SEED}")
    return int(text)
