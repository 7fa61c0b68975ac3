"""The requests and figures of an evaluation, and the lead's way through one."""

from __future__ import annotations

import json
from itertools import combinations, product
from pathlib import Path
from random import Random
from typing import Any

import pytest

from services.rollout.evaluation import Evaluation, pass_at
from services.rollout.exercises import TaskExercises, open_exercises
from tests.component_bench import JOB, NODES, job_config, snapshot, task_of
from tests.unit.rollout.fake_engines import FIRST, SECOND, Engines, RolloutBench, engine_at_work, give, rollout
from tidegate.job import Job, load_job
from tidegate.ports.bus import Stage
from tidegate.types import SampleId
from tidegate.v1 import commands_pb2, events_pb2, samples_pb2

SECTION: dict[str, Any] = {
    "every": 1,
    "num_prompts": 3,
    "samples_per_prompt": 4,
    "pass_at": [1, 2, 4],
    "temperature": 0.75,
    "max_new_tokens": 50,
}


def test_pass_at_k_is_the_share_of_all_choices_of_k_responses_that_hold_a_right_one() -> None:
    for num_samples, num_right, k in product(range(1, 8), range(8), range(1, 8)):
        if num_right <= num_samples >= k:
            chosen = list(combinations(range(num_samples), k))
            want = sum(min(choice) < num_right for choice in chosen) / len(chosen)
            assert pass_at(k, num_samples=num_samples, num_right=num_right) == pytest.approx(want)


def test_pass_at_k_is_an_unbiased_estimate() -> None:
    """Its expectation is the paper's closed form, 1 - (1 - p)^k."""
    random, num_samples, k, p = Random(0), 20, 5, 0.1
    estimates = []
    for _ in range(20_000):
        num_right = sum(random.random() < p for _ in range(num_samples))
        estimates.append(pass_at(k, num_samples=num_samples, num_right=num_right))
    assert sum(estimates) / len(estimates) == pytest.approx(1 - (1 - p) ** k, abs=0.005)


def evaluation_of(tmp_path: Path, **changes: Any) -> tuple[Job, Evaluation]:
    job = load_job(job_config(tmp_path, evaluation={**SECTION, **changes}))
    exercises = TaskExercises(job, task_of(job), task_of(job).prompt).held_out()
    return job, Evaluation(job, exercises, version=6)


def right(job: Job, prompt: int) -> str:
    first = int(task_of(job).held_out(prompt).text.split()[2])
    return " ".join([*map(str, range(first, 1, -1)), "1 liftoff"])


def responses(job: Job, prompt: int, *, num_right: int, num_samples: int = 4) -> list[samples_pb2.Sample]:
    """Responses to a prompt: first the right ones, then wrong ones that are cut."""
    answer, wrong = job.tokenizer.encode_response(right(job, prompt)), job.tokenizer.encode_response("liftoff")[:1]
    stop, length = samples_pb2.FINISH_REASON_STOP, samples_pb2.FINISH_REASON_LENGTH
    return [
        samples_pb2.Sample(response_tokens=answer, finish=stop)
        if draw < num_right
        else samples_pb2.Sample(response_tokens=wrong, finish=length)
        for draw in range(num_samples)
    ]


async def test_figures_are_by_reward_and_the_same_whichever_prompt_was_answered_first(tmp_path: Path) -> None:
    job, _ = evaluation_of(tmp_path)
    num_right = (1, 0, 4)
    reports = []
    for order in ((0, 1, 2), (2, 0, 1)):
        _, evaluation = evaluation_of(tmp_path)
        for prompt in order:
            await evaluation.take(prompt, responses(job, prompt, num_right=num_right[prompt]))
        reports.append(evaluation.report())
    assert reports[0] == reports[1]
    report = reports[0]
    assert (report.version, report.num_prompts, report.samples_per_prompt) == (6, 3, 4)
    lengths = [len(job.tokenizer.encode_response(right(job, prompt))) for prompt in range(3)]
    assert dict(report.metrics) == pytest.approx(
        {
            "reward_mean": 5 / 12,
            "countdown/mean": 5 / 12,
            "countdown/pass@1": (0.25 + 0 + 1) / 3,
            "countdown/pass@2": (0.5 + 0 + 1) / 3,
            "countdown/pass@4": (1 + 0 + 1) / 3,
            "response_tokens_mean": (lengths[0] + 4 * lengths[2] + 7) / 12,
            "truncated_share": 7 / 12,
        }
    )


async def test_responses_are_written_with_one_line_per_prompt(tmp_path: Path) -> None:
    job, evaluation = evaluation_of(tmp_path, samples_per_prompt=2, pass_at=[1])
    for prompt in (2, 1, 0):
        await evaluation.take(prompt, responses(job, prompt, num_right=1, num_samples=2))
    evaluation.write(tmp_path / "evaluations")
    (path,) = (tmp_path / "evaluations").iterdir()
    assert path.name == "version000006.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["prompt"] for line in lines] == [f"<bos> {task_of(job).held_out(prompt).text}" for prompt in range(3)]
    assert lines[1]["responses"] == [
        {"text": right(job, 1), "reward": 1.0, "rewards": {"countdown": 1.0}, "is_truncated": False},
        {"text": "liftoff", "reward": 0.0, "rewards": {"countdown": 0.0}, "is_truncated": True},
    ]


def test_requests_have_their_own_sampling_and_seeds_that_no_version_changes(tmp_path: Path) -> None:
    job, evaluation = evaluation_of(tmp_path)
    request = evaluation.request(SampleId(1, 6, 2, 3))
    assert list(request.prompt_tokens) == job.tokenizer.encode_prompt(task_of(job).held_out(2).text)
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_new_tokens) == (0.75, 1.0, 50)
    assert evaluation.request(SampleId(2, 9, 2, 3)).seed == request.seed
    seeds = {evaluation.request(SampleId(1, 6, prompt, draw)).seed for prompt in range(3) for draw in range(4)}
    assert len(seeds) == 12
    assert not seeds & {job.sampling_seed(SampleId(1, 6, prompt, draw)) for prompt in range(3) for draw in range(4)}


def evaluation_bench(tmp_path: Path, engines: Engines) -> Any:
    return rollout(tmp_path, engines, evaluation=SECTION)


async def reports(of: RolloutBench, *, count: int = 1) -> list[events_pb2.EvaluationReported]:
    return [event.evaluation_reported for event in await of.published("evaluation_reported", count=count)]


async def undisturbed(tmp_path: Path) -> events_pb2.EvaluationReported:
    async with evaluation_bench(tmp_path, Engines()) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.evaluate())
        (report,) = await reports(of)
        return report


async def test_a_lead_evaluates_with_all_engines_and_puts_nothing_on_the_stream(tmp_path: Path) -> None:
    engines = Engines()
    async with evaluation_bench(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration())
        (generated,) = await of.published("iteration_reported")
        give(of, of.evaluate())
        (report,) = await reports(of)
        assert (report.version, report.num_prompts, report.samples_per_prompt) == (0, 3, 4)
        want = {SampleId(1, 0, prompt, draw) for prompt in range(3) for draw in range(4)}
        made = [engines.of[gpu].made[4:] for gpu in (FIRST, SECOND)]
        assert set(made[0] + made[1]) == want
        assert [len(each) for each in made] == [6, 6]
        assert await of.bus.samples.published(JOB, Stage.GENERATED, incarnation=1, iteration=0) == {0, 1, 2, 3}
        assert generated.iteration_reported.generated.num_samples == 8
        assert (of.folder.evaluations / "version000000.jsonl").is_file()
        progress = [event.progress for event in await of.published("progress", count=7)]
        assert [(each.phase, each.num_done, each.num_total) for each in progress[4:]] == [
            ("evaluate", done, 3) for done in (1, 2, 3)
        ]


async def test_an_engine_lost_in_an_evaluation_changes_no_figure(tmp_path: Path) -> None:
    want = await undisturbed(tmp_path / "undisturbed")
    engines = Engines()
    engines.num_permits[FIRST] = 2
    async with evaluation_bench(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.evaluate())
        await engine_at_work(of, engines, FIRST, num_made=2)
        of.instances[NODES[0]].kill(FIRST)
        assert await reports(of) == [want]


async def test_a_new_lead_evaluates_anew_to_the_same_figures(tmp_path: Path) -> None:
    want = await undisturbed(tmp_path / "undisturbed")
    engines = Engines()
    engines.num_permits = {FIRST: 0, SECOND: 4}
    async with evaluation_bench(tmp_path, engines) as of:
        old = give(of, of.scale_up(weights=snapshot(0)), of.evaluate())
        await engine_at_work(of, engines, SECOND, num_made=4)
        await old.aclose()
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        new = of.new_lead()
        new.take(commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        new.take(of.evaluate())
        assert await reports(of) == [want]
        assert all(engine.num_aborts for engine in engines.of.values()), "the old lead's requests were aborted"


async def test_an_evaluation_waits_for_the_report_of_its_iteration(tmp_path: Path) -> None:
    """A new lead may get both requests at once."""
    engines = Engines()
    engines.num_permits = {FIRST: 0, SECOND: 0}
    async with evaluation_bench(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)), of.open_iteration(), of.evaluate())
        await engine_at_work(of, engines, FIRST, num_made=0)
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        await reports(of)
        kinds = await of.kinds()
        assert kinds.index("iteration_reported") < kinds.index("evaluation_reported")


async def test_a_failed_evaluation_is_repeated_with_the_next_weights(tmp_path: Path) -> None:
    want = await undisturbed(tmp_path / "undisturbed")
    engines = Engines()
    async with evaluation_bench(tmp_path, engines) as of:
        give(of, of.scale_up(weights=snapshot(0)))
        await of.published("layout_committed")
        engines.of[FIRST].refusal = "not now"
        give(of, of.evaluate())
        (failed,) = await of.published("failed")
        assert failed.failed.message.startswith("the evaluation of version 0: ")
        engines.of[FIRST].refusal = ""
        give(of, commands_pb2.LoadWeightsRequest(header=of.header(), weights=snapshot(0)))
        assert await reports(of) == [want]


async def test_a_newer_incarnation_ends_an_evaluation(tmp_path: Path) -> None:
    engines = Engines()
    engines.num_permits = {FIRST: 0, SECOND: 0}
    async with evaluation_bench(tmp_path, engines) as of:
        lead = give(of, of.scale_up(weights=snapshot(0)), of.evaluate())
        await engine_at_work(of, engines, FIRST, num_made=0)
        for gpu in (FIRST, SECOND):
            engines.open(gpu)
        lead.take(commands_pb2.LoadWeightsRequest(header=of.header(incarnation=2), weights=snapshot(0, incarnation=2)))
        lead.take(of.open_iteration(incarnation=2))
        await of.published("iteration_reported")
        assert "evaluation_reported" not in await of.kinds()


async def test_a_task_has_the_configured_number_of_held_out_prompts(tmp_path: Path) -> None:
    job, _ = evaluation_of(tmp_path)
    exercises = await open_exercises(job)
    assert exercises.num_prompts is None
    held_out = exercises.held_out()
    assert held_out.num_prompts == 3
    asked = [held_out.prompt_tokens(prompt) for prompt in range(3)]
    assert asked != [exercises.prompt_tokens(prompt) for prompt in range(3)]
