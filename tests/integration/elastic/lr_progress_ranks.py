"""The rank processes of the learning-rate progress tests: updates whose ledger is committed with the state."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path

import numpy as np
from torch._C._distributed_c10d import TCPStore

from tests.integration.elastic.trainer_ranks import NUM_SEQUENCES, SEED, adam, minibatch, provider
from tests.integration.elastic.world_ranks import join, open_store
from tests.ranks import RankContext, Results
from tidegate.checksums import file_checksum
from tidegate.elastic import checkpoints
from tidegate.elastic.settings import ElasticSettings
from tidegate.elastic.state.files import StateFiles
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.lr.checkpoint import decoded, encoded
from tidegate.lr.progress import LrLedger, LrRules
from tidegate.lr.schedule import Decay, LrSchedule
from tidegate.types import Layout

NUM_UPDATES = 4
SCHEDULE = LrSchedule(1e-2, budget=3, warm_up=Fraction(1, 2), decay=Decay.COSINE, minimum=1e-4)
NOMINAL = Fraction(3, 2)
"""The nominal size of a batch of two minibatches."""


def uninterrupted(context: RankContext, *, folder: str) -> Results:
    """Do all updates in one layout, with a save after each, half-way through a batch too."""
    losses, rates = [], []
    with _trainer(context, open_store(context), epoch=1) as trainer:
        trainer.start(Layout(dp=2))
        for update in range(NUM_UPDATES):
            loss, rate = _train(trainer, update)
            losses.append(loss)
            rates.append(rate)
            checkpoints.save(trainer, Path(folder) / str(update), f"rank{context.rank}")
        text = str(trainer.cursor["lr"])
    return {"losses": np.array(losses), "rates": np.array(rates), "ledger": np.array(text)}


def restored(context: RankContext, *, folder: str, layout: dict[str, int]) -> Results:
    """Continue from each of those saves to the end, in another layout."""
    losses, rates, texts = [], [], []
    store = open_store(context)
    for saved in range(NUM_UPDATES - 1):
        with _trainer(context, store, epoch=saved + 1) as trainer:
            files = sorted((Path(folder) / str(saved)).iterdir())
            state = StateFiles(files[0].parent, {path.name: file_checksum(path) for path in files})
            checkpoints.start_from(trainer, state, Layout(**layout))
            rest = [_train(trainer, update) for update in range(saved + 1, NUM_UPDATES)]
            done = [np.nan] * (saved + 1)
            losses.append(done + [loss for loss, _ in rest])
            rates.append(done + [rate for _, rate in rest])
            texts.append(str(trainer.cursor["lr"]))
    return {"losses": np.array(losses), "rates": np.array(rates), "ledgers": np.array(texts)}


@contextmanager
def _trainer(context: RankContext, store: TCPStore, *, epoch: int) -> Iterator[ElasticTrainer]:
    world = join(context, store, epoch=epoch, members=tuple(range(context.world_size)))
    trainer = ElasticTrainer(provider(), adam(), world=world, settings=ElasticSettings(seed=SEED))
    yield trainer
    trainer.close()
    world.leave()


def _train(trainer: ElasticTrainer, update: int) -> tuple[float, float]:
    """The loss and the rate. The cursor's ledger belongs to the state; its successor is committed with the update."""
    batch, is_last = divmod(update, 2)
    text = trainer.cursor.get("lr")
    ledger = LrLedger(SCHEDULE, LrRules(NUM_SEQUENCES)) if text is None else decoded(str(text))
    if not is_last:
        ledger = ledger.opened(batch, 2 * NUM_SEQUENCES, nominal=NOMINAL)
    after = ledger.committed_update(batch, str(update), ledger.next_units(NUM_SEQUENCES))
    after = after.closed(batch) if is_last else after
    done = trainer.train_minibatch(minibatch(update), ledger.rate, cursor={"lr": encoded(after)})
    assert done is not None
    return done.sums[0], ledger.rate
