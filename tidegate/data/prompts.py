"""A data set's prompts: all are checked before training, then they form an endless list.

The checks have this order:
1. The files and the chat template.
2. The prompt and the answer of each record.
3. The number of tokens of each prompt.
One error lists the first faults, each with its file and line. Nothing is cut or skipped silently.

Invariants:
- The prompt at an index depends only on files, template, tokenizer, seed and index. [test_prompts: follows_from_seed]
- A pass over the data has each record once. [test_prompts: pass_has_each_record_once]
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

from tidegate.config.sections.data import TOKENIZERS_TEMPLATE, DataSection
from tidegate.config.sections.evaluation import EvaluationSection
from tidegate.data.chat_template import ChatTemplate
from tidegate.data.records import TRAINING_SPLIT, Record, data_files, read_records
from tidegate.short_lists import first_lines
from tidegate.tasks.tokenizer import TaskTokenizer

ARGUMENTS = ("prompt", "response", "answer")
"""The arguments of a reward besides the columns. No column may have one of these names."""
_MAX_FAULTS = 8


@dataclass(frozen=True, slots=True)
class DataPrompt:
    """One record. `given` is the prompt in the data's form, and `text` the text that the model reads.

    `columns` are the columns except those of the prompt and the answer.
    """

    where: str
    given: str | list[dict[str, Any]]
    text: str
    answer: Any
    columns: Mapping[str, Any]


class PromptReader:
    """Makes prompts of the records of a job's data, the same way for training and for evaluation."""

    def __init__(self, data: DataSection, tokenizer: TaskTokenizer) -> None:
        """Raises ValueError when the chat template is missing or invalid."""
        self._data = data
        self._tokenizer = tokenizer
        self._template = _chat_template(data, tokenizer)

    def checksum(self, files: Sequence[Path]) -> str:
        """The checksum of the files and the template: of all that decides the prompts, except the tokenizer."""
        digest = hashlib.blake2b(self._template[0].encode() if self._template else b"", digest_size=16)
        for file in files:
            # BLAKE2b, because jobs of earlier releases and configs have its checksums.
            with file.open("rb") as stream:
                digest.update(hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16)).hexdigest().encode())
        return digest.hexdigest()

    def read(self, files: Sequence[Path], *, max_tokens: int | None) -> tuple[DataPrompt, ...]:
        """Every record as a prompt of at most `max_tokens`. None skips the check of lengths, which was done before.

        Raises ValueError, which lists the faults of the records.
        """
        faults: list[str] = []
        prompts: list[DataPrompt] = []
        for file in files:
            for record in read_records(file, faults):
                try:
                    prompt = self._prompt(record)
                    if max_tokens is not None:
                        self._check_length(prompt, max_tokens)
                    prompts.append(prompt)
                except ValueError as error:
                    faults.append(f"{record.where}: {error}")
        if faults:
            raise ValueError(first_lines(faults, most=_MAX_FAULTS))
        if not prompts:
            raise ValueError(f"{', '.join(str(file) for file in files)} holds no record: it needs at least one")
        return tuple(prompts)

    def encode(self, prompt: DataPrompt) -> list[int]:
        encode = self._tokenizer.encode_prompt if self._template is None else self._tokenizer.encode_rendered
        return encode(prompt.text)

    def _prompt(self, record: Record) -> DataPrompt:
        data = self._data
        given = _checked_prompt(_value(record, data.prompt_key, "data.prompt_key"))
        answer = _answer(record, data.answer_key) if data.answer_key else None
        columns = {
            name: value for name, value in record.columns.items() if name not in (data.prompt_key, data.answer_key)
        }
        for name in ARGUMENTS:
            if name in columns:
                raise ValueError(f"column {name!r} has the name of an argument of rewards: rename the column")
        return DataPrompt(record.where, given, self._text(given), answer, columns)

    def _text(self, given: str | list[dict[str, Any]]) -> str:
        if self._template is not None:
            messages = [{"role": "user", "content": given}] if isinstance(given, str) else given
            return self._template[1].render(messages)
        if isinstance(given, str):
            return given
        raise ValueError(
            "the prompt is a list of messages, but data.chat_template is empty: set it to tokenizer, for the "
            "tokenizer's own template, or to the path of a Jinja file"
        )

    def _check_length(self, prompt: DataPrompt, max_tokens: int) -> None:
        num_tokens = len(self.encode(prompt))
        if num_tokens > max_tokens:
            raise ValueError(
                f"the prompt has {num_tokens} tokens, more than the limit of {max_tokens} (data.max_prompt_tokens, or "
                "what algorithm.max_new_tokens leaves of model.max_seq_len): shorten it, remove it or raise the limit"
            )
        if num_tokens == 0:
            raise ValueError("the prompt has no tokens: give it a text")


class PromptList:
    """The endless list: pass after pass over the prompts, each shuffled by (seed, pass) if `shuffle` is set."""

    def __init__(self, prompts: Sequence[DataPrompt], *, seed: int, shuffle: bool) -> None:
        self._prompts = prompts
        self._seed = seed
        # Keep two passes: an iteration may begin in one and end in the next.
        self._order: Callable[[int], Sequence[int]] = lru_cache(maxsize=2)(
            self._shuffled if shuffle else lambda _: range(len(prompts))
        )

    def __len__(self) -> int:
        """The number of prompts in one pass."""
        return len(self._prompts)

    def at(self, index: int) -> DataPrompt:
        return self._prompts[self.row(index)]

    def row(self, index: int) -> int:
        """The number of the prompt's record, which is the same in every pass."""
        number, place = divmod(index, len(self._prompts))
        return self._order(number)[place]

    def _shuffled(self, number: int) -> list[int]:
        order = list(range(len(self._prompts)))
        Random(f"tidegate data {self._seed} {number}").shuffle(order)
        return order


def training_files(data: DataSection) -> tuple[Path, ...]:
    """Raises as `data_files`."""
    return data_files(Path(data.train), split=TRAINING_SPLIT)


def evaluation_files(evaluation: EvaluationSection) -> tuple[Path, ...]:
    """Raises as `data_files`."""
    return data_files(Path(evaluation.data), split=evaluation.split)


def template_source(data: DataSection, tokenizer: TaskTokenizer) -> str | None:
    """The chat template's source.

    None where the model reads texts as they are. Raises ValueError when it is missing."""
    if not data.chat_template:
        return None
    if data.chat_template == TOKENIZERS_TEMPLATE:
        found = tokenizer.config.chat_template if tokenizer.config else None
        if found is None:
            raise ValueError(
                "data.chat_template=tokenizer, but the tokenizer has no template (no chat_template in a "
                "tokenizer_config.json beside it): give the path of a Jinja file, or leave it empty"
            )
        return found
    try:
        return Path(data.chat_template).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{_named(data)} cannot be read: {error}; give the path of a Jinja file") from error


def _named(data: DataSection) -> str:
    if data.chat_template == TOKENIZERS_TEMPLATE:
        return "the tokenizer's chat template"
    return f"data.chat_template={data.chat_template}"


def _chat_template(data: DataSection, tokenizer: TaskTokenizer) -> tuple[str, ChatTemplate] | None:
    """The template's source, and the template."""
    source = template_source(data, tokenizer)
    if source is None:
        return None
    special = tokenizer.config.special_tokens if tokenizer.config else {}
    return source, ChatTemplate(source, name=_named(data), names={**special, **data.chat_template_kwargs})


def _value(record: Record, key: str, config_key: str) -> Any:
    """The value of a column, or of a dotted path within a column."""
    if key in record.columns:
        return record.columns[key]
    value: Any = record.columns
    for part in key.split("."):
        if not isinstance(value, Mapping) or part not in value:
            raise ValueError(
                f"no {key!r} ({config_key}); the columns are {', '.join(sorted(record.columns)) or 'no columns'}"
            )
        value = value[part]
    return value


def _answer(record: Record, key: str) -> Any:
    answer = _value(record, key, "data.answer_key")
    if answer is None:
        raise ValueError(
            f"{key!r} (data.answer_key) is null: give the record its answer or remove it; a job whose rewards need no "
            "answer leaves data.answer_key empty"
        )
    return answer


def _checked_prompt(found: Any) -> str | list[dict[str, Any]]:
    if isinstance(found, str) and found:
        return found
    if isinstance(found, list) and found and all(_is_message(each) for each in found):
        return found
    raise ValueError(
        f"the prompt is {found!r:.60}: it must be a text, or a list of messages such as "
        '[{"role": "user", "content": "..."}]'
    )


def _is_message(found: object) -> bool:
    return isinstance(found, dict) and isinstance(found.get("role"), str) and "content" in found
