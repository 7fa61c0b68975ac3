"""Drawn lengths: the same for every policy and seed of the job, lognormal, and within their limits."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import fmean, stdev

from hypothesis import given
from hypothesis import strategies as st

from tidegate.config.engines.length_law import LengthLawSection
from tidegate.config.files import load_config
from tidegate.job import load_job
from tidegate.length_law import drawn_length
from tidegate.types import SampleId

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "paced.yaml"
LIMIT = 10**9


def samples(iteration: int = 0) -> list[SampleId]:
    return [SampleId(1, iteration, prompt, draw) for prompt in range(300) for draw in range(4)]


@given(st.builds(LengthLawSection, median_tokens=st.floats(0.01, 1e9), seed=st.integers(0, 9)), st.integers(1, 5000))
def test_every_length_is_within_its_limits(law: LengthLawSection, limit: int) -> None:
    assert all(1 <= drawn_length(law, sample, max_new_tokens=limit) <= limit for sample in samples()[:20])


def test_a_length_depends_only_on_the_law_and_the_sample() -> None:
    law = LengthLawSection(median_tokens=100)
    lengths = [drawn_length(law, sample, max_new_tokens=LIMIT) for sample in samples()]
    again = [SampleId(7, sample.iteration, sample.prompt, sample.draw) for sample in samples()]
    assert [drawn_length(law, sample, max_new_tokens=LIMIT) for sample in again] == lengths
    others = [
        [drawn_length(law, sample, max_new_tokens=LIMIT) for sample in samples(iteration=1)],
        [drawn_length(law.model_copy(update={"seed": 1}), sample, max_new_tokens=LIMIT) for sample in samples()],
    ]
    assert all(other != lengths for other in others)
    config = load_config(EXAMPLE)
    changed = config.model_copy(update={"seed": config.seed + 1})
    assert [load_job(each).drawn_length(samples()[7]) for each in (config, changed)] == [
        load_job(config).drawn_length(samples()[7])
    ] * 2


def test_lengths_have_the_median_and_the_spreads_of_the_law() -> None:
    law = LengthLawSection(median_tokens=1e5, sigma_prompt=1.0, sigma_group=0.6)
    logs = [math.log(drawn_length(law, sample, max_new_tokens=LIMIT)) for sample in samples()]
    groups = [logs[start : start + 4] for start in range(0, len(logs), 4)]
    within = math.sqrt(fmean(stdev(group) ** 2 for group in groups))
    assert abs(fmean(logs) - math.log(1e5)) < 0.2
    assert abs(within - 0.6) < 0.05
    assert abs(stdev(logs) - math.hypot(1.0, 0.6)) < 0.15


def test_the_longest_response_of_the_example_is_over_eight_times_the_mean() -> None:
    job = load_job(load_config(EXAMPLE))
    algorithm = job.config.algorithm
    for iteration in range(algorithm.iterations):
        first = iteration * algorithm.prompts_per_iteration
        lengths = [
            job.drawn_length(SampleId(1, iteration, prompt, draw)) or 0
            for prompt in range(first, first + algorithm.prompts_per_iteration)
            for draw in range(algorithm.group_size)
        ]
        assert max(lengths) > 8 * fmean(lengths)


def test_only_the_text_before_the_first_stop_token_is_rewarded() -> None:
    job = load_job(load_config(EXAMPLE))
    text = job.task.demonstration(0).response if job.task else ""
    answer = job.tokenizer.encode_response(text)
    assert job.response_text([*answer, *answer, *answer]) == text
