"""A small tokenizer in the form of a model's own: with its special tokens and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.processors import TemplateProcessing

CHAT = (
    "{% for message in messages %}\n"
    "    {% if message['role'] not in ['system', 'user', 'assistant'] %}\n"
    "        {{ raise_exception('no role ' + message['role']) }}\n"
    "    {% endif %}\n"
    "{{ '<|' + message['role'] + '|>' + message['content'] | trim + eos_token }}"
    "{% if loop.index0 > 10 %}{% break %}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{% generation %}<|assistant|>{% endgeneration %}{% endif %}"
    "{% if thinking is defined %}{{ {'thinking': thinking} | tojson }}{% endif %}"
)
FLAGS = ("lstrip", "rstrip", "normalized", "single_word")
SPECIAL = ("<s>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def make_tokenizer(folder: Path, **config: Any) -> Path:
    """Save a byte-level tokenizer that puts <s> before a text in `folder`. `config` overrides keys of its config."""
    tokenizer = Tokenizer(BPE({letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(list(SPECIAL))
    start = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", start)])
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    content = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", **dict.fromkeys(FLAGS, False)},
        "eos_token": "<|end|>",
        "pad_token": None,
        "chat_template": CHAT,
    }
    kept = {name: value for name, value in (content | config).items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(kept))
    return folder
