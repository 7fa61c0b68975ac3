"""The config's sections on a data set of one's own: where its prompts are, and what a response is worth."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from tidegate.config.base import ConfigPath, FileName, Finite, KeyPath, Positive, PositiveFloat, Section

TOKENIZERS_TEMPLATE = "tokenizer"
"""As `data.chat_template`: the one that came with the tokenizer."""


class RewardName(StrEnum):
    EXACT_MATCH = "exact_match"
    MATH_VERIFY = "math_verify"
    FUNCTION = "function"


class OnError(StrEnum):
    """What a reward comes to that fails on a sample: 0, or the end of the job."""

    ZERO = "zero"
    FATAL = "fatal"


class DataSection(Section):
    """Prompts from JSONL or Parquet."""

    train: ConfigPath
    """A file, or a folder in the layout of Hugging Face `datasets`; relative to the config's folder."""
    prompt_key: str = "prompt"
    answer_key: str = ""
    """A column, or a path into one such as `reward_model.ground_truth`; empty: there are no answers."""
    chat_template: Annotated[str, FileName(other_than=(TOKENIZERS_TEMPLATE,))] = ""
    """`tokenizer`, or the path of a Jinja file; empty gives texts to the model as they are."""
    chat_template_kwargs: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies a default
    """Further names that the template sees, such as `enable_thinking`."""
    max_prompt_tokens: Positive | None = None
    """None: what `model.max_seq_len` leaves beside the longest response."""
    shuffle: bool = True
    """Each pass in an order of its own, drawn from the job's seed."""
    checksum: str = ""
    """Of the files and the template; filled in when a job starts, so that all of it has the same prompts."""


class RewardSection(Section):
    """One summand of a sample's reward."""

    name: RewardName
    weight: Finite = 1.0
    path: str = ""
    """Of a function: `package.module:function`."""
    import_from: ConfigPath = ""
    """Of a function: a folder to import it from besides the installed packages; empty: the config's own."""
    timeout_s: PositiveFloat = 10.0
    on_error: OnError = OnError.ZERO

    @property
    def label(self) -> str:
        return self.path if self.name is RewardName.FUNCTION else self.name.value


def reward_names(rewards: Sequence[RewardSection]) -> tuple[str, ...]:
    """One for each, in order: its label, and from the second of a label on its number among them."""
    labels = [reward.label for reward in rewards]
    return tuple(
        label if (number := labels[: place + 1].count(label)) == 1 else f"{label}#{number}"
        for place, label in enumerate(labels)
    )


def with_function_folders(values: dict[str, Any], folder_of: Callable[[KeyPath], Path]) -> dict[str, Any]:
    """What a config was given; a function that has no `import_from` gets the folder of the config that names it."""
    rewards = values.get("rewards")
    if not isinstance(rewards, list):
        return values
    return values | {
        "rewards": [
            {**reward, "import_from": str(folder_of(("rewards", index)))}
            if isinstance(reward, dict) and reward.get("name") == RewardName.FUNCTION and not reward.get("import_from")
            else reward
            for index, reward in enumerate(rewards)
        ]
    }
