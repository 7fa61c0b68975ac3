"""Prompts and rewards are the same for every lead, and come from the data that the job started with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.rollout.exercises import Exercises, Judged, open_exercises
from tests.component_bench import job_config
from tidegate.config.job_config import JobConfig, parse_config
from tidegate.job import Job, load_job
from tidegate.launcher.data_check import with_checked_data
from tidegate.tasks.tokenizer import build_tokenizer

NUMBERS = ("one", "two", "three", "four", "five")


def data_config(tmp_path: Path) -> JobConfig:
    """A config with five records, each of which asks for the next number."""
    rows = [
        {"prompt": one, "answer": following} for one, following in zip(NUMBERS, NUMBERS[1:] + NUMBERS[:1], strict=True)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    build_tokenizer(NUMBERS).save(tmp_path / "words.json")
    raw: dict[str, Any] = job_config(tmp_path, model={"tokenizer": str(tmp_path / "words.json")}).model_dump(
        mode="json"
    )
    raw |= {"task": None, "data": {"train": str(tmp_path / "train.jsonl"), "answer_key": "answer"}}
    raw["rewards"] = [
        {"name": "exact_match"},
        {"name": "function", "path": "tests.unit.rewards.graders:length", "weight": 0.25, "timeout_s": 60},
    ]
    return parse_config(raw)


async def judged(job: Job, exercises: Exercises, prompt: int, responses: list[str]) -> Judged:
    names = [f"response {draw}" for draw in range(len(responses))]
    return await exercises.judge(prompt, names, [job.tokenizer.encode_response(text) for text in responses])


async def test_every_lead_gets_the_same_prompts_and_rewards(tmp_path: Path) -> None:
    job = load_job(data_config(tmp_path))
    first, second = await open_exercises(job), await open_exercises(job)
    try:
        asked = [first.prompt_tokens(index) for index in range(12)]
        assert [second.prompt_tokens(index) for index in range(12)] == asked
        texts = [job.tokenizer.decode_response(tokens[1:]) for tokens in asked]
        assert sorted(texts[:5]) == sorted(texts[5:10]) == sorted(NUMBERS)
        answer = NUMBERS[(NUMBERS.index(texts[7]) + 1) % 5]
        length = "tests.unit.rewards.graders:length"
        assert first.reward_names == ("exact_match", length)
        want = Judged(
            (1.0 + len(answer) / 4, len("one one") / 4),
            ({"exact_match": 1.0, length: len(answer)}, {"exact_match": 0.0, length: len("one one")}),
        )
        assert (
            await judged(job, first, 7, [answer, "one one"])
            == await judged(job, second, 7, [answer, "one one"])
            == want
        )
    finally:
        first.close()
        second.close()


async def test_data_that_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    job = await with_checked_data(load_job(data_config(tmp_path)))
    (await open_exercises(job)).close()
    with (tmp_path / "train.jsonl").open("a") as stream:
        stream.write('{"prompt": "one", "answer": "one"}\n')
    with pytest.raises(
        ValueError, match=r"train\.jsonl has changed since the job started: restore the files as they were"
    ):
        await open_exercises(job)


async def test_held_out_prompts_are_those_of_the_evaluations_data_in_order(tmp_path: Path) -> None:
    rows = [{"prompt": "two one", "answer": "three"}, {"prompt": "one two", "answer": "five"}]
    (tmp_path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    raw = data_config(tmp_path).model_dump(mode="json")
    for num_prompts, want in ((None, ["two one", "one two"]), (1, ["two one"])):
        section = {"every": 2, "data": str(tmp_path / "test.jsonl"), "num_prompts": num_prompts}
        job = await with_checked_data(load_job(parse_config(raw | {"evaluation": section})))
        exercises = await open_exercises(job)
        try:
            held_out = exercises.held_out()
            assert held_out.num_prompts == len(want)
            texts = [job.tokenizer.decode_response(held_out.prompt_tokens(prompt)[1:]) for prompt in range(len(want))]
            assert texts == want
            (values,) = (await judged(job, held_out, 0, ["three"])).by_name
            assert tuple(values.values()) == (1.0, 5.0)
        finally:
            exercises.close()


async def test_data_of_the_evaluation_that_changed_since_the_start_is_refused(tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text('{"prompt": "two one", "answer": "three"}\n')
    raw = data_config(tmp_path).model_dump(mode="json")
    raw |= {"evaluation": {"every": 2, "data": str(tmp_path / "test.jsonl")}}
    job = await with_checked_data(load_job(parse_config(raw)))
    exercises = await open_exercises(job)
    exercises.held_out()
    (tmp_path / "test.jsonl").write_text('{"prompt": "one", "answer": "three"}\n')
    with pytest.raises(ValueError, match=r"evaluation\.data=.*test\.jsonl has changed since the job started"):
        exercises.held_out()


async def test_the_exercises_of_a_built_in_task_have_its_prompts_and_rewards(tmp_path: Path) -> None:
    job = load_job(job_config(tmp_path))
    assert job.task is not None
    exercises = await open_exercises(job)
    asked = job.task.prompt(3)
    assert exercises.prompt_tokens(3) == job.tokenizer.encode_prompt(asked.text)
    responses = [job.task.demonstration(index).response for index in range(40)]
    want = tuple(job.task.reward(asked, text) for text in responses)
    got = await judged(job, exercises, 3, responses)
    assert got == Judged(want, tuple({"countdown": reward} for reward in want))
