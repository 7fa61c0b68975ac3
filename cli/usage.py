"""Reports wrong command lines in the form of every other wrong input: one line, with its remedy.

Invariant: the line names the argument, its value, and the allowed values or where they are listed. argparse's usage
lines, which would hide it, appear only with `--help`. [test_command: wrong_usage_is_one]
"""

from __future__ import annotations

import argparse
import difflib
import reprlib
from typing import NoReturn

BAD_USAGE = 2
"""The exit code of a command with a wrong argument or config."""
MOST_SEED = 2**32 - 1


class BadUsage(ValueError):
    """The arguments do not make a command."""


class Parser(argparse.ArgumentParser):
    """A parser that raises BadUsage. Its subcommands have parsers of the same class."""

    def error(self, message: str) -> NoReturn:
        """Raises BadUsage in place of an exit."""
        raise BadUsage(f"{message.removeprefix('argument ')}; `{self.prog} --help` lists the arguments")

    def _check_value(self, action: argparse.Action, value: object) -> None:
        """Like argparse's, but the error names the nearest choice."""
        if action.choices is None or value in action.choices:
            return
        known = [str(choice) for choice in action.choices]
        near = difflib.get_close_matches(str(value), known, n=1)
        hint = f"; the nearest is {near[0]!r}" if near else ""
        raise argparse.ArgumentError(action, f"{value!r} is not one of {', '.join(known)}{hint}")


def count(text: str) -> int:
    """A number of things, at least 1. ArgumentTypeError for any other text."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_SEED)) and int(text) >= 1):
        raise argparse.ArgumentTypeError(
            f"{reprlib.repr(text)} is not a whole number of at least 1: give one such as 200"
        )
    return int(text)


def seed(text: str) -> int:
    """The seed of random draws. ArgumentTypeError for a number that numpy does not accept."""
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MOST_SEED)) and int(text) <= MOST_SEED):
        raise argparse.ArgumentTypeError(f"{reprlib.repr(text)} is not a whole number from 0 to {MOST_SEED}")
    return int(text)
