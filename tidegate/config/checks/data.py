"""Faults between `data`, `rewards` and the other sections. Each text is one fault.

Invariant: a job has either a built-in `task`, or `data` with `rewards`: not both, and not `data` or `rewards` alone.
[test_wrong_configs: a_job_has_a_task_or_data_with_rewards]
"""

from __future__ import annotations

import re

from tidegate.config.sections.data import DataSection, RewardName
from tidegate.config.sections.job import JobSections

_FUNCTION_PATH = re.compile(r"([A-Za-z_]\w*(\.[A-Za-z_]\w*)*|.*[^/]\.py):[A-Za-z_]\w*")


def data_faults(config: JobSections) -> list[str]:
    if (config.task is None) == (config.data is None):
        found = "both task and data are given" if config.data else "neither task nor data is given"
        return [f"{found}: give task.name for a built-in task, or data and rewards for prompts of your own"]
    if config.data is None:
        return ["rewards are given without data: a built-in task has its own; remove them"] if config.rewards else []
    return [*_missing(config), *_reward_faults(config, config.data), *_length_faults(config, config.data)]


def _missing(config: JobSections) -> list[str]:
    faults = []
    if not config.rewards:
        faults.append("rewards is empty: list at least one, such as - name: exact_match")
    elif not any(reward.weight for reward in config.rewards):
        faults.append("rewards: every weight is 0, so the job would learn nothing: give one reward another weight")
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


def _reward_faults(config: JobSections, data: DataSection) -> list[str]:
    faults = []
    for number, reward in enumerate(config.rewards):
        where = f"rewards.{number} ({reward.name})"
        if reward.name is RewardName.FUNCTION:
            if not _FUNCTION_PATH.fullmatch(reward.path):
                faults.append(
                    f"{where}: path={reward.path!r} must name a function, such as package.module:function or "
                    "/path/file.py:function"
                )
            continue
        if reward.path or reward.import_from:
            faults.append(f"{where}: path and import_from belong to a reward named function: remove them")
        if not data.answer_key:
            faults.append(f"{where} compares with the right answer: set data.answer_key to the column that holds it")
    return faults


def _length_faults(config: JobSections, data: DataSection) -> list[str]:
    longest, room = data.max_prompt_tokens, room_for_prompts(config)
    if longest is None or longest <= room:
        return []
    return [
        f"data.max_prompt_tokens={longest} and algorithm.max_new_tokens={config.algorithm.max_new_tokens} make "
        f"{longest + config.algorithm.max_new_tokens}, more than model.max_seq_len={config.model.max_seq_len}: lower "
        f"one of the first two, or raise the last; legal here: up to {room}"
    ]


def room_for_prompts(config: JobSections) -> int:
    """Tokens that the longest response leaves for the prompt."""
    return config.model.max_seq_len - config.algorithm.max_new_tokens
