"""The forms that a reward function may have: in a file, async, and with verl's names. Each runs in a real worker."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.unit.rewards import graders
from tidegate.rewards.pool import FunctionFailed, RewardPool
from tidegate.rewards.worker import FunctionPath

GRADERS = graders.__name__
PATIENCE_S = 60.0
GIVEN: dict[str, Any] = {"prompt": "2 + 2", "response": "4", "answer": "four"}


@asynccontextmanager
async def pool_of(*paths: str, import_from: str = "") -> AsyncIterator[RewardPool]:
    functions = [FunctionPath(path, import_from) for path in paths]
    pool = RewardPool(functions, size=1, start_timeout_s=PATIENCE_S)
    try:
        yield pool
    finally:
        pool.close()


async def value(pool: RewardPool, number: int = 0, **arguments: Any) -> float:
    return await pool.call(number, GIVEN | arguments, timeout_s=PATIENCE_S)


async def test_an_async_function_is_awaited_and_keeps_its_event_loop() -> None:
    async with pool_of(f"{GRADERS}:later", f"{GRADERS}:same_loop") as pool:
        assert await value(pool, response="one two") == 2.0
        assert [await value(pool, 1) for _ in range(2)] == [1.0, 1.0]
        want = rf"^raised KeyError: 'no such unit' at {graders.__file__}:\d+ in later$"
        with pytest.raises(FunctionFailed, match=want) as failed:
            await value(pool, response="raise")
        assert failed.value.traceback.count("File ") == 1, "no line of asyncio's comes before the user's"
        assert await value(pool, response="one") == 1.0


async def test_a_function_with_verls_names_gets_response_answer_and_columns_by_them() -> None:
    async with pool_of(f"{GRADERS}:compute_score", f"{GRADERS}:compute_score_anywhere") as pool:
        assert await value(pool, data_source="gsm8k", extra_info={"index": 7}, ability="math") == 1.0
        assert await value(pool, 1, ability="math") == 1.0
        assert [signature.required for signature in await pool.signatures()] == [(), ()]


async def test_files_of_like_names_are_different_rewards(tmp_path: Path) -> None:
    files = {"r/math_a.py": 1.0, "r/math/a.py": 2.0, "r/math-a.py": 3.0}
    for file, number in files.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(f"def score():\n    return {number}\n")
    async with pool_of(*(f"{file}:score" for file in files), import_from=str(tmp_path)) as pool:
        assert [await value(pool, number) for number in range(len(files))] == list(files.values())


async def test_a_function_is_found_in_a_file_beside_its_own_modules(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "words.py").write_text("COUNT = 3\n")
    text = (
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom words import COUNT\n\n"
        "@dataclass\nclass Score:\n    value: float\n\n"
        "def score(response):\n    return Score(COUNT + len(response)).value\n"
    )
    file = tmp_path / "mine" / "my-reward.v2.py"
    file.write_text(text)
    async with pool_of(f"{file}:score", "mine/my-reward.v2.py:score", import_from=str(tmp_path)) as pool:
        assert [await value(pool, number) for number in range(2)] == [4.0, 4.0]


async def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    for name in ("json", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "json.py").write_text(f"def score():\n    return {len(name)}\n")
    async with pool_of(*(f"{tmp_path}/{name}/json.py:score" for name in ("json", "other"))) as pool:
        assert [await value(pool, number) for number in range(2)] == [4.0, 5.0]


async def test_the_place_of_an_error_is_the_users_deepest_line_and_the_traceback_goes_on(tmp_path: Path) -> None:
    file = tmp_path / "grading.py"
    file.write_text("import json\n\ndef score(response):\n    return json.loads(response)['score']\n")
    async with pool_of(f"{file}:score") as pool:
        with pytest.raises(FunctionFailed, match=rf"raised JSONDecodeError: .* at {file}:4 in score$") as failed:
            await value(pool, response="four")
    assert "json/decoder.py" in failed.value.traceback
    assert failed.value.traceback.splitlines()[1] == f'  File "{file}", line 4, in score'
