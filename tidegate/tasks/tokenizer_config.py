"""A Hugging Face `tokenizer_config.json`: the names of the special tokens, and the chat template.

The template is a text, or a list of named templates of which `default` counts. A `chat_template.jinja` beside the file
overrides both, as in `transformers`.

Invariant: a saved config loads to the same config. [test_tokenizer: saved_tokenizer_has_its_config_beside_it]
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tidegate.json_text import parse_json

CONFIG_FILE = "tokenizer_config.json"
TEMPLATE_FILE = "chat_template.jinja"
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "sep_token", "cls_token", "mask_token")
_ANY_FILE = "PreTrainedTokenizerFast"
"""The name in transformers of a tokenizer that is complete in its tokenizer.json."""


@dataclass(frozen=True, slots=True)
class TokenizerConfig:
    """`special_tokens` holds those that are set, such as `eos_token` -> `<|im_end|>`. `chat_template` may be None."""

    special_tokens: Mapping[str, str]
    chat_template: str | None

    def save(self, folder: Path) -> None:
        # Name a class: else transformers takes the class of the model's family, with that family's own rules.
        content: dict[str, Any] = {"tokenizer_class": _ANY_FILE, **self.special_tokens}
        if self.chat_template is not None:
            content["chat_template"] = self.chat_template
        (folder / CONFIG_FILE).write_text(json.dumps(content, indent=2) + "\n")


def load_tokenizer_config(folder: Path) -> TokenizerConfig | None:
    """The folder's config. None where it has none. Raises ValueError when it is invalid."""
    file, template_file = folder / CONFIG_FILE, folder / TEMPLATE_FILE
    if not file.is_file():
        return None
    try:
        raw = parse_json(file.read_bytes())
        template = template_file.read_text() if template_file.is_file() else None
    except (OSError, ValueError) as error:
        raise ValueError(f"{CONFIG_FILE} or {TEMPLATE_FILE} beside it cannot be read: {error}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{CONFIG_FILE} beside it holds no object: give the one saved with the model")
    special = {name: _content(name, raw[name]) for name in _SPECIAL if raw.get(name) is not None}
    return TokenizerConfig(special, template if template is not None else _default_template(raw.get("chat_template")))


def _content(name: str, token: object) -> str:
    """A token's text. The file has the text itself, or an object that holds it."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{CONFIG_FILE} beside it has {name}={token!r}, which is no token: give its text")
    return text


def _default_template(found: object) -> str | None:
    if isinstance(found, list):
        named = [each.get("template") for each in found if isinstance(each, dict) and each.get("name") == "default"]
        found = named[-1] if named else None
    if found is not None and not isinstance(found, str):
        raise ValueError(f"{CONFIG_FILE} beside it has a chat_template that is no text: {found!r:.80}")
    return found
