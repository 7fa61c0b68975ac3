"""Faults between `evaluation` and the other sections, and what is legal but rarely intended. Each text is one fault, or
one warning. Only the texts of paths are compared: no file is read here.

Invariant: a job on data names the data of its evaluation, and a job on a built-in task names none, since the task has
held-out prompts of its own. [test_wrong_configs: only_a_job_on_data_names_evaluation_data]
"""

from __future__ import annotations

from os.path import normpath

from tidegate.config.sections.evaluation import EvaluationSection
from tidegate.config.sections.job import JobSections
from tidegate.data.records import KINDS, TRAINING_SPLIT


def evaluation_faults(config: JobSections) -> list[str]:
    evaluation = config.evaluation
    if evaluation is None:
        return []
    return [*_prompt_faults(config, evaluation), *_sampling_faults(config, evaluation)]


def evaluation_warnings(config: JobSections) -> list[str]:
    """The config must be without fault."""
    data, evaluation = config.data, config.evaluation
    if data is None or evaluation is None or normpath(data.train) != normpath(evaluation.data):
        return []
    if evaluation.data.endswith(KINDS):
        remedy = "name a file whose prompts are not trained on"
    elif evaluation.split == TRAINING_SPLIT:
        remedy = "name another split"
    else:
        return []
    what = "all prompts" if evaluation.num_prompts is None else f"the first {evaluation.num_prompts} prompts"
    return [
        f"evaluation.data={evaluation.data} is data.train: {what} of the evaluation are trained on, so it measures "
        f"what the model remembers; {remedy}"
    ]


def longest_evaluated(config: JobSections) -> int:
    """Tokens of the longest response to a held-out prompt."""
    own = config.evaluation.max_new_tokens if config.evaluation else None
    return own or config.algorithm.max_new_tokens


def _prompt_faults(config: JobSections, evaluation: EvaluationSection) -> list[str]:
    if config.data is not None:
        lacks = "evaluation.data is empty: name a file, or a folder, whose prompts are not trained on"
        return [] if evaluation.data else [lacks]
    faults = []
    if evaluation.data:
        faults.append("evaluation.data is given, and a built-in task has held-out prompts of its own: remove it")
    if evaluation.num_prompts is None:
        faults.append("evaluation.num_prompts is missing: a built-in task's held-out prompts have no end; set it to 64")
    return faults


def _sampling_faults(config: JobSections, evaluation: EvaluationSection) -> list[str]:
    faults = []
    num_samples, longest, limit = evaluation.samples_per_prompt, longest_evaluated(config), config.model.max_seq_len
    if not evaluation.pass_at or max(evaluation.pass_at) > num_samples:
        faults.append(
            f"evaluation.pass_at={list(evaluation.pass_at)} needs numbers of 1 to evaluation.samples_per_prompt="
            f"{num_samples}: pass@k is estimated from k responses to a prompt, or more"
        )
    if evaluation.temperature == 0 and num_samples > 1:
        faults.append(
            f"evaluation.samples_per_prompt={num_samples} with evaluation.temperature=0 makes the same response "
            f"{num_samples} times: set the temperature to that of the training, {config.algorithm.temperature:g}, or "
            "the samples to 1"
        )
    if longest >= limit:
        faults.append(
            f"evaluation.max_new_tokens={longest} leaves no token for the prompt: it must be less than "
            f"model.max_seq_len={limit}"
        )
    return faults
