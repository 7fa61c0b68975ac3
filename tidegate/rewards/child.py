"""A reward worker: imports functions, then calls them as it is asked, one call at a time.

    python -m tidegate.rewards.child FD

FD is one end of a socket pair that only the parent has; a line each way is a JSON object. First comes
{"functions": [{"path", "import_from"}, ...]}, answered by {"ready": [{"required"}, ...]} or {"fault"}; then
{"function", "arguments"}, answered by {"value"} or {"error"}. Invariants: what a function prints goes to the log and
never into an answer; a function gets the arguments it names, or all if it takes any; the process ends with its parent.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from typing import Any, TextIO

_TOLD_CHARS = 500


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """`accepted` is None when it takes any name."""

    call: Callable[..., Any]
    required: tuple[str, ...]
    accepted: frozenset[str] | None

    def value(self, arguments: dict[str, Any]) -> float:
        """ValueError when it returned no finite number; whatever it raises."""
        chosen = {name: item for name, item in arguments.items() if self.accepted is None or name in self.accepted}
        found = self.call(**chosen)
        # numpy's and torch's numbers are no floats and become some; a text that reads like one does not.
        if isinstance(found, str) or not hasattr(found, "__float__"):
            raise ValueError(f"returned {found!r:.60}, which is no number")
        if not math.isfinite(number := float(found)):
            raise ValueError(f"returned {number}: a reward is a finite number")
        return number


def load_function(path: str, import_from: str) -> RewardFunction:
    """ValueError when it does not import, is not callable, or cannot be called with names."""
    module, _, name = path.partition(":")
    if import_from and import_from not in sys.path:
        sys.path.append(import_from)
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module is a program: it may raise whatever Python has
        raise ValueError(f"{path} cannot be imported: {_told(error)}") from error
    _check_origin(path, import_from)
    if not callable(found):
        raise ValueError(f"{path} is a {type(found).__name__} and cannot be called: name a function")
    if inspect.iscoroutinefunction(found):
        raise ValueError(f"{path} is async: name a plain function; each runs in a process of its own")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not tell its arguments ({error}): wrap it in a plain function") from error
    if any(each.kind is each.POSITIONAL_ONLY and each.default is each.empty for each in parameters):
        raise ValueError(f"{path} has arguments without names: it is called with names such as prompt=, response=")
    named = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters)
    return RewardFunction(
        found,
        required=tuple(each.name for each in named if each.default is each.empty),
        accepted=None if takes_any else frozenset(each.name for each in named),
    )


def _check_origin(path: str, import_from: str) -> None:
    """A process has one module of a name: without this, another folder's would be called without a word."""
    top = path.partition(":")[0].partition(".")[0]
    meant = PathFinder.find_spec(top, [import_from]) if import_from else None
    found = getattr(sys.modules[top], "__file__", None)
    if meant is None or meant.origin is None or (found is not None and os.path.samefile(meant.origin, found)):
        return
    raise ValueError(
        f"{path}: {top} is {found or 'of Python itself'} in this process, and {meant.origin} is meant: rename one of "
        "the two"
    )


def serve(asked: TextIO, answers: TextIO) -> None:
    """Returns when the parent has closed its end."""
    functions: list[RewardFunction] = []
    for line in asked:
        message = json.loads(line)
        if "functions" in message:
            answer, functions = _loaded(message["functions"])
        else:
            answer = _called(functions[message["function"]], message["arguments"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _loaded(wanted: list[dict[str, str]]) -> tuple[dict[str, Any], list[RewardFunction]]:
    try:
        functions = [load_function(each["path"], each["import_from"]) for each in wanted]
    except ValueError as error:
        return {"fault": str(error)}, []
    return {"ready": [{"required": each.required} for each in functions]}, functions


def _called(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": function.value(arguments)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge: whatever the function raised is told
        return {"error": _told(error)}


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_TOLD_CHARS]


def main() -> None:
    fd = int(sys.argv[1])
    # Not for what a function starts: the parent learns of the end when the last holder closes it.
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "r", closefd=False) as asked, os.fdopen(fd, "w", closefd=False) as answers:
        serve(asked, answers)


if __name__ == "__main__":
    main()
