"""The picture of an iteration's training: its updates, and the rates that they give."""

from __future__ import annotations

from contextlib import suppress

from services.actor.minibatches import MinibatchAssembly
from services.actor.rates import TrainingRates
from services.actor.training_picture import TrainingPicture
from tidegate.candidates import Candidates
from tidegate.runtime.crew import WorkerGone
from tidegate.types import Layout, MinibatchOrder


async def test_an_interrupted_update_counts_for_no_rate() -> None:
    assembly = MinibatchAssembly(Candidates(0, 4, 0), num_minibatches=2, order=MinibatchOrder.FIXED)
    picture = TrainingPicture(assembly, TrainingRates(assumed_s=0.0))
    with suppress(WorkerGone), picture.in_update(Layout(), 10):
        assert not (await picture.paint()).is_at_boundary
        raise WorkerGone("a rank died")
    painted = await picture.paint()
    assert (list(painted.measured), painted.is_at_boundary) == ([], True)
    with picture.in_update(Layout(), 10):
        pass
    assert len((await picture.paint()).measured) == 1
