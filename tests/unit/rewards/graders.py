"""Reward functions for the tests, good ones and bad ones."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np

NUMBER = 3


def length(response: str) -> int:
    return len(response)


def everything(*, prompt: Any, response: str, answer: Any, **columns: Any) -> float:
    """1 when it got the arguments that the tests pass."""
    arguments = (prompt, response, answer, columns)
    return float(arguments == ([{"role": "user", "content": "2 + 2"}], "4 für ⅘", {"value": 4}, {"level": [1, None]}))


def one_of_many(response: str, level: float, weight: float = 2.0) -> float:
    return level * weight


def misbehaving(response: str, prompt: str) -> Any:
    """Act as the response says."""
    match response.split():
        case ["hang"]:
            threading.Event().wait()
        case ["hang", "with", "child", pipe]:
            child = subprocess.Popen([sys.executable, "-c", "import threading; threading.Event().wait()"])
            Path(pipe).write_text(str(child.pid))
            threading.Event().wait()
        case ["exit", status]:
            os._exit(int(status))
        case ["leave"]:
            sys.exit("had enough")
        case ["die"]:
            os.kill(os.getpid(), signal.SIGKILL)
        case ["raise"]:
            raise KeyError("no such unit")
        case ["print"]:
            print("not an answer")
            os.write(1, b"{}\n")
            return 1
        case ["pid"]:
            return os.getpid()
        case ["has", variable]:
            return variable in os.environ
        case ["return", text]:
            return {
                "None": None,
                "nan": float("nan"),
                "text": "1.0",
                "list": [1.0],
                "dict": {"score": 1.0},
                "array": np.array([1.0, 2.0]),
                "true": True,
            }[text]
    return 0.5


async def later(response: str) -> float:
    """The words of the response, or an error after the first await."""
    await asyncio.sleep(0)
    if response == "raise":
        raise KeyError("no such unit")
    return len(response.split())


async def same_loop(response: str, loops: list[asyncio.AbstractEventLoop] = []) -> bool:  # noqa: B006 - kept on purpose
    """Whether every call so far had the same event loop, as a client with connections needs."""
    loops.append(asyncio.get_running_loop())
    return len(set(loops)) == 1


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """verl's signature. 1 when it got the arguments that the tests pass."""
    return float((data_source, solution_str, ground_truth, extra_info) == ("gsm8k", "4", "four", {"index": 7}))


def compute_score_anywhere(data_source: str, solution_str: str, ground_truth: str, extra_info: Any) -> float:
    """1 when it got what data without verl's columns has."""
    return float((data_source, solution_str, ground_truth, extra_info) == ("", "4", "four", {}))


def nameless(response: str, /) -> float:
    return 1.0
