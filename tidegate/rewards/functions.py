"""A user's reward function: how it is found, which arguments it gets, and what counts as its value.

The config names it in one of two forms:
- `package.module:function`, from the installed packages and one more folder.
- `/path/file.py:function`, from the file. A relative path begins in that folder.

A function in verl's form names `solution_str`. It also gets the names that verl uses: see `_in_verls_names`.

Invariants:
- A function gets the arguments that it names, or all if it accepts any. [test_pool: gets_the_arguments_that_it_names]
- The value of an async function is what it returns when awaited. [test_functions: async_function_is_awaited]
- Each file is a module of its own. [test_functions: files_of_like_names]
- Only a finite number is a value. [test_pool: only_a_finite_number_is_a_reward]
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import math
import os
import re
import sys
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.util import module_from_spec, spec_from_file_location
from itertools import dropwhile
from pathlib import Path
from types import ModuleType
from typing import Any

_MAX_ERROR_CHARS = 500
_MAX_TRACEBACK_CHARS = 2000
"""A failed sample carries its traceback on the stream. The end of a traceback says more than its start."""
_NOT_THE_USERS = (str(Path(__file__).parent), str(Path(asyncio.__file__).parent))
_SOLUTION, _TRUTH = "solution_str", "ground_truth"
_MISSING_IN_VERLS_FORM: dict[str, Any] = {"data_source": "", "extra_info": {}}


class NoReward(ValueError):
    """The function returned something else than a finite number."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A function of a reward. `named` are its arguments with names; `takes_any` says that it accepts others too.

    `required` are the arguments that it cannot be called without. `file` is its source.
    """

    call: Callable[..., Any]
    required: tuple[str, ...]
    named: frozenset[str]
    takes_any: bool
    file: str

    def value(self, arguments: dict[str, Any], loop: asyncio.Runner) -> float:
        """The reward. Raises NoReward unless it is a finite number, and any exception of the function."""
        given = _in_verls_names(arguments) if _SOLUTION in self.named else arguments
        result = self.call(**{name: item for name, item in given.items() if self.takes_any or name in self.named})
        if inspect.isawaitable(result):
            result = loop.run(_awaited(result))
        return _number(result)


def load_function(path: str, import_from: str) -> RewardFunction:
    """Import a function. Raises ValueError when it cannot be imported, called, or called with argument names."""
    place, _, name = path.rpartition(":")
    if import_from and import_from not in sys.path:
        sys.path.append(import_from)
    is_file = place.endswith(".py")
    try:
        module = _module_of_file(Path(import_from, place)) if is_file else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a module is a program, which may raise any exception
        raise ValueError(f"{path} cannot be imported: {description(error)}") from error
    if not hasattr(module, name):
        where = getattr(module, "__file__", None) or place
        raise ValueError(f"{path}: {where} has no function {name!r}; name one that it defines")
    found = getattr(module, name)
    if not is_file:
        _check_origin(path, import_from)
    if not callable(found):
        raise ValueError(f"{path} is a {type(found).__name__} and cannot be called: name a function")
    try:
        parameters = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} does not show its arguments ({error}): wrap it in a plain function") from error
    if any(each.kind is each.POSITIONAL_ONLY and each.default is each.empty for each in parameters):
        raise ValueError(f"{path} has arguments without names: it is called with names such as prompt=, response=")
    by_name = [each for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
    named = frozenset(each.name for each in by_name)
    always_given = {_SOLUTION, _TRUTH, *_MISSING_IN_VERLS_FORM} if _SOLUTION in named else set()
    return RewardFunction(
        found,
        required=tuple(each.name for each in by_name if each.default is each.empty and each.name not in always_given),
        named=named,
        takes_any=any(each.kind is each.VAR_KEYWORD for each in parameters),
        file=getattr(getattr(inspect.unwrap(found), "__code__", None), "co_filename", ""),
    )


def description(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARS]


def raised_at(error: BaseException, file: str) -> tuple[str, str]:
    """Where a function raised, such as ` at /path/grading.py:7 in score`, and the traceback from its first line on.

    The place is the deepest line in `file`, else the deepest line at all. It is empty where no line of the user's ran.
    """
    shown = traceback.TracebackException.from_exception(error)
    frames = list(dropwhile(lambda frame: frame.filename.startswith(_NOT_THE_USERS), shown.stack))
    shown.stack = traceback.StackSummary.from_list(frames)
    text = "".join(shown.format()).rstrip()
    if len(text) > _MAX_TRACEBACK_CHARS:
        text = f"...{text[-_MAX_TRACEBACK_CHARS:]}"
    if not frames:
        return "", text
    deepest = ([frame for frame in frames if frame.filename == file] or frames)[-1]
    return f" at {deepest.filename}:{deepest.lineno} in {deepest.name}", text


def _in_verls_names(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments, also by verl's names. A column of such a name takes precedence.

    `data_source` and `extra_info` are columns of verl's data. Without them they are an empty text and an empty object.
    """
    return {**_MISSING_IN_VERLS_FORM, _SOLUTION: arguments["response"], _TRUTH: arguments.get("answer"), **arguments}


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def _number(result: Any) -> float:
    # Accept numbers of numpy and torch, which convert to float. Refuse a text that reads like a number.
    if isinstance(result, str) or not hasattr(result, "__float__"):
        raise NoReward(_no_number(result))
    try:
        number = float(result)
    except Exception as error:  # an array of several numbers raises what its package likes
        raise NoReward(_no_number(result)) from error
    if not math.isfinite(number):
        raise NoReward(f"returned {number}: a reward is a finite number")
    return number


def _no_number(result: Any) -> str:
    kind = type(result).__name__
    return f"returned {result!r:.60}, which is no number but of type {kind}: a reward is one finite number"


def _module_of_file(file: Path) -> ModuleType:
    """Run the file as a module under a name of its own. Its folder joins the import path, as for a script."""
    # A digest of the path: `r/math_a.py` and `r/math/a.py` are the same word without their signs.
    digest = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()[:16]
    name = re.sub(r"\W", "_", file.stem) + f"_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = spec_from_file_location(name, file)
    assert spec is not None, "a .py file has a loader"
    assert spec.loader is not None, "a .py file has a loader"
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    module = module_from_spec(spec)
    # Register it first, as an import does: dataclasses look their module up.
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


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
