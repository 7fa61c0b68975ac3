"""Chat templates: messages -> the text that a model reads, as `transformers` renders them.

A template sees `messages`, `add_generation_prompt` (true), the special tokens by name and the names that the config
adds; it may use loop controls, `raise_exception`, `tojson` and `{% generation %}`. It is code of whoever made the
model: it runs in Jinja's sandbox. Invariant: a rendering is a function of template, messages and names. So
`strftime_now` is not defined, though transformers has it: a prompt with today's date would change when a job is
resumed, and templates that ask for it bring a fixed date for where it is missing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplate:
    """`name` is how faults call it. ValueError when the source is no template."""

    def __init__(self, source: str, *, name: str, names: Mapping[str, Any]) -> None:
        self._name = name
        self._names = dict(names)
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ValueError(f"{name} is no chat template: {error}{f' (line {line})' if line else ''}") from error

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """With the opening of the assistant's turn at its end. ValueError when the template does not take them."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except Exception as error:  # a template is a program: it may raise whatever Python has
            raise ValueError(f"{self._name} does not render: {type(error).__name__}: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks what an assistant wrote, for training on it; what is rendered is its inside."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it from the class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own would escape what HTML must not hold."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
