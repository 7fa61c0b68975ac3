"""Chat templates render messages to the text that a model reads, as `transformers` renders them.

A template gets `messages`, `add_generation_prompt` (true), the special tokens by name, and the names that the config
adds. It may use loop controls, `raise_exception`, `tojson` and `{% generation %}`. The author of the model wrote its
code, so it runs in Jinja's sandbox.

`strftime_now` is not defined, though transformers has it: a prompt with today's date would change when a job resumes.
Templates that use it have a fixed date for the case that it is missing.

Invariant: a rendering depends only on the template, the messages and the names. [test_prompts: template_sees_no_clock]
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
    """A template. Messages call it `name`. The constructor raises ValueError when the source is no template."""

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
        """The text, with the opening of the assistant's turn at its end. Raises ValueError when the template fails."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **self._names)
        except Exception as error:  # a template is a program, which may raise any exception
            raise ValueError(f"{self._name} does not render: {type(error).__name__}: {error}") from error


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training. It renders to its content."""

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
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
