"""Rewards that compare a response with the right answer: a response is right when it fits any that the data gives.

`math_verify` is called in a worker process: what sympy makes of a strange expression may take for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

MATH_VERIFY = "tidegate.rewards.answers:math_verify"
_NOT_INSTALLED = "the reward math_verify needs the math-verify package: install what requirements/data.txt lists"


def right_answers(answer: Any) -> list[str]:
    """The texts of one answer, or of a list of them. ValueError for anything that is neither text nor number."""
    found = answer if isinstance(answer, list) and answer else [answer]
    if all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in found):
        return [str(each) for each in found]
    raise ValueError(f"the answer is {answer!r:.60}: it must be a text or a number, or a list of them")


def exact_match(*, response: str, answer: Any) -> float:
    """1 when the response is the answer, but for white space around them."""
    return float(response.strip() in {right.strip() for right in right_answers(answer)})


def math_verify(*, response: str, answer: Any) -> float:
    """1 when the response's last expression equals the answer's, by the `math-verify` package.

    ValueError when the answer holds no expression; ImportError without the package.
    """
    parse, verify = _math_verify()
    # Its own limits are alarms of whole seconds; the worker has one.
    written = parse(response, parsing_timeout=None)
    for right in right_answers(answer):
        gold = parse(_as_latex(right), parsing_timeout=None)
        if not gold:
            raise ValueError(f"the answer {right!r:.60} holds no expression that math-verify can read")
        if verify(gold, written, timeout_seconds=None):
            return 1.0
    return 0.0


def refuse_without_math_verify(find: Callable[[str], object | None] = find_spec) -> None:
    """ValueError without the package, which is not imported: that takes a second."""
    if find("math_verify") is None:
        raise ValueError(_NOT_INSTALLED)


def _as_latex(answer: str) -> str:
    """An answer that is marked as mathematics stays; a bare one such as 1/2 or x^2 is marked."""
    return answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"


def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        import math_verify as package
    except ImportError as error:
        raise ImportError(f"{_NOT_INSTALLED} ({error})") from error
    return package.parse, package.verify
