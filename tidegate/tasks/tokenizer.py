"""A job's tokenizer: a Hugging Face `tokenizer.json`, made from a task's words or loaded from a path.

A `tokenizer_config.json` beside the file names the special tokens. With it, the tokenizer's own rules decide the begin
of a prompt, as in `transformers`. Without it, the special tokens are <pad>, <bos> and <eos>, and a prompt begins with
<bos>.

Invariants:
- In a built file the special tokens are ids 0, 1, 2 (pad, bos, eos). [test_tokenizer: special_tokens_and_the_words]
- In a loaded file the special tokens are found by name. [test_tokenizer: special_tokens_are_found_by_name]
- An encoded response ends with eos. [test_tokenizer: only_the_end_token_is_left_out]
- A text with a word or a character outside the vocabulary is refused. The package would drop it, or read all such
  words as one token. [test_tokenizer: characters_outside_the_vocabulary]
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path

from tokenizers import Encoding, Tokenizer
from tokenizers.models import Unigram, WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing

from tidegate.short_lists import first_few
from tidegate.tasks.tokenizer_config import TokenizerConfig, load_tokenizer_config

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
NO_TOKEN = "\ufffd"
"""The text of an id that no token has."""

_NO_UNKNOWN = "<unk>"
"""This is deliberately not in the vocabulary: the package then refuses an unknown word instead of mapping it to
this."""


_NAMED = {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}


class TaskTokenizer:
    """Converts texts to ids and back with a `tokenizers` tokenizer. Without `config` it has <pad>, <bos> and <eos>.

    `end_ids` are the tokens that end the model's texts by its own files. Ids that are no special tokens are ignored.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: TokenizerConfig | None = None, *, end_ids: Iterable[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self.config = config
        special = {"pad_token": PAD, "bos_token": BOS} if config is None else config.special_tokens
        self.eos_id = _special_id(tokenizer, special.get("eos_token", EOS))
        self.bos_id = _special_id(tokenizer, special["bos_token"]) if "bos_token" in special else None
        self.pad_id = _special_id(tokenizer, special["pad_token"]) if "pad_token" in special else self.eos_id
        self.end_ids = tuple(sorted({self.eos_id, *filter(self.is_special, end_ids)}))
        """The first of these tokens ends a response, such as the end of the turn or of the text."""
        self._unknown = _unknown_token(tokenizer)
        self._readable: set[str] = set()
        """The characters that are known to become tokens."""

    @property
    def vocab_size(self) -> int:
        """The rows that an embedding needs: one more than the largest id."""
        return max(self._tokenizer.get_vocab().values()) + 1

    def is_special(self, token: int) -> bool:
        """Whether the id belongs to a special token."""
        added = self._tokenizer.get_added_tokens_decoder().get(token)
        return added is not None and added.special

    def conflicts(self, file: Path) -> list[str]:
        """The tokens that conflict with the file's tokenizer: their id differs there, or has another token.

        Raises ValueError when the file is no tokenizer.
        """
        theirs = _read(file).get_vocab()
        taken = set(theirs.values())
        ours = sorted(self._tokenizer.get_vocab().items(), key=lambda item: item[1])
        return [
            f"{token!r} ({id_}, {theirs.get(token, 'none')} there)"
            for token, id_ in ours
            if theirs.get(token, id_) != id_ or (token not in theirs and id_ in taken)
        ]

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a prompt in plain text."""
        if self.config is not None:
            return self._encode(text, add_special_tokens=True)
        assert self.bos_id is not None, "a tokenizer without a config has all three special tokens"
        return [self.bos_id, *self._encode(text)]

    def encode_rendered(self, text: str) -> list[int]:
        """The ids of a text from a chat template, which contains its special tokens."""
        return self._encode(text)

    def encode_response(self, text: str) -> list[int]:
        return [*self._encode(text), self.eos_id]

    def decode_response(self, ids: Sequence[int]) -> str:
        """The text without its end token. Any other special token stays in the text, so that no reward overlooks it.

        An id that no token has becomes U+FFFD. Models have more rows than their tokenizers have ids, and may draw one.
        """
        return self.decode(ids[:-1] if ids and ids[-1] in self.end_ids else ids)

    def decode(self, ids: Sequence[int]) -> str:
        """The same as `decode_response`, with the end token."""
        runs = groupby(ids, key=lambda token: self._tokenizer.id_to_token(token) is not None)
        return "".join(
            self._tokenizer.decode(list(run), skip_special_tokens=False) if is_known else NO_TOKEN * len(list(run))
            for is_known, run in runs
        )

    def save(self, path: Path) -> None:
        """Write `tokenizer.json` to `path`, in the form that `load_tokenizer` and `transformers` read.

        The config is written beside it.
        """
        self._tokenizer.save(str(path))
        if self.config is not None:
            self.config.save(path.parent)

    def export(self, folder: Path) -> None:
        """Write the file, and a config with which `transformers` has the same special tokens and encodes prompts
        alike."""
        if self.config is not None:
            self.save(folder / "tokenizer.json")
            return
        assert self.bos_id is not None, "a tokenizer without a config has all three special tokens"
        exported = Tokenizer.from_str(self._tokenizer.to_str())
        exported.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, self.bos_id)])
        exported.save(str(folder / "tokenizer.json"))
        TokenizerConfig(_NAMED, chat_template=None).save(folder)

    def with_template(self, source: str) -> TaskTokenizer:
        """This tokenizer with another chat template, which makes all special tokens of a prompt."""
        named = _NAMED if self.config is None else self.config.special_tokens
        return TaskTokenizer(self._tokenizer, TokenizerConfig(named, source), end_ids=self.end_ids)

    def _encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the package raises a bare Exception for a word without an id
            raise ValueError(f"text {text[:80]!r} has a word outside the vocabulary: {error}") from error
        self._refuse_unknown(text, encoded)
        return list(encoded.ids)

    def _refuse_unknown(self, text: str, encoded: Encoding) -> None:
        """Raise ValueError where a part of the text became no token, or the one of all unknown words."""
        lost = [letter for letter in sorted(set(text) - self._readable) if not self._is_readable(letter)]
        if lost:
            outside = set(self._without_added(text))
            lost = [letter for letter in lost if letter in outside]
        if self._unknown is not None and self._unknown in encoded.ids:
            parts = (
                text[slice(*place)]
                for token, place in zip(encoded.ids, encoded.offsets, strict=True)
                if token == self._unknown
            )
            # The token may be in the text by its name.
            named = self._tokenizer.id_to_token(self._unknown)
            lost += [part for part in parts if part.strip() and part != named]
        if lost:
            raise ValueError(
                f"text {text[:80]!r} has {first_few(dict.fromkeys(map(repr, lost)))} outside the vocabulary: the model "
                "could not read it; use other characters, or a tokenizer that has them"
            )

    def _without_added(self, text: str) -> str:
        """The text without the tokens that were added to the model's, whose letters need no tokens of their own."""
        added = (re.escape(token.content) for token in self._tokenizer.get_added_tokens_decoder().values())
        return re.sub("|".join(sorted(added, key=len, reverse=True)), "", text)

    def _is_readable(self, letter: str) -> bool:
        """Whether a character becomes a token. White space, marks and control characters may vanish."""
        if unicodedata.category(letter)[0] in "LNPS":
            try:
                if not self._tokenizer.encode(letter, add_special_tokens=False).ids:
                    return False
            except Exception:  # noqa: BLE001 - a tokenizer of words, which refuses unknown words itself
                pass
        self._readable.add(letter)
        return True


def build_tokenizer(words: Sequence[str]) -> TaskTokenizer:
    """A word-level tokenizer over `words`. Their ids follow the three special tokens, in the order of `words`."""
    vocabulary = {word: token for token, word in enumerate([PAD, BOS, EOS, *words])}
    if len(vocabulary) < len(words) + 3:
        raise ValueError(
            f"{len(words) + 3} words make {len(vocabulary)} ids; give each word once, and no special token"
        )
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=_NO_UNKNOWN))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.add_special_tokens([PAD, BOS, EOS])
    return TaskTokenizer(tokenizer)


def load_tokenizer(path: Path, *, model_vocab_size: int, end_ids: Iterable[int] = ()) -> TaskTokenizer:
    """The tokenizer at `path` (a file, or a folder with `tokenizer.json`), checked against the model's vocabulary.

    `end_ids`: as in TaskTokenizer. Raises ValueError when the file is missing, is no tokenizer, lacks a special token,
    or has ids beyond the model's rows.
    """
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"no tokenizer at {file}; give the path of a tokenizer.json, or of the folder that holds one")
    read = _read(file)
    try:
        config = load_tokenizer_config(file.parent)
        tokenizer = TaskTokenizer(read, config, end_ids=end_ids)
    except ValueError as error:
        raise ValueError(f"tokenizer {file}: {error}") from error
    if tokenizer.vocab_size > model_vocab_size:
        raise ValueError(
            f"tokenizer {file} has {tokenizer.vocab_size} ids and the model's vocabulary {model_vocab_size}; "
            f"set the model's vocabulary to at least {tokenizer.vocab_size} or give the model's own tokenizer"
        )
    return tokenizer


def _read(file: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises a bare Exception for a file that it cannot parse
        raise ValueError(
            f"{file} is not a Hugging Face tokenizer ({error}); give the tokenizer.json saved with the model"
        ) from error


def _unknown_token(tokenizer: Tokenizer) -> int | None:
    """The id that the tokenizer gives to all words that it does not know. None where it has no such token."""
    model = tokenizer.model
    if isinstance(model, Unigram):
        found: int | None = json.loads(tokenizer.to_str())["model"]["unk_id"]
        return found
    name = getattr(model, "unk_token", None)
    return tokenizer.token_to_id(name) if name is not None else None


def _special_id(tokenizer: Tokenizer, name: str) -> int:
    token = tokenizer.token_to_id(name)
    if token is None:
        raise ValueError(
            f"it has no token {name}; it needs the tokens that tokenizer_config.json beside it names or, without that "
            f"file, {PAD}, {BOS} and {EOS}"
        )
    return int(token)
