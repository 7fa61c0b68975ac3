"""The process of a reward worker: imports functions, then calls them on request, one at a time.

    python -m tidegate.rewards.child FD

FD is one end of a socket pair; only the parent has the other end. Each line is a JSON object. The messages are:
1. {"functions": [{"path", "import_from"}, ...]}, answered by {"ready": [{"required"}, ...]} or {"fault"}.
2. Any number of {"function", "arguments"}, each answered by {"value"} or {"error", "traceback"}.

Invariants:
- The output that a function prints goes to the log, never into an answer. [test_pool: prints_is_no_answer]
- The process ends with its parent. [test_pool: dies_with_its_parent]
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, TextIO

from tidegate.rewards.functions import NoReward, RewardFunction, description, load_function, raised_at


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answer requests until the parent closes its end."""
    functions: list[RewardFunction] = []
    # One event loop for all calls: async functions keep connections from one call to the next.
    with asyncio.Runner() as loop:
        for line in requests:
            message = json.loads(line)
            if "functions" in message:
                answer, functions = _load(message["functions"])
            else:
                answer = _call(functions[message["function"]], message["arguments"], loop)
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def _load(paths: list[dict[str, str]]) -> tuple[dict[str, Any], list[RewardFunction]]:
    try:
        functions = [load_function(each["path"], each["import_from"]) for each in paths]
    except ValueError as error:
        return {"fault": str(error)}, []
    return {"ready": [{"required": each.required} for each in functions]}, functions


def _call(function: RewardFunction, arguments: dict[str, Any], loop: asyncio.Runner) -> dict[str, Any]:
    try:
        return {"value": function.value(arguments, loop)}
    except NoReward as error:
        return {"error": str(error), "traceback": ""}
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001 - the edge: the answer reports any exception of the function
        place, text = raised_at(error, function.file)
        return {"error": f"raised {description(error)}{place}", "traceback": text}


def main() -> None:
    fd = int(sys.argv[1])
    # Do not pass it to processes that a function starts: the parent sees the end when the last holder closes it.
    os.set_inheritable(fd, False)
    with os.fdopen(fd, "r", closefd=False) as requests, os.fdopen(fd, "w", closefd=False) as answers:
        serve(requests, answers)


if __name__ == "__main__":
    main()
