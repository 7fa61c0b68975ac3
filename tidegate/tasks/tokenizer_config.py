"""A Hugging Face `tokenizer_config.json`: the names of the special tokens, and the chat template.

The template is a text, or a list of named ones of which `default` is taken; a `chat_template.jinja` beside the file
goes before both, as in `transformers`. Invariant: what is saved loads to the same.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_ANY_FILE = "PreTrainedTokenizerFast"
"""What transformers calls a tokenizer that is all in its tokenizer.json."""


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """`special_tokens` holds those that are set: `eos_token` -> `<|im_end|>`. `chat_template` is None without one."""

    special_tokens: Mapping[str, str]
    chat_template: str | None

    def save(self, folder: Path) -> None:
        # Without a class transformers takes the one of the model's family, and with it that family's own rules.
        content: dict[str, Any] = {"tokenizer_class": _ANY_FILE, **self.special_tokens}
        if self.chat_template is not None:
            content["chat_template"] = self.chat_template
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def load_tokenizer_config(folder: Path) -> TokenizerConfig | None:
    """None where there is none; ValueError when it is not what it should be."""
    file, template_file = folder / CONFIG_FILE, folder / TEMPLATE_FILE
    if not file.is_file():
        return None
    try:
        raw = json.loads(file.read_text())
        template = template_file.read_text() if template_file.is_file() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_FILE} or {TEMPLATE_FILE} beside it cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{CONFIG_FILE} beside it holds no object: give the one saved with the model")
    special = {name: _content(name, raw[name]) for name in _SPECIAL if raw.get(name) is not None}
    return TokenizerConfig(special, template if template is not None else _default_template(raw.get("chat_template")))


def _content(name: str, token: object) -> str:
    """A token is written as its text, or as an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{CONFIG_FILE} beside it has {name}={token!r}, which is no token: give its text")
    return text


def _default_template(found: object) -> str | None:
    if isinstance(found, list):
        named = {each.get("name"): each.get("template") for each in found if isinstance(each, dict)}
        found = named.get("default")
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{CONFIG_FILE} beside it has a chat_template that is no text: {found!r:.80}")
    return found
