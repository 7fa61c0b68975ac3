"""The config's sections on a data set of one's own: where its prompts are, and what a response is worth.

`data_faults` names all that must hold between these sections and the others, one fault a text. Invariant: a job has
either a built-in `task`, or `data` with `rewards`, never both and never half of one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tidegate.config_base import ConfigPath, FileName, Finite, KeyPath, Positive, PositiveFloat, Section

if TYPE_CHECKING:
    from tidegate.config import JobConfig

TOKENIZERS_TEMPLATE = "tokenizer"
"""As `data.chat_template`: the one that came with the tokenizer."""
_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")


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


def data_faults(config: JobConfig) -> list[str]:
    if (config.task is None) == (config.data is None):
        found = "both task and data are given" if config.data else "neither task nor data is given"
        return [f"{found}: give task.name for a built-in task, or data and rewards for prompts of your own"]
    if config.data is None:
        return ["rewards are given without data: a built-in task has its own; remove them"] if config.rewards else []
    return [*_missing(config), *_reward_faults(config, config.data), *_length_faults(config, config.data)]


def _missing(config: JobConfig) -> list[str]:
    faults = []
    if not config.rewards:
        faults.append("rewards is empty: list at least one, such as - name: exact_match")
    elif not any(reward.weight for reward in config.rewards):
        faults.append("rewards: every weight is 0, so that nothing could be learnt: give one of them another")
    if not (config.model.tokenizer or config.model.path):
        faults.append(
            "model.tokenizer is empty: data needs the tokenizer of the model, as the path of a tokenizer.json or of "
            "the folder that holds it"
        )
    if config.actor.warm_up.steps:
        faults.append(
            f"actor.warm_up.steps={config.actor.warm_up.steps}: the warm-up imitates a built-in task's demonstrations, "
            "and data has none: set it to 0"
        )
    return faults


def _reward_faults(config: JobConfig, data: DataSection) -> list[str]:
    faults = []
    for number, reward in enumerate(config.rewards):
        where = f"rewards.{number} ({reward.name})"
        if reward.name is RewardName.FUNCTION:
            if not _IMPORT_PATH.fullmatch(reward.path):
                faults.append(f"{where}: path={reward.path!r} must name a function, such as package.module:function")
            continue
        if reward.path or reward.import_from:
            faults.append(f"{where}: path and import_from belong to a reward named function: remove them")
        if not data.answer_key:
            faults.append(f"{where} compares with the right answer: set data.answer_key to the column that holds it")
    return faults


def _length_faults(config: JobConfig, data: DataSection) -> list[str]:
    longest, room = data.max_prompt_tokens, room_for_prompts(config)
    if longest is None or longest <= room:
        return []
    return [
        f"data.max_prompt_tokens={longest} and algorithm.max_new_tokens={config.algorithm.max_new_tokens} make "
        f"{longest + config.algorithm.max_new_tokens}, more than model.max_seq_len={config.model.max_seq_len}: lower "
        f"one of the first two, or raise the last; legal here: up to {room}"
    ]


def room_for_prompts(config: JobConfig) -> int:
    """Tokens that the longest response leaves."""
    return config.model.max_seq_len - config.algorithm.max_new_tokens


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
