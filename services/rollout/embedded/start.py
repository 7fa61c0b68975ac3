"""The start of an embedded engine in a worker's process, on the device of its slot."""

from __future__ import annotations

import math

import psutil
import torch

from services.rollout.embedded.attention import cache_bytes
from services.rollout.embedded.decoder import RowCounts
from services.rollout.embedded.engine import EmbeddedEngine
from services.rollout.embedded.probe import CANDIDATE_ROWS, REFERENCE_ROWS
from services.rollout.engine import EngineFailed, StartedEngine
from tidegate.job import Job
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig
from tidegate.runtime.pacer import Pacer
from tidegate.runtime.slot_place import take_slot
from tidegate.types import GpuId


def start_embedded(job: Job, gpu: GpuId, pacer: Pacer) -> StartedEngine:
    """Raises EngineFailed where the engine does not fit into the slot's share of its GPU, and as `take_slot`."""
    own_bytes = psutil.Process().memory_info().rss
    place, num_requests = take_slot(job.config.cluster, gpu), job.config.rollout.max_running_requests
    if place.memory_bytes is not None:
        check_room(job.model, max_running_requests=num_requests, memory_bytes=place.memory_bytes)
    engine = EmbeddedEngine(job.model, max_running_requests=num_requests, device=place.device, pacer=pacer)
    return StartedEngine(engine, own_bytes)


def check_room(model: ModelConfig, *, max_running_requests: int, memory_bytes: int) -> None:
    """EngineFailed unless the cache and two versions of the weights fit: an update keeps the old one until it ends."""
    parameters = model_parameters(model, padded_vocab=model.vocab_size)
    weights_bytes = 2 * sum(math.prod(each.shape) for each in parameters) * torch.float32.itemsize
    # A device may compute no fewer rows alike than the reference.
    num_slots = max(REFERENCE_ROWS, RowCounts(CANDIDATE_ROWS).at_least(max_running_requests))
    held_bytes = cache_bytes(model, num_slots=num_slots)
    if weights_bytes + held_bytes > memory_bytes:
        raise EngineFailed(
            f"rollout.max_running_requests={max_running_requests} needs {held_bytes / 2**30:.1f} GiB for keys and "
            f"values beside {weights_bytes / 2**30:.1f} GiB for two versions of the weights, and the slot has "
            f"{memory_bytes / 2**30:.1f} GiB: lower it, model.max_seq_len, or cluster.slots_per_gpu"
        )
