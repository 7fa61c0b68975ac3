"""The demo task: right and wrong answers, and the long tail of their lengths."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tidegate.tasks import Prompt, find_task
from tidegate.tasks.countdown import MAX_LENGTH, MIN_LENGTH, RIGHT_SHARE, CountdownTask

FROM_FOUR = Prompt("count from 4 :")


@pytest.mark.parametrize(
    ("prompt", "response"),
    [
        pytest.param(FROM_FOUR, "4 3 2 1 liftoff", id="a countdown from four"),
        pytest.param(Prompt("count from 1 :"), "1 liftoff", id="the shortest countdown"),
        pytest.param(
            Prompt("count from 47 :"),
            " ".join([*map(str, range(47, 0, -1)), "liftoff"]),
            id="the longest countdown",
        ),
    ],
)
def test_the_right_answer_earns_one(prompt: Prompt, response: str) -> None:
    assert CountdownTask(seed=0).reward(prompt, response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        pytest.param("", id="nothing"),
        pytest.param("4 3 2 1", id="without liftoff"),
        pytest.param("4 3 2 1 0 liftoff", id="zero counted too"),
        pytest.param("4 3 2 1 liftoff liftoff", id="liftoff twice"),
        pytest.param("3 2 1 liftoff", id="begun one late"),
        pytest.param("5 4 3 2 1 liftoff", id="begun one early"),
        pytest.param("4 2 1 liftoff", id="a number skipped"),
        pytest.param("4 3 3 2 1 liftoff", id="a number repeated"),
        pytest.param("4 3 2 1 liftoff 7", id="something after the end"),
        pytest.param("1 2 3 4 liftoff", id="counted up"),
        pytest.param("4321liftoff", id="not words"),
    ],
)
def test_any_other_answer_earns_nothing(response: str) -> None:
    assert CountdownTask(seed=0).reward(FROM_FOUR, response) == 0.0


@pytest.mark.parametrize(
    "text",
    ["", "count from 4", "count from x :", "count from 0 :", "count from 57 :", "count from 04 :", "count  from 4 :"],
)
def test_a_reward_for_another_tasks_prompt_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not 'count from NUMBER :' with a number of 1 to 56"):
        CountdownTask(seed=0).reward(Prompt(text), "1 liftoff")


def test_another_process_gives_the_same_prompts_and_demonstrations() -> None:
    script = (
        "from tidegate.tasks import find_task\n"
        "task = find_task('countdown', 5)\n"
        "print([(task.prompt(index), task.demonstration(index)) for index in range(50)])"
    )
    other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    task = find_task("countdown", 5)
    assert other.stdout.strip() == str([(task.prompt(index), task.demonstration(index)) for index in range(50)])


def test_the_order_of_asking_does_not_change_prompts_and_demonstrations() -> None:
    task = CountdownTask(seed=1)
    want = [(task.prompt(index), task.demonstration(index)) for index in range(20)]
    again = CountdownTask(seed=1)
    assert [(again.prompt(index), again.demonstration(index)) for index in reversed(range(20))] == want[::-1]


def test_seeds_and_purposes_draw_different_lists() -> None:
    first, second = CountdownTask(seed=0), CountdownTask(seed=1)
    prompts = [first.prompt(index) for index in range(50)]
    assert prompts != [second.prompt(index) for index in range(50)]
    assert prompts != [first.demonstration(index).prompt for index in range(50)]
    held_out = [first.held_out(index) for index in range(50)]
    assert held_out not in (prompts, [first.demonstration(index).prompt for index in range(50)])
    assert held_out == [CountdownTask(seed=0).held_out(index) for index in range(50)]


@pytest.mark.parametrize("purpose", ["prompt", "demonstration"])
def test_a_negative_index_is_refused(purpose: str) -> None:
    with pytest.raises(ValueError, match=f"index of a {purpose} is -1"):
        getattr(CountdownTask(seed=0), purpose)(-1)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_lengths_of_right_answers_have_a_long_tail(seed: int) -> None:
    task = CountdownTask(seed)
    lengths = sorted(int(task.prompt(index).text.split()[2]) + 1 for index in range(4000))
    median, p95 = lengths[2000], lengths[3800]
    assert 6 <= median <= 8
    assert p95 >= 3 * median
    assert (lengths[0], lengths[-1]) == (MIN_LENGTH, MAX_LENGTH)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_stated_share_of_demonstrations_is_right(seed: int) -> None:
    task = CountdownTask(seed)
    shown = [task.demonstration(index) for index in range(4000)]
    right = sum(task.reward(one.prompt, one.response) for one in shown)
    assert right / 4000 == pytest.approx(RIGHT_SHARE, abs=0.03)  # four standard deviations of 4000 draws


def test_the_words_cover_every_text_and_fill_the_vocabulary() -> None:
    task = find_task("countdown", 0)
    words = set(task.words())
    for index in range(500):
        shown = task.demonstration(index)
        assert words.issuperset([*task.prompt(index).text.split(), *shown.prompt.text.split(), *shown.response.split()])
    assert len(task.words()) == len(words) == 61


def test_the_demo_task_is_found_by_its_name() -> None:
    assert find_task("countdown", 3) == CountdownTask(seed=3)


def test_an_unknown_task_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no task is called 'countdwn'; known tasks: countdown"):
        find_task("countdwn", 0)
