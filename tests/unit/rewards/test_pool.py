"""Real reward workers: functions that hang, die, raise and print, and the processes that remain afterwards."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from tidegate.rewards.pool import FunctionFailed, RewardPool, WorkerNotStarted
from tidegate.rewards.worker import FunctionPath

GRADERS = "tests.unit.rewards.graders"
PATIENCE_S = 60.0
SHORT_S = 0.2
"""The limit for calls that never end. No call that ends comes near it."""


@asynccontextmanager
async def pool_of(*names: str, size: int = 1) -> AsyncIterator[RewardPool]:
    paths = [FunctionPath(f"{GRADERS}:{name}", "") for name in names]
    pool = RewardPool(paths, size=size, start_timeout_s=PATIENCE_S)
    try:
        yield pool
    finally:
        pool.close()


async def reward_of(pool: RewardPool, response: str, *, timeout_s: float = PATIENCE_S) -> float:
    return await pool.call(0, {"prompt": "p", "response": response}, timeout_s=timeout_s)


async def test_a_function_gets_the_arguments_that_it_names_as_the_data_has_them() -> None:
    async with pool_of("length", "everything", "one_of_many") as pool:
        arguments = {
            "prompt": [{"role": "user", "content": "2 + 2"}],
            "response": "4 für ⅘",
            "answer": {"value": 4},
            "level": [1, None],
        }
        assert await pool.call(0, arguments, timeout_s=PATIENCE_S) == 7.0
        assert await pool.call(1, arguments, timeout_s=PATIENCE_S) == 1.0
        assert await pool.call(2, arguments | {"level": 1.5}, timeout_s=PATIENCE_S) == 3.0
        required = [signature.required for signature in await pool.signatures()]
        assert required == [("response",), ("prompt", "response", "answer"), ("response", "level")]
        assert len(pool.pids) == 1


async def test_a_function_has_no_credential_in_its_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("WANDB_API_KEY", "TIDEGATE_OPERATOR", "JUDGE_API_KEY"):
        monkeypatch.setenv(variable, "secret")
    async with pool_of("misbehaving") as pool:
        assert await reward_of(pool, "has WANDB_API_KEY") == 0.0
        assert await reward_of(pool, "has TIDEGATE_OPERATOR") == 0.0
        # What a person sets for a function of his own goes through.
        assert await reward_of(pool, "has JUDGE_API_KEY") == 1.0


async def test_a_functions_exception_is_reported_and_its_worker_serves_on() -> None:
    async with pool_of("misbehaving") as pool:
        before = await reward_of(pool, "pid")
        for response, want in (
            ("raise", "raised KeyError: 'no such unit'"),
            ("leave", "raised SystemExit: had enough"),
        ):
            with pytest.raises(FunctionFailed, match=want):
                await reward_of(pool, response)
        assert await reward_of(pool, "pid") == before


async def test_a_function_that_hangs_is_killed_at_its_limit_and_another_worker_serves_the_next_call() -> None:
    async with pool_of("misbehaving") as pool:
        before = await reward_of(pool, "pid")
        with pytest.raises(FunctionFailed, match=r"gave no result within 0\.2 s"):
            await reward_of(pool, "hang", timeout_s=SHORT_S)
        assert not psutil.pid_exists(int(before))
        assert await reward_of(pool, "pid") != before


async def test_child_processes_of_a_function_die_with_its_worker(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with pool_of("misbehaving") as pool:
        hanging = asyncio.create_task(reward_of(pool, f"hang with child {pipe}"))
        child = psutil.Process(int(await asyncio.to_thread(pipe.read_text)))
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
    _, alive = await asyncio.to_thread(psutil.wait_procs, [child], timeout=PATIENCE_S)
    assert not alive


@pytest.mark.parametrize(
    ("response", "want"),
    [("exit 3", "ended the process with status 3"), ("exit 0", "with status 0"), ("die", "died of SIGKILL")],
)
async def test_a_function_that_ends_its_process_is_reported_and_replaced_by_another_worker(
    response: str, want: str
) -> None:
    async with pool_of("misbehaving") as pool:
        before = await reward_of(pool, "pid")
        with pytest.raises(FunctionFailed, match=want):
            await reward_of(pool, response)
        assert await reward_of(pool, "pid") != before


@pytest.mark.parametrize(
    ("returned", "want"),
    [
        ("None", "returned None, which is no number"),
        ("nan", "returned nan: a reward is a finite number"),
        ("text", r"returned '1\.0', which is no number"),
        ("list", r"returned \[1\.0\], which is no number"),
        ("dict", r"returned {'score': 1\.0}, which is no number but of type dict: a reward is one finite number"),
        ("array", r"returned array\(\[1\., 2\.\]\), which is no number but of type ndarray"),
    ],
)
async def test_only_a_finite_number_is_a_reward(returned: str, want: str) -> None:
    async with pool_of("misbehaving") as pool:
        with pytest.raises(FunctionFailed, match=want):
            await reward_of(pool, f"return {returned}")
        assert await reward_of(pool, "return true") == 1.0


async def test_what_a_function_prints_is_no_answer(capfd: pytest.CaptureFixture[str]) -> None:
    async with pool_of("misbehaving") as pool:
        assert await reward_of(pool, "print") == 1.0
        assert await reward_of(pool, "else") == 0.5
    said = capfd.readouterr()
    assert said.out == ""
    assert "not an answer" in said.err


async def test_workers_take_turns_and_are_never_more_than_configured() -> None:
    async with pool_of("misbehaving", size=2) as pool:
        pids = await asyncio.gather(*(reward_of(pool, "pid") for _ in range(12)))
        assert len(set(pids)) <= 2
        assert pool.pids == {int(pid) for pid in pids}


async def test_a_worker_that_hangs_delays_no_other_worker() -> None:
    async with pool_of("misbehaving", size=2) as pool:
        hanging = asyncio.create_task(reward_of(pool, "hang"))
        assert [await reward_of(pool, "else") for _ in range(3)] == [0.5] * 3
        hanging.cancel()
        await asyncio.gather(hanging, return_exceptions=True)
        assert len(pool.pids) == 1, "a call that nobody waits for keeps no worker"


async def test_nothing_remains_after_the_end_of_the_pool() -> None:
    async with pool_of("misbehaving", size=2) as pool:
        hanging = asyncio.create_task(reward_of(pool, "hang"))
        waiting = [asyncio.create_task(reward_of(pool, "hang")) for _ in range(3)]
        await reward_of(pool, "pid")
        pids = pool.pids
    outcomes = await asyncio.gather(hanging, *waiting, return_exceptions=True)
    assert all(isinstance(outcome, FunctionFailed | WorkerNotStarted) for outcome in outcomes)
    assert len(pids) == 2
    assert not any(psutil.pid_exists(pid) for pid in pids)


UNUSABLE = {
    "no such module": ("tests.unit.rewards.absent:score", r"cannot be imported: ModuleNotFoundError: No module named"),
    "no such name": (f"{GRADERS}:scroe", r"graders:scroe: .*/graders.py has no function 'scroe'; name one that it"),
    "no function": (f"{GRADERS}:NUMBER", r"graders:NUMBER is a int and cannot be called: name a function"),
    "no such file": (
        "/absent/grading.py:score",
        r"grading.py:score cannot be imported: FileNotFoundError: .*/absent/gra",
    ),
    "arguments without names": (f"{GRADERS}:nameless", r"graders:nameless has arguments without names"),
}


@pytest.mark.parametrize("case", UNUSABLE)
async def test_an_unusable_function_is_refused_with_the_reason(case: str) -> None:
    path, want = UNUSABLE[case]
    pool = RewardPool([FunctionPath(path, "")], size=1, start_timeout_s=PATIENCE_S)
    with pytest.raises(ValueError, match=want):
        await pool.signatures()
    assert not pool.pids


MODULES = {
    "raises": ("raise OSError('no licence')", ValueError, r"mine:score cannot be imported: OSError: no licence"),
    "leaves": ("import sys; sys.exit(4)", ValueError, r"mine:score cannot be imported: SystemExit: 4"),
    "dies": ("import os; os._exit(4)", WorkerNotStarted, r"imports mine:score ended the process with status 4"),
}


@pytest.mark.parametrize("case", MODULES)
async def test_a_module_that_fails_at_its_import_is_refused_with_the_error(case: str, tmp_path: Path) -> None:
    text, kind, want = MODULES[case]
    (tmp_path / "mine.py").write_text(text)
    pool = RewardPool([FunctionPath("mine:score", str(tmp_path))], size=1, start_timeout_s=PATIENCE_S)
    with pytest.raises(kind, match=want):
        await pool.signatures()
    assert not pool.pids


async def test_modules_of_one_name_in_two_folders_are_not_confused(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "other")]
    for folder in folders:
        folder.mkdir()
        (folder / "mine.py").write_text("def score(response):\n    return 1.0\n")
    functions = [FunctionPath("mine:score", str(folder)) for folder in folders]
    pool = RewardPool(functions, size=1, start_timeout_s=PATIENCE_S)
    with pytest.raises(
        ValueError, match=rf"mine is {folders[0]}/mine.py in this process, but the reward needs {folders[1]}/mine.py"
    ):
        await pool.signatures()


async def test_a_module_that_hangs_at_its_import_fails_at_the_time_limit(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import threading; threading.Event().wait()")
    pool = RewardPool([FunctionPath("mine:score", str(tmp_path))], size=1, start_timeout_s=SHORT_S)
    with pytest.raises(WorkerNotStarted, match=r"imports mine:score gave no result within 0\.2 s"):
        await pool.signatures()
    assert not pool.pids


PARENT = """
import asyncio
from tidegate.rewards.pool import RewardPool
from tidegate.rewards.worker import FunctionPath

async def main():
    pool = RewardPool([FunctionPath("tests.unit.rewards.graders:misbehaving", "")], size=1, start_timeout_s=60)
    print(int(await pool.call(0, {"prompt": "p", "response": "pid"}, timeout_s=60)), flush=True)
    await pool.call(0, {"prompt": "p", "response": "hang"}, timeout_s=600)

asyncio.run(main())
"""


def test_a_worker_dies_with_its_parent_in_the_middle_of_a_call() -> None:
    with subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([worker], timeout=PATIENCE_S)
    assert not alive
