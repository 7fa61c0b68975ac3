"""Jobs of many iterations: what the scheduler knows of them stays small."""

from __future__ import annotations

from services.scheduler.shell.codecs.state_codec import encode_state
from services.scheduler.state.course import KEPT
from tests.unit.scheduler.drive import booted
from tests.unit.scheduler.fake_cluster import FakeCluster
from tests.unit.scheduler.fake_parts import spec

NUM_ITERATIONS = 3 * KEPT


def test_a_state_does_not_grow_with_the_iterations_that_are_done() -> None:
    drive = booted(FakeCluster(spec(num_iterations=NUM_ITERATIONS, evaluate_every=1)))

    def size_after(num_done: int) -> int:
        drive.run_until(lambda state: state.iteration is not None and state.next_iteration == num_done)
        return len(encode_state(drive.state))

    early, late = size_after(KEPT + 10), size_after(NUM_ITERATIONS - 1)

    assert [len(rows) for rows in (drive.state.summaries, drive.state.evaluations)] == [KEPT, KEPT]
    assert drive.state.summaries[-1].iteration == NUM_ITERATIONS - 2
    # Numbers get longer.
    assert late < 1.05 * early
