"""What the files that a job's config names say of the job, for forecasts."""

from __future__ import annotations

from dataclasses import dataclass, replace

from simulator.model import ModelSection
from simulator.physics.shapes import ShapeSection
from simulator.planning.hardware import shape_of
from tidegate.config.job_config import JobConfig


@dataclass(frozen=True, slots=True)
class JobFiles:
    """`model`: the model whose reshards are planned; `unknown`: why there is none. `shape`: None where the files are
    not on this machine; then `unknown` says which. The rest: as in PredictionBasis."""

    model: ModelSection | None
    unknown: str = ""
    shape: ShapeSection | None = None
    prompt_tokens: int | None = None
    token_cost: int = 0


def read_files(config: JobConfig) -> JobFiles:
    """Without a model where the checkpoint or the tokenizer is not on this machine, or the model has experts."""
    # Import here: it opens tokenizers, which takes most of a second to import.
    from tidegate.job import load_job

    known = JobFiles(None)
    try:
        job = load_job(config)
        shape = shape_of(job.model, job.padded_vocab)
        known = JobFiles(None, shape=shape, prompt_tokens=job.prompt_tokens, token_cost=job.token_cost)
        model = ModelSection.of(job.model, padded_vocab=job.padded_vocab, precision=config.actor.precision)
        return replace(known, model=model)
    except ValueError as error:
        return replace(known, unknown="; ".join(str(error).splitlines()))
