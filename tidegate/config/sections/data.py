"""The config's sections on a data set of the user's own: the place of its prompts, and the rewards of responses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from tidegate.config.base import ConfigPath, FileName, Finite, KeyPath, Positive, PositiveFloat, Section

TOKENIZERS_TEMPLATE = "tokenizer"
"""The value of `data.chat_template` that stands for the template of the tokenizer."""


class RewardName(StrEnum):
    EXACT_MATCH = "exact_match"
    MATH_VERIFY = "math_verify"
    FUNCTION = "function"


class OnError(StrEnum):
    """The result of a reward that fails on a sample: 0, or the end of the job."""

    ZERO = "zero"
    FATAL = "fatal"


class DataSection(Section):
    """Prompts from JSONL or Parquet."""

    train: ConfigPath
    """A file, or a folder in the layout of Hugging Face `datasets`, relative to the config's folder."""
    prompt_key: str = "prompt"
    answer_key: str = ""
    """A column, or a path into one such as `reward_model.ground_truth`. Empty: there are no answers."""
    chat_template: Annotated[str, FileName(other_than=(TOKENIZERS_TEMPLATE,))] = ""
    """`tokenizer`, or the path of a Jinja file. Empty: the model gets the texts unchanged."""
    chat_template_kwargs: dict[str, Any] = {}  # noqa: RUF012 - pydantic copies a default
    """Further variables of the template, such as `enable_thinking`."""
    max_prompt_tokens: Positive | None = None
    """None: `model.max_seq_len` minus the longest response."""
    shuffle: bool = True
    """Each pass has an order of its own, from the job's seed."""
    checksum: str = ""
    """The checksum of the files and the template. The start of a job fills it in, so that all processes of the job
    have the same prompts."""


class RewardSection(Section):
    """One summand of a sample's reward."""

    name: RewardName
    weight: Finite = 1.0
    path: str = ""
    """For a function: `package.module:function`, or `/path/file.py:function`."""
    import_from: ConfigPath = ""
    """For a function: a folder to import it from besides the installed packages. Empty: the config's folder."""
    timeout_s: PositiveFloat = 10.0
    on_error: OnError = OnError.ZERO
    max_failed: Annotated[float, Field(ge=0, le=1)] = 0.5
    """The largest share of an iteration's samples on which the reward may fail. More end the job; 1 never ends it."""

    @property
    def label(self) -> str:
        """A file counts by its name: a folder would be a part of each metric's name."""
        return self.path.rpartition("/")[2] if self.name is RewardName.FUNCTION else self.name.value


def reward_names(rewards: Sequence[RewardSection]) -> tuple[str, ...]:
    """One name for each reward, in order: its label. A repeated label gets its number: `exact_match#2`."""
    labels = [reward.label for reward in rewards]
    return tuple(
        label if (number := labels[: place + 1].count(label)) == 1 else f"{label}#{number}"
        for place, label in enumerate(labels)
    )


def with_function_folders(values: dict[str, Any], folder_of: Callable[[KeyPath], Path]) -> dict[str, Any]:
    """The config's values, in which each function without `import_from` gets the folder of the config that names it."""
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
