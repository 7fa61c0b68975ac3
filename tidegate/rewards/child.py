"""The process of a reward worker: imports functions, then calls them on request, one at a time.

    python -m tidegate.rewards.child FD

FD is one end of a socket pair; only the parent has the other end. Each line is a JSON object. The messages are:
1. {"functions": [{"path", "import_from"}, ...]}, answered by {"ready": [{"required"}, ...]} or {"fault"}.
2. Any number of {"function", "arguments"}, each answered by {"value"} or {"error"}.

Invariants:
- The output that a function prints goes to the log, never into an answer. [test_pool: prints_is_no_answer]
- A function gets the arguments that it names, or all if it accepts any. [test_pool: gets_the_arguments_that_it_names]
- The process ends with its parent. [test_pool: dies_with_its_parent]
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

_MAX_ERROR_CHARS = 500


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function of a reward. `accepted` is None when it accepts any argument name."""

    call: Callable[..., Any]
    required: tuple[str, ...]
    accepted: frozenset[str] | None

    def value(self, arguments: dict[str, Any]) -> float:
        """The reward. Raises ValueError unless it is a finite number, and any exception of the function."""
        chosen = {name: item for name, item in arguments.items() if self.accepted is None or name in self.accepted}
        result = self.call(**chosen)
        # Accept numbers of numpy and torch, which convert to float. Refuse a text that reads like a number.
        if isinstance(result, str) or not hasattr(result, "__float__"):
            raise ValueError(f"returned {result!r:.60}, which is no number")
        if not math.isfinite(number := float(result)):
            raise ValueError(f"returned {number}: a reward is a finite number")
        return number


def load_function(path: str, import_from: str) -> RewardFunction:
    """Import a function. Raises ValueError when it cannot be imported, called, or called with argument names."""
    module, _, name = path.partition(":")
    if import_from and import_from not in sys.path:
        sys.path.append(import_from)
    try:
        found = getattr(importlib.import_module(module), name)
    except (Exception, SystemExit) as error:  # a module is a program, which may raise any exception
        raise ValueError(f"{path} cannot be imported: {_description(error)}") from error
    _check_origin(path, import_from)
    if not callable(found):
        raise ValueError(f"{path} is a {type(found).__name__} and cannot be called: name a function")
    if inspect.iscoroutinefunction(found):
        raise ValueError(f"{path} is async: name a plain function; each runs in a process of its own")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not show its arguments ({error}): wrap it in a plain function") from error
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
    """Raise ValueError if the process has a module of this name from another folder: it would be called silently."""
    top = path.partition(":")[0].partition(".")[0]
    expected = PathFinder.find_spec(top, [import_from]) if import_from else None
    found = getattr(sys.modules[top], "__file__", None)
    if expected is None or expected.origin is None or (found and os.path.samefile(expected.origin, found)):
        return
    raise ValueError(
        f"{path}: {top} is {found or 'a part of Python'} in this process, but the reward needs {expected.origin}: "
        "rename one of them"
    )


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the parent closes its end."""
    functions: list[RewardFunction] = []
    for line in requests:
        message = json.loads(line)
        if "functions" in message:
            answer, functions = _load(message["functions"])
        else:
            answer = _call(functions[message["function"]], message["arguments"])
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


def _load(paths: list[dict[str, str]]) -> tuple[dict[str, Any], list[RewardFunction]]:
    try:
        functions = [load_function(each["path"], each["import_from"]) for each in paths]
    except ValueError as error:
        return {"fault": str(error)}, []
    return {"ready": [{"required": each.required} for each in functions]}, functions


def _call(function: RewardFunction, arguments: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"value": function.value(arguments)}
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge: the answer reports any exception of the function
        return {"error": _description(error)}


def _description(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


def main() -> None:
    fd = int(sys.argv[1])
    # Do not pass it to processes that a function starts: the parent sees the end when the last holder closes it.
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "r", closefd=False) as requests, os.fdopen(fd, "w", closefd=False) as answers:
        serve(requests, answers)


if __name__ == "__main__":
    main()
