"""Weights from the device into a snapshot in host memory, and from there onto the device again.

The writer is one rank of the actor's own library, in a world of one rank, which uses NCCL where there is CUDA. The
reader takes all weights as an engine does. Both check sums, so both read every byte once more.

    share of the copy rate = bytes / seconds / rate

The rate is that of a plain copy (`copies`) from the device to host memory for the publication, and from host memory to
the device for the load. What is read from the snapshot stays in host memory, so it has no share.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks.gpu.copies import copy_rates, synchronize
from benchmarks.gpu.report import PartReport
from benchmarks.reshard_sides import Crew
from benchmarks.reshard_state import LogicalState, Width, adam, model
from tests.ranks import RankContext, Results, rank_server
from tidegate.elastic import checkpoints
from tidegate.elastic.epoch.world import Membership, World
from tidegate.elastic.plan.optimizers import StateKind
from tidegate.elastic.state.files import StateFiles
from tidegate.elastic.state.location import StateLocation
from tidegate.elastic.state.progress import Progress
from tidegate.elastic.trainer import ElasticTrainer
from tidegate.types import Layout

_TIMEOUT_S = 150.0
"""The part's limit comes first."""


@dataclass(frozen=True, slots=True)
class Size:
    width: Width
    num_layers: int
    copy_bytes: int


SIZES = {
    "cuda": Size(Width.LARGE, num_layers=8, copy_bytes=1 << 30),
    "cpu": Size(Width.SMALL, num_layers=2, copy_bytes=1 << 20),
}
_COPIED = {"publish": "device_to_host", "to_device": "host_to_device"}
"""The copy that each step of the snapshot has in it."""


def measure(device: str, report: PartReport) -> None:
    size = SIZES[device]
    copies = copy_rates(torch.device(device), size_bytes=size.copy_bytes)
    report.note(copies)
    call = {"width": size.width, "num_layers": size.num_layers, "device": "cuda:0" if device == "cuda" else device}
    with rank_server() as server:
        (found,) = server.run("benchmarks.gpu.snapshot:publish_and_load", 1, call, timeout_s=_TIMEOUT_S)
    seconds = {key: float(value) for key, value in found.items() if key.endswith("_s")}
    size_bytes = int(found["size_bytes"])
    rates = {f"{key.removesuffix('_s')}_bytes_per_s": size_bytes / value for key, value in seconds.items()}
    shares = {
        f"{step}_share_of_copy_rate": rates[f"{step}_bytes_per_s"] / copies[f"{copy}_bytes_per_s"]
        for step, copy in _COPIED.items()
    }
    report.note({**seconds, **rates, **shares, "size_bytes": size_bytes, "backend": str(found["backend"])})


def publish_and_load(context: RankContext, *, width: str, num_layers: int, device: str) -> Results:
    """The rank of this part: seconds to publish, to read, and to put what was read onto the device."""
    place = torch.device(device)
    crew = Crew.of(context, context.tmpfs, place)
    state = LogicalState(model(num_layers, width=Width(width)), place)
    world = World.join(Membership(1, (0,)), me=0, store=crew.new_world(), device=place, timeout_s=context.timeout_s)
    trainer = ElasticTrainer(state.provider, adam(), world=world)

    def fill(location: StateLocation) -> Progress:
        assert location.state is not None
        skeleton = location.state.skeleton
        state.fill(skeleton.chunks, skeleton.optimizer, location.mesh, 0)
        return Progress()

    trainer.start(Layout(), fill=fill)
    synchronize(place)
    times = [time.perf_counter()]
    written = checkpoints.save_weights(trainer, Path(context.tmpfs), "rank00000.safetensors")
    assert written is not None
    times.append(time.perf_counter())
    files = StateFiles(Path(context.tmpfs), {written.file: written.checksum})
    read = dict(files.read_whole(tuple(state.parameters())))
    times.append(time.perf_counter())
    loaded = {name: tensor.to(place) for name, tensor in read.items()}
    synchronize(place)
    times.append(time.perf_counter())
    for name, tensor in loaded.items():
        assert torch.equal(tensor.reshape(-1), state.tensor(name, StateKind.WEIGHT).reshape(-1)), name
    publish_s, read_s, to_device_s = np.diff(times)
    backend = np.array(str(world.backend))
    trainer.close()
    world.leave()
    return {
        "publish_s": np.array(publish_s),
        "read_s": np.array(read_s),
        "to_device_s": np.array(to_device_s),
        "size_bytes": np.array(written.size_bytes),
        "backend": backend,
    }
