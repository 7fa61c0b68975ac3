"""`${...}` stands for the value of another key or the result of a function. Anything else is a fault."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from tidegate.config.reading.layers import Layer, Origin
from tidegate.rlinf.references import without_references

VALUES: dict[str, Any] = {
    "a": {"number": 3, "truth": True, "text": "x", "deep": {"list": [1, 2]}},
    "b": {"number": 2},
}


def resolved(text: Any, **more: Any) -> Any:
    layer = Layer({**VALUES, "at": {"text": text, **more}}, {("at", "text"): Origin("r.yaml:7", Path(), 0)})
    return without_references(layer).values["at"]["text"]


RESOLVED = {
    "a number stays a number": ("${a.number}", 3),
    "a truth stays one": ("${a.truth}", True),
    "a whole section": ("${a.deep}", {"list": [1, 2]}),
    "a place in a list": ("${a.deep.list.1}", 2),
    "within a text": ("run-${a.number}x${b.number}-${a.text}", "run-3x2-x"),
    "a difference": ("${subtract:${a.number}, ${b.number}}", 1),
    "a product with a number": ("${multiply:${a.number},4}", 12),
    "a whole quotient": ("${int_div:${a.number},${b.number}}", 1),
    "a denial": ("${not:${a.truth}}", False),
    "a function within a function": ("${subtract:${multiply:${a.number},2},${b.number}}", 4),
    "a key in the same section": ("${.other}", 5),
    "a key one section up": ("${..b.number}", 2),
    "a reference to a reference": ("${.through}", 3),
    "in a list": (["${a.number}", {"k": "${a.text}"}], [3, {"k": "x"}]),
    "a dollar alone": ("costs 5$", "costs 5$"),
}


@pytest.mark.parametrize("case", RESOLVED)
def test_a_reference_has_the_value_and_the_type_of_its_key(case: str) -> None:
    text, want = RESOLVED[case]
    found = resolved(text, other=5, through="${a.number}")
    assert found == want
    assert type(found) is type(want)


WRONG = {
    "a key that is not there": ("${a.nothing}", "no key a.nothing is given: give it, or write the value"),
    "itself": ("${at.text}", "it refers to itself (at.text -> at.text)"),
    "one that refers back": ("${.back}", "it refers to itself (at.text -> at.back -> at.text)"),
    "another function": ("${oc.env:HOME}", "'oc.env' is no known function (known: multiply, int_div, subtract, not)"),
    "no closing": ("${a.number", "a ${ is not closed by }"),
    "too few values": ("${subtract:${a.number}}", "subtract of 3: it takes 2"),
    "values of the wrong kind": ("${subtract:${a.text},1}", "subtract of 'x', 1: it takes numbers"),
    "a division by zero": ("${int_div:1,0}", "int_div of 1, 0: "),
}


@pytest.mark.parametrize("case", WRONG)
def test_an_unresolvable_reference_is_refused_with_its_text_and_line(case: str) -> None:
    text, want = WRONG[case]
    with pytest.raises(ValueError, match=re.escape(want)) as refused:
        resolved(text, back="${.text}")
    (line, *_) = str(refused.value).splitlines()
    assert line.startswith(f"at.text={text!r}: ")
    assert line.endswith("[r.yaml:7]")
