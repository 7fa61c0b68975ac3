"""Reward functions for the tests, good ones and bad ones."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

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
        case ["return", text]:
            return {"None": None, "nan": float("nan"), "text": "1.0", "list": [1.0], "true": True}[text]
    return 0.5


async def later(response: str) -> float:
    return 1.0


def nameless(response: str, /) -> float:
    return 1.0
