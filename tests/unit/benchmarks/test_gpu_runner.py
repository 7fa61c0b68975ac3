"""The runner of `make gpu`, with parts that are small programs. A fifo tells which processes hold its other end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.machine import Facts, facts
from benchmarks.gpu.parts import Part
from benchmarks.gpu.runner import Outcome, Result, run_parts, table

FACTS = Facts(device="a card", driver="1.2", torch="2.13.0", python="3.12.1")
NOTES = "report.note({'copy_bytes_per_s': 5.0})"
SKIPS = "report.skip('no SGLang here'); sys.exit(77)"
HOLDS = """
held = open(sys.argv[1], 'w')
report.note({'seconds_so_far': 3})
for session in (False, True) if len(sys.argv) > 3 else ():
    subprocess.Popen(['sleep', 'infinity'], start_new_session=session, pass_fds=[held.fileno()])
held.write('here'); held.flush()
signal.pause()
"""
"""Holds the fifo's other end; with one more argument together with children, one of them in a session of its own."""
LEAVES = """
held = open(sys.argv[1], 'w')
subprocess.Popen(['sh', '-c', 'sleep infinity & wait'], start_new_session=True, pass_fds=[held.fileno()])
"""
"""Ends, and leaves a child with a child of its own in another session. Both hold the fifo's other end."""
ROOT = Path(__file__).resolve().parents[3]
FAR_S, NEAR_S = 60.0, 5.0
END_S = 30.0


def a_part(name: str, body: str, *arguments: str, limit_s: float = FAR_S) -> Part:
    head = (
        "import os, signal, subprocess, sys; from pathlib import Path; from benchmarks.gpu.report import PartReport\n"
    )
    return Part(name, limit_s, "a test", ("-c", f"{head}report = PartReport(Path(sys.argv[-1]))\n{body}", *arguments))


def run(*parts: Part, folder: Path) -> list[Result]:
    return run_parts(parts, folder=folder, facts=FACTS, commit="abc", say=lambda line: None)


def saved(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


@pytest.fixture
def held(tmp_path: Path) -> Iterator[tuple[Path, int]]:
    """A fifo and its reading end. The processes of a part hold the other end."""
    path = tmp_path / "held"
    os.mkfifo(path)
    reading = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    yield path, reading
    os.close(reading)


def has_ended(reading: int) -> bool:
    """Whether no process has the other end any more. Waits for that."""
    while select.select([reading], [], [], END_S)[0]:
        if not os.read(reading, 64):
            return True
    return False


def test_a_result_has_the_figures_the_machine_and_the_command(tmp_path: Path) -> None:
    (result,) = run(a_part("doctor", NOTES), folder=tmp_path)
    assert result.status is Outcome.OK
    found = saved(tmp_path, "doctor")
    assert found["figures"] == {"copy_bytes_per_s": 5.0}
    assert {**FACTS, "commit": "abc", "status": "ok", "reason": "", "limit_s": FAR_S}.items() <= found.items()
    assert found["command"].startswith("python -c ")


def test_a_file_that_a_part_keeps_is_beside_its_result_until_its_next_run(tmp_path: Path) -> None:
    (tmp_path / "a file").write_text("{}")
    keeps = a_part("demo", f"report.keep('timeline.json', Path({str(tmp_path / 'a file')!r})); {NOTES}")
    run(keeps, folder=tmp_path / "results")
    assert (tmp_path / "results" / "demo.timeline.json").read_text() == "{}"
    run(a_part("doctor", NOTES), folder=tmp_path / "results")
    assert (tmp_path / "results" / "demo.timeline.json").exists()
    run(a_part("demo", NOTES), folder=tmp_path / "results")
    assert not (tmp_path / "results" / "demo.timeline.json").exists()


def test_a_part_that_fails_or_is_skipped_says_why_and_keeps_no_other_from_running(tmp_path: Path) -> None:
    fails = a_part("tests", f"{NOTES}; raise RuntimeError('no such kernel')")
    results = run(fails, a_part("sglang", SKIPS), a_part("demo", NOTES), folder=tmp_path)
    assert [result.status for result in results] == [Outcome.FAILED, Outcome.SKIPPED, Outcome.OK]
    assert results[0].reason.startswith("RuntimeError: no such kernel (exit 1)")
    assert saved(tmp_path, "tests")["figures"] == {"copy_bytes_per_s": 5.0}
    assert results[1].reason == "no SGLang here"


def test_a_part_is_killed_by_its_limit_with_its_children_and_leaves_the_figures_that_it_had(
    tmp_path: Path, held: tuple[Path, int]
) -> None:
    path, reading = held
    slow = a_part("reshard", HOLDS, str(path), "with children", limit_s=NEAR_S)
    results = run(slow, a_part("demo", NOTES), folder=tmp_path / "results")
    assert [result.status for result in results] == [Outcome.TIMED_OUT, Outcome.OK]
    assert has_ended(reading)
    assert saved(tmp_path / "results", "reshard")["figures"] == {"seconds_so_far": 3}


def test_what_a_part_leaves_in_a_session_of_its_own_ends_with_the_part(tmp_path: Path, held: tuple[Path, int]) -> None:
    path, reading = held
    other = subprocess.Popen(["sleep", "infinity"])
    (result,) = run(a_part("demo", LEAVES, str(path)), folder=tmp_path / "results")
    assert result.status is Outcome.OK
    assert has_ended(reading)
    assert other.poll() is None, "a process that is not the part's was killed"
    other.kill()
    other.wait()


def test_a_runner_that_is_killed_in_mid_part_leaves_whole_results_and_no_part(
    tmp_path: Path, held: tuple[Path, int]
) -> None:
    path, reading = held
    folder = tmp_path / "results"
    program = f"""
from pathlib import Path
from tests.unit.benchmarks import test_gpu_runner as own
parts = own.a_part('doctor', own.NOTES), own.a_part('demo', own.HOLDS, {str(path)!r})
own.run(*parts, folder=Path({str(folder)!r}))
"""
    runner = subprocess.Popen([sys.executable, "-c", program])
    assert select.select([reading], [], [], END_S)[0]
    runner.kill()
    runner.wait()
    assert has_ended(reading)
    assert saved(folder, "doctor")["status"] == "ok"
    assert not (folder / "demo.json").exists()


def test_the_table_has_a_row_for_each_part(tmp_path: Path) -> None:
    first, second = table(run(a_part("doctor", NOTES), a_part("sglang", SKIPS), folder=tmp_path)).splitlines()
    assert first.split()[:2] == ["doctor", "ok"]
    assert first.endswith("copy_bytes_per_s 5")
    assert second.split()[:2] == ["sglang", "skipped"]
    assert second.endswith("no SGLang here")


def test_a_machine_that_does_not_answer_in_time_is_told_with_the_seconds() -> None:
    with pytest.raises(RuntimeError, match=r"benchmarks\.gpu\.machine did not answer within 0\.001 s"):
        facts(timeout_s=0.001)


def command(*arguments: str, python: tuple[str, ...] = (sys.executable,)) -> subprocess.CompletedProcess[str]:
    # No device is visible, also where there is one.
    env = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(
        [*python, "-m", "benchmarks.gpu", *arguments], capture_output=True, text=True, env=env, check=False
    )


def test_a_dry_run_lists_the_parts_with_their_limits() -> None:
    listed = command("--dry-run")
    assert listed.returncode == 0
    assert [line.split()[0] for line in listed.stdout.splitlines()] == [
        "doctor",
        "tests",
        "reshard",
        "snapshot",
        "demo",
        "deaths",
        "cluster",
        "sglang",
    ]
    assert all("at most" in line for line in listed.stdout.splitlines())


@pytest.mark.parametrize(
    ("arguments", "want"), [((), "shows no device"), (("--part", "dmeo"), "no part is called 'dmeo'")]
)
def test_what_cannot_run_is_said_in_one_line_with_exit_2(arguments: tuple[str, ...], want: str) -> None:
    refused = command(*arguments)
    assert refused.returncode == 2
    assert want in refused.stderr
    assert len(refused.stderr.splitlines()) == 1
    assert refused.stdout == ""


WITHOUT_PACKAGES = (sys.executable, "-S")


@pytest.mark.parametrize(
    ("arguments", "want"), [((), "DEVICE=cpu tries the parts"), (("--part", "dmeo"), "no part is called 'dmeo'")]
)
def test_an_interpreter_without_packages_refuses_what_cannot_run(arguments: tuple[str, ...], want: str) -> None:
    refused = command("--check", *arguments, python=WITHOUT_PACKAGES)
    assert refused.returncode == 2
    assert want in refused.stderr
    assert len(refused.stderr.splitlines()) == 1


def test_a_check_of_the_parts_on_a_cpu_runs_none() -> None:
    checked = command("--check", "--device", "cpu", python=WITHOUT_PACKAGES)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("options", [(), ("WHEELS=wheels",)])
def test_make_asks_for_a_device_before_it_makes_an_environment(options: tuple[str, ...], tmp_path: Path) -> None:
    folders = (f"VENV={tmp_path / 'venv'}", f"GPU_VENV={tmp_path / 'gpu'}", f"PYTHON={sys.executable}")
    plan = subprocess.run(
        ["make", "--dry-run", "-C", str(ROOT), "gpu", *folders, *options], capture_output=True, text=True, check=True
    ).stdout
    assert 0 < plan.index("-m benchmarks.gpu --check --device cuda") < plan.index(str(tmp_path))


def test_make_lists_the_parts_without_a_check() -> None:
    listed = subprocess.run(
        ["make", "--dry-run", "-C", str(ROOT), "gpu", "DRY=1"], capture_output=True, text=True, check=True
    ).stdout
    assert "--dry-run" in listed
    assert "--check" not in listed
