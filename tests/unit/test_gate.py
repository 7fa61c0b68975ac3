"""The gate with real processes: one holder for each GPU, tokens only grow, a hold dies with its holder."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tidegate.gate import Gate, GateClosed, GateDamaged, GateHold, GateState, StaleToken
from tidegate.types import GpuId, Grant, Token

GPU = GpuId("n0/3")
HOLDER = """
import sys
from pathlib import Path
from tidegate.gate import Gate
from tidegate.types import GpuId, Grant, Token
hold = Gate(Path(sys.argv[1])).acquire(Grant(GpuId(sys.argv[2]), Token(int(sys.argv[3]), int(sys.argv[4]))))
print("held", flush=True)
sys.stdin.read()
"""


def grant(counter: int, term: int = 1, gpu: GpuId = GPU) -> Grant:
    return Grant(gpu, Token(term, counter))


def holder_process(folder: Path, held: Grant) -> subprocess.Popen[str]:
    """A process that holds the GPU. It ends when its stdin is closed."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder), held.gpu, str(held.token.term), str(held.token.counter)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def refused(gate: Gate, wanted: Grant, error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        gate.acquire(wanted)
    return str(caught.value)


def test_a_gpu_in_use_is_refused_with_its_holder_and_free_again_once_the_holder_is_killed(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    holder = holder_process(tmp_path, grant(4))
    text = refused(gate, grant(5), GateClosed)
    assert "1.4" in text
    assert str(holder.pid) in text
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    gate.acquire(grant(5)).close()
    assert gate.highest_token(GPU) == Token(1, 5)


def test_a_hold_passed_to_another_process_outlives_the_one_that_acquired(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    hold = gate.acquire(grant(1))
    worker = subprocess.Popen(["cat"], stdin=subprocess.PIPE, pass_fds=[hold.fileno()])
    hold.close()
    assert gate.is_held(GPU)
    refused(gate, grant(2), GateClosed)
    worker.kill()
    worker.communicate()
    assert not gate.is_held(GPU)


@pytest.mark.parametrize("held", [True, False], ids=["while it is held", "after the release"])
def test_a_token_that_is_not_larger_is_refused(tmp_path: Path, held: bool) -> None:
    gate = Gate(tmp_path)
    hold = gate.acquire(grant(7, term=2))
    if not held:
        hold.close()
    for stale in (grant(7, term=2), grant(6, term=2), grant(99, term=1)):
        text = refused(gate, stale, StaleToken)
        assert str(stale.token) in text
        assert "2.7" in text
    assert gate.report() == [GateState(GPU, Token(2, 7), held=held)]
    hold.close()


def test_a_refused_attempt_changes_nothing(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    with_hold = gate.acquire(grant(1))
    refused(gate, grant(9), GateClosed)
    with_hold.close()
    gate.acquire(grant(2)).close()


def test_the_highest_token_survives_a_kill_at_any_moment(tmp_path: Path) -> None:
    holder_process(tmp_path, grant(3)).kill()
    # A crash in mid-write leaves this behind, and the next process to pass overwrites it.
    (tmp_path / "n0%2F3.partial").write_text('{"term": 1, "cou')
    gate = Gate(tmp_path)
    assert gate.wait_until_free(GPU, timeout_s=60)
    refused(gate, grant(3), StaleToken)
    gate.acquire(grant(4)).close()
    assert gate.highest_token(GPU) == Token(1, 4)


def test_no_attempt_passes_a_damaged_record(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.acquire(grant(3)).close()
    (tmp_path / "n0%2F3.json").write_text("{}")
    assert "highest" in refused(gate, grant(4), GateDamaged)


def test_names_with_separators_and_dots_stay_inside_the_folder_and_apart(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "gate")
    gpus = [GpuId(name) for name in ("n0/3", "n0%2F3", "../n0", "..", ".", "n.0/1")]
    for gpu in gpus:
        gate.acquire(grant(1, gpu=gpu)).close()
    assert [state.gpu for state in gate.report()] == sorted(gpus)
    assert {path.name for path in tmp_path.iterdir()} == {"gate"}


def _acquire_on_signal(folder: Path, go: int, leave: int, counter: int, outcome: int) -> None:
    os.read(go, 1)
    try:
        Gate(folder).acquire(grant(counter))
    except (GateClosed, StaleToken) as error:
        os.write(outcome, type(error).__name__[:1].encode())
    else:
        os.write(outcome, b"!")
    os.read(leave, 1)


def test_of_many_at_once_exactly_one_passes_while_reports_are_taken(tmp_path: Path) -> None:
    go, leave, outcome = os.pipe(), os.pipe(), os.pipe()
    context = multiprocessing.get_context("fork")
    racers = [
        context.Process(target=_acquire_on_signal, args=(tmp_path, go[0], leave[0], counter, outcome[1]), daemon=True)
        for counter in range(1, 9)
    ]
    for racer in racers:
        racer.start()
    gate = Gate(tmp_path)
    os.write(go[1], b"." * len(racers))
    outcomes = b""
    while len(outcomes) < len(racers):
        gate.report()
        outcomes += os.read(outcome[0], 1)
    assert outcomes.count(b"!") == 1
    assert gate.is_held(GPU)
    os.write(leave[1], b"." * len(racers))
    for racer in racers:
        racer.join()
    assert not gate.is_held(GPU)
    for fd in (*go, *leave, *outcome):
        os.close(fd)


def test_a_report_never_makes_an_attempt_fail(tmp_path: Path) -> None:
    reporter = multiprocessing.get_context("fork").Process(target=_report_forever, args=(tmp_path,), daemon=True)
    reporter.start()
    gate = Gate(tmp_path)
    for counter in range(1, 200):
        gate.acquire(grant(counter)).close()
    reporter.kill()
    reporter.join()


def _report_forever(folder: Path) -> None:
    while True:
        Gate(folder).report()


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("acquire"), st.integers(0, 2), st.integers(0, 6)),
            st.tuples(st.just("release"), st.just(0), st.just(0)),
        ),
        max_size=25,
    )
)
def test_any_history_has_one_holder_and_growing_tokens(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int, int]]
) -> None:
    gate = Gate(tmp_path_factory.mktemp("gate"))
    hold: GateHold | None = None
    highest: Token | None = None
    for step, term, counter in steps:
        if step == "release":
            if hold is not None:
                hold.close()
            hold = None
            continue
        wanted = grant(counter, term=term)
        if highest is not None and wanted.token <= highest:
            refused(gate, wanted, StaleToken)
        elif hold is not None:
            refused(gate, wanted, GateClosed)
        else:
            hold, highest = gate.acquire(wanted), wanted.token
        assert gate.highest_token(GPU) == highest
        assert gate.is_held(GPU) == (hold is not None)
    if hold is not None:
        hold.close()
