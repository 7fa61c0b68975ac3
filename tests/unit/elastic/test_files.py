"""Any layout reads the files that any other wrote, each element from one file. Unreadable files are refused with the
reason.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from pydantic import JsonValue
from safetensors.torch import load_file, save_file

from tests.unit.elastic import cutter
from tidegate.elastic.model.tensors import TensorKey
from tidegate.elastic.plan.gpt import GptShape, gpt_parameters
from tidegate.elastic.plan.holders import SourceMissing, State
from tidegate.elastic.plan.layout import Mesh, even_chunks
from tidegate.elastic.plan.optimizers import DistributedOptimizer, PlainOptimizer, StateKind
from tidegate.elastic.plan.parameters import Parameter, Vocabulary
from tidegate.elastic.plan.saved_state import SavedStateRefused
from tidegate.elastic.state.files import FileCorrupt, StateFiles, weights_sum, write_rank
from tidegate.types import Layout

SHAPE = GptShape(
    num_layers=4,
    hidden_size=4,
    ffn_hidden_size=8,
    num_heads=4,
    num_kv_heads=4,
    head_dim=1,
    vocab_size=13,
    padded_vocab_size=16,
    tied_embeddings=True,
    num_experts=2,
    itemsize=4,
)
PARAMETERS = gpt_parameters(SHAPE)
FINAL_NORM = ("decoder.final_layernorm.weight", StateKind.WEIGHT)
LAYOUTS = {
    "one rank": Layout(),
    "tp4": Layout(tp=4),
    "pp2 dp2, tied copies on two stages": Layout(pp=2, dp=2),
    "vpp2 cp2": Layout(pp=2, vpp=2, cp=2),
    "tp2 dp2": Layout(tp=2, dp=2),
    "dp4 ep2": Layout(dp=4, ep=2),
    "tp2 pp2 dp2 ep2": Layout(tp=2, pp=2, dp=2, ep=2),
}

World = dict[int, dict[TensorKey, torch.Tensor]]


def state_of(layout: Layout, *, optimizer: str, first_rank: int = 0, parameters: Sequence[Parameter] = ()) -> State:
    """Ranks are in falling order, so that no rank equals its own index."""
    ranks = tuple(range(first_rank, first_rank + layout.num_ranks))[::-1]
    mesh = Mesh(layout, ranks, even_chunks(SHAPE.num_layers, pp=layout.pp, vpp=layout.vpp))
    if optimizer == "none":
        return State(mesh)
    if optimizer == "plain":
        return State(mesh, PlainOptimizer())
    return State(mesh, DistributedOptimizer(cutter.shares(mesh, parameters or PARAMETERS, per_bucket=5)))


def world_of(state: State, parameters: Sequence[Parameter] = PARAMETERS) -> World:
    """Every element of every tensor has its own value. The padding of the vocabulary is -1."""
    held = cutter.world(state, parameters, cutter.whole_tensors(parameters))
    return {rank: {key: torch.from_numpy(flat).float() for key, flat in of.items()} for rank, of in held.items()}


def write(
    folder: Path, state: State, parameters: Sequence[Parameter] = PARAMETERS, **notes: JsonValue
) -> dict[str, str]:
    checksums = {}
    for rank, tensors in world_of(state, parameters).items():
        own = state
        if isinstance(state.optimizer, DistributedOptimizer):
            own = State(state.mesh, replace(state.optimizer, ranges={rank: state.optimizer.ranges[rank]}))
        written = write_rank(
            folder, f"{rank}.safetensors", parameters=parameters, state=own, me=rank, tensors=tensors, notes=notes
        )
        if written is not None:
            checksums[written.file] = written.checksum
    return checksums


def read(files: StateFiles, state: State, parameters: Sequence[Parameter] = PARAMETERS) -> World:
    found: World = {}
    for rank, tensors in world_of(state).items():
        found[rank] = {key: torch.full_like(tensor, cutter.PADDING) for key, tensor in tensors.items()}
        files.read(parameters=parameters, state=state, me=rank, targets=found[rank])
    return found


def assert_same(got: World, want: World) -> None:
    for rank, tensors in want.items():
        for key, tensor in tensors.items():
            assert torch.equal(got[rank][key], tensor), (rank, key)


@pytest.mark.parametrize("source", LAYOUTS)
def test_any_layout_reads_what_any_other_wrote_bit_for_bit(tmp_path: Path, source: str) -> None:
    files = StateFiles(tmp_path, write(tmp_path, state_of(LAYOUTS[source], optimizer="distributed")))
    for layout in LAYOUTS.values():
        target = state_of(layout, optimizer="distributed", first_rank=2)
        assert_same(read(files, target), world_of(target))


@pytest.mark.parametrize("source", ["plain", "distributed"])
def test_a_plain_optimizers_state_and_a_distributed_ones_are_read_from_each_other(tmp_path: Path, source: str) -> None:
    files = StateFiles(tmp_path, write(tmp_path, state_of(LAYOUTS["tp2 pp2 dp2 ep2"], optimizer=source)))
    target = state_of(LAYOUTS["dp4 ep2"], optimizer="distributed" if source == "plain" else "plain")
    assert_same(read(files, target), world_of(target))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_element_of_the_state_is_written_once(tmp_path: Path, layout: str) -> None:
    write(tmp_path, state_of(LAYOUTS[layout], optimizer="distributed"))
    counts: Counter[float] = Counter()
    for path in tmp_path.iterdir():
        for key, tensor in _tensors(path).items():
            if not key.startswith("step/"):
                counts.update(tensor[tensor != cutter.PADDING].tolist())
    whole = cutter.whole_tensors(PARAMETERS)
    want = {float(v) for (_, kind), a in whole.items() if kind is not StateKind.STEP for v in a.reshape(-1)}
    assert counts == Counter(dict.fromkeys(want, 1))


def test_replicas_write_shares_of_the_weights_that_are_about_equal(tmp_path: Path) -> None:
    write(tmp_path, state_of(Layout(dp=4), optimizer="none"))
    sizes = [sum(tensor.numel() for tensor in _tensors(path).values()) for path in tmp_path.iterdir()]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= max(torch.Size(p.shape).numel() for p in PARAMETERS)


def test_a_rank_writes_no_file_when_its_replicas_write_everything(tmp_path: Path) -> None:
    assert len(write(tmp_path, state_of(Layout(dp=4), optimizer="none"), PARAMETERS[:3])) == 3


@pytest.mark.parametrize("layout", [Layout(), Layout(dp=2), LAYOUTS["tp2 pp2 dp2 ep2"]], ids=str)
def test_whole_weights_are_read_without_padding(tmp_path: Path, layout: Layout) -> None:
    files = StateFiles(tmp_path, write(tmp_path, state_of(layout, optimizer="none")))
    got = dict(files.read_whole(PARAMETERS))
    whole = cutter.whole_tensors(PARAMETERS)
    assert list(got) == [parameter.name for parameter in PARAMETERS]
    for name, tensor in got.items():
        assert torch.equal(tensor, torch.from_numpy(whole[name, StateKind.WEIGHT]).float()), name


def test_whole_weights_stay_when_their_files_go_and_writing_to_them_changes_no_file(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, write(tmp_path, state_of(Layout(), optimizer="none")))
    (path,) = tmp_path.iterdir()
    content = path.read_bytes()
    got = dict(files.read_whole(PARAMETERS))
    want = {name: tensor.clone() for name, tensor in got.items()}
    path.unlink()
    assert all(torch.equal(tensor, want[name]) for name, tensor in got.items())

    path.write_bytes(content)
    for tensor in dict(files.read_whole(PARAMETERS)).values():
        tensor.add_(1)
    assert path.read_bytes() == content


def test_no_whole_weight_is_read_from_a_changed_file(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, write(tmp_path, state_of(Layout(), optimizer="none")))
    (path,) = tmp_path.iterdir()
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(FileCorrupt, match="its writer recorded"):
        dict(files.read_whole(PARAMETERS))


def test_weights_alone_can_be_read_from_a_checkpoint(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, write(tmp_path, state_of(Layout(tp=2), optimizer="distributed")))
    target = state_of(Layout(pp=2), optimizer="none")
    assert_same(read(files, target), world_of(target))


def test_optimizer_state_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    files = StateFiles(tmp_path, write(tmp_path, state_of(Layout(tp=2), optimizer="none")))
    with pytest.raises(SavedStateRefused, match=r"hold weights and no optimizer state: ask for the weights alone"):
        read(files, state_of(Layout(), optimizer="distributed"))


OTHER_MODELS = {
    "a deeper one": (
        gpt_parameters(replace(SHAPE, num_layers=5)),
        r"of 47 parameters here and 38 there 9 are not in the files: decoder.layers.4",
    ),
    "a shallower one": (PARAMETERS[:-1], r"1 are in the files and not in the model: decoder.final_layernorm"),
    "another vocabulary's padding": (
        tuple(replace(p, cut=Vocabulary(20)) if isinstance(p.cut, Vocabulary) else p for p in PARAMETERS),
        r"1 parameters differ: embedding.* is .*padded_rows=20\) here and .*padded_rows=16\) there",
    ),
}


@pytest.mark.parametrize("model", OTHER_MODELS)
def test_another_model_is_refused_with_the_first_few_names(tmp_path: Path, model: str) -> None:
    parameters, want = OTHER_MODELS[model]
    files = StateFiles(tmp_path, write(tmp_path, state_of(Layout(), optimizer="none")))
    with pytest.raises(SavedStateRefused, match=want):
        read(files, state_of(Layout(), optimizer="none"), parameters)


def test_files_of_two_saves_are_refused(tmp_path: Path) -> None:
    checksums = write(tmp_path, state_of(Layout(), optimizer="none"))
    checksums |= write(tmp_path, state_of(Layout(tp=2), optimizer="none", first_rank=1))
    with pytest.raises(SavedStateRefused, match=r"1.safetensors belongs to tp2 on .*, and 0.safetensors to single on"):
        StateFiles(tmp_path, checksums)


def test_a_file_appears_under_its_name_only_when_whole(tmp_path: Path) -> None:
    state = state_of(Layout(), optimizer="none")
    tensors = world_of(state)[0]
    obstacle = tmp_path / "0"
    obstacle.mkdir()
    with pytest.raises(OSError, match="directory"):
        write_rank(tmp_path, "0", parameters=PARAMETERS, state=state, me=0, tensors=tensors)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".0.partial", "0"]
    obstacle.rmdir()
    assert write_rank(tmp_path, "0", parameters=PARAMETERS, state=state, me=0, tensors=tensors) is not None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0"]


def test_padding_of_a_target_is_not_written(tmp_path: Path) -> None:
    state = state_of(Layout(), optimizer="none")
    files = StateFiles(tmp_path, write(tmp_path, state))
    targets = {key: torch.full_like(tensor, 9.5) for key, tensor in world_of(state)[0].items()}
    files.read(parameters=PARAMETERS, state=state, me=0, targets=targets)
    embedding = targets[PARAMETERS[0].name, StateKind.WEIGHT].view(SHAPE.padded_vocab_size, SHAPE.hidden_size)
    assert embedding[SHAPE.vocab_size :].eq(9.5).all()
    assert not embedding[: SHAPE.vocab_size].eq(9.5).any()


def test_a_changed_byte_is_noticed_before_anything_is_written_to_a_target(tmp_path: Path) -> None:
    state = state_of(Layout(tp=2), optimizer="none")
    checksums = write(tmp_path, state)
    path = tmp_path / "1.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    targets = {
        key: torch.zeros_like(tensor) for key, tensor in world_of(state_of(Layout(), optimizer="none"))[0].items()
    }
    with pytest.raises(FileCorrupt, match=r"1.safetensors has checksum .* its writer recorded"):
        StateFiles(tmp_path, checksums).read(
            parameters=PARAMETERS, state=state_of(Layout(), optimizer="none"), me=0, targets=targets
        )
    assert not any(tensor.any() for tensor in targets.values())


def test_a_rank_does_not_read_a_file_that_it_does_not_need(tmp_path: Path) -> None:
    """A reader of pp2's first stage needs nothing of the last stage's file."""
    parameters = gpt_parameters(replace(SHAPE, tied_embeddings=False, num_experts=None))
    state = state_of(Layout(pp=2), optimizer="none")
    checksums = write(tmp_path, state, parameters)
    first, last = state.mesh.ranks
    files = StateFiles(tmp_path, checksums | {f"{last}.safetensors": "another file's checksum"})
    targets = {key: torch.zeros_like(tensor) for key, tensor in world_of(state, parameters)[first].items()}
    files.read(parameters=parameters, state=state, me=first, targets=targets)
    with pytest.raises(FileCorrupt):
        files.read(parameters=parameters, state=state, me=last, targets=world_of(state, parameters)[last])


@pytest.mark.parametrize("damage", ["missing", "empty", "another's"])
def test_a_file_without_a_readable_head_is_named(tmp_path: Path, damage: str) -> None:
    checksums = write(tmp_path, state_of(Layout(tp=2), optimizer="none"))
    path = tmp_path / "0.safetensors"
    match damage:
        case "missing":
            path.unlink()
        case "empty":
            path.write_bytes(b"")
        case _:
            save_file({"weight": torch.zeros(1)}, path)
    with pytest.raises(FileCorrupt, match=r"0.safetensors (is missing|has no readable head)"):
        StateFiles(tmp_path, checksums)


UNNAMED = {
    "of a tp rank": (
        Layout(tp=2),
        "none",
        0,
        SavedStateRefused,
        r"no file holds .* of rank 1 of tp2, nor .* ranks \[0\]",
    ),
    "of a stage": (Layout(pp=2), "none", 0, SavedStateRefused, r"19 of 38 parameters; the files .* ranks \[0\] of pp2"),
    "of an owner of optimizer state": (Layout(tp=2), "distributed", 0, SourceMissing, r"no rank holds elements"),
}


@pytest.mark.parametrize("which", UNNAMED)
def test_a_needed_file_that_is_not_named_is_an_error(tmp_path: Path, which: str) -> None:
    layout, optimizer, unnamed, error, want = UNNAMED[which]
    checksums = write(tmp_path, state_of(layout, optimizer=optimizer))
    del checksums[f"{unnamed}.safetensors"]
    with pytest.raises(error, match=want):
        read(StateFiles(tmp_path, checksums), state_of(Layout(), optimizer=optimizer))


BAD_TARGETS = {
    "one is not there": (None, r"4 elements .* are expected, and there is nothing"),
    "one is of another size": (torch.zeros(3), r"there is torch.float32 \(3,\)"),
    "one is of another itemsize": (torch.zeros(4, dtype=torch.float64), r"there is torch.float64"),
    "one is of another type": (
        torch.zeros(4, dtype=torch.int32),
        r"was saved in torch.float32, the target is torch.int32",
    ),
}


@pytest.mark.parametrize("bad", BAD_TARGETS)
def test_a_target_that_does_not_match_its_layout_is_refused(tmp_path: Path, bad: str) -> None:
    tensor, want = BAD_TARGETS[bad]
    state = state_of(Layout(), optimizer="none")
    files = StateFiles(tmp_path, write(tmp_path, state))
    targets = {key: torch.zeros_like(value) for key, value in world_of(state)[0].items() if key != FINAL_NORM}
    if tensor is not None:
        targets[FINAL_NORM] = tensor
    with pytest.raises(ValueError, match=want):
        files.read(parameters=PARAMETERS, state=state, me=0, targets=targets)
    assert not any(value.any() for value in targets.values())


def test_a_tensor_of_another_size_than_its_shard_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    state = state_of(Layout(), optimizer="none")
    tensors = world_of(state)[0] | {FINAL_NORM: torch.zeros(3)}
    with pytest.raises(ValueError, match=r"final_layernorm.weight weight to write: 4 elements .* there is .* \(3,\)"):
        write_rank(tmp_path, "0", parameters=PARAMETERS, state=state, me=0, tensors=tensors)
    assert list(tmp_path.iterdir()) == []


def test_half_precision_is_read_back_bit_for_bit(tmp_path: Path) -> None:
    parameters = [replace(parameter, itemsize=2) for parameter in PARAMETERS]
    state = state_of(Layout(), optimizer="none")
    bits = {key: torch.randint(-(2**15), 2**15, t.shape, dtype=torch.int16) for key, t in world_of(state)[0].items()}
    halves = {key: tensor.view(torch.bfloat16) for key, tensor in bits.items()}
    written = write_rank(tmp_path, "0", parameters=parameters, state=state, me=0, tensors=halves)
    assert written is not None
    targets = {key: torch.zeros_like(tensor) for key, tensor in halves.items()}
    StateFiles(tmp_path, {"0": written.checksum}).read(parameters=parameters, state=state, me=0, targets=targets)
    num_read = 13 * SHAPE.hidden_size  # the embedding's elements without its padding
    for key, tensor in targets.items():
        size = num_read if "embedding" in key[0] else tensor.numel()
        assert torch.equal(tensor.view(torch.int16)[:size], bits[key][:size])


def test_notes_are_read_back_and_files_with_different_notes_are_refused(tmp_path: Path) -> None:
    state = state_of(Layout(tp=2), optimizer="none")
    checksums = [write(tmp_path, state, num_updates=number) for number in (3, 4)]
    assert StateFiles(tmp_path, checksums[1]).notes == {"num_updates": 4}
    os.rename(tmp_path / "0.safetensors", tmp_path / "2.safetensors")
    write(tmp_path, state, num_updates=3)
    with pytest.raises(SavedStateRefused, match=r"notes \{'num_updates': 3\}: read the files of one save"):
        StateFiles(tmp_path, dict.fromkeys(("1.safetensors", "2.safetensors"), ""))


def _tensors(path: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(path)
    return tensors


def total(state: State, world: World) -> int:
    return sum(weights_sum(PARAMETERS, state, rank, tensors) for rank, tensors in world.items()) % 2**64


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_the_sum_of_all_weights_is_the_same_in_every_layout_and_changes_with_each_weight(layout: Layout) -> None:
    alone = state_of(Layout(), optimizer="none")
    want = total(alone, world_of(alone))
    state = state_of(layout, optimizer="none")
    world = world_of(state)
    assert total(state, world) == want
    for tensors in world.values():
        if FINAL_NORM in tensors:
            tensors[FINAL_NORM][0] += 1
    assert total(state, world) != want
