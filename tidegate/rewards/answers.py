"""Rewards that compare a response with the right answers in the data. A response is right if it matches any of them.

`math_verify` runs in a worker process, because sympy may never finish with a strange expression.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

MATH_VERIFY = "tidegate.rewards.answers:math_verify"
_NOT_INSTALLED = "the reward math_verify needs the math-verify package: install what requirements/data.txt lists"


def right_answers(answer: Any) -> list[str]:
    """The texts of one answer, or of a list of answers. Raises ValueError for anything but texts and numbers."""
    found = answer if isinstance(answer, list) and answer else [answer]
    if all(isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in found):
        return [str(each) for each in found]
    raise ValueError(f"the answer is {answer!r:.60}: it must be a text or a number, or a list of them")


def exact_match(*, response: str, answer: Any) -> float:
    """1 when the response equals an answer, apart from surrounding white space, else 0."""
    return float(response.strip() in {right.strip() for right in right_answers(answer)})


def math_verify(*, response: str, answer: Any) -> float:
    """1 when the response's last expression equals an answer's, by the `math-verify` package, else 0.

    Raises ValueError when an answer holds no expression, and ImportError without the package.
    """
    parse, verify = _math_verify()
    # Turn off its own limits, which are alarms of whole seconds: the worker has a limit.
    expression = parse(response, parsing_timeout=None)
    for right in right_answers(answer):
        gold = parse(_as_latex(right), parsing_timeout=None)
        if not gold:
            raise ValueError(f"the answer {right!r:.60} holds no expression that math-verify can read")
        if verify(gold, expression, timeout_seconds=None):
            return 1.0
    return 0.0


def refuse_without_math_verify(find: Callable[[str], object | None] = find_spec) -> None:
    """Raise ValueError without the package. This does not import it, which takes a second."""
    if find("math_verify") is None:
        raise ValueError(_NOT_INSTALLED)


def _as_latex(answer: str) -> str:
    """The answer, marked as mathematics unless it is already: a bare 1/2 or x^2 is put into a box."""
    return answer if "\\boxed" in answer or "$" in answer else f"\\boxed{{{answer}}}"


def _math_verify() -> tuple[Callable[..., Any], Callable[..., Any]]:
    try:
        import math_verify as package
    except ImportError as error:
        raise ImportError(f"{_NOT_INSTALLED} ({error})") from error
    return package.parse, package.verify
