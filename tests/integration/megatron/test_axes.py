"""The same loss and gradients along every axis of a mesh, dense and with experts, in fp32 and bf16."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.integration.megatron.axis_ranks import provider_of
from tests.ranks import RankServer, Results
from tidegate.elastic.plan.parameters import shard_of
from tidegate.types import Layout

Case = dict[str, Any]
FP32_TOLERANCE, BF16_TOLERANCE = 1e-5, 5e-2
"""Relative tolerances of each tensor in the L2 norm. 5e-7 and 2e-2 were seen; a norm's gradient is the noisiest."""
NUM_RANKS = 8
DENSE_LAYOUTS: dict[str, dict[str, int]] = {
    "tp2": {"tp": 2},
    "tp4": {"tp": 4},
    "pp2": {"pp": 2},
    "pp4": {"pp": 4},
    "pp2 vpp2": {"pp": 2, "vpp": 2},
    "cp2": {"cp": 2},
    "cp4": {"cp": 4},
    "dp2": {"dp": 2},
    "tp2 cp2": {"tp": 2, "cp": 2},
    "pp2 cp2": {"pp": 2, "cp": 2},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
    "tp2 pp2 cp2": {"tp": 2, "pp": 2, "cp": 2},
    "tp2 pp2 vpp2 dp2": {"tp": 2, "pp": 2, "vpp": 2, "dp": 2},
}
EXPERT_LAYOUTS = DENSE_LAYOUTS | {
    "ep2 dp2": {"ep": 2, "dp": 2},
    "ep2 cp2": {"ep": 2, "cp": 2},
    "ep4 cp2 dp2": {"ep": 4, "cp": 2, "dp": 2},
    "tp2 ep2 dp2": {"tp": 2, "ep": 2, "dp": 2},
    "pp2 ep2 dp2": {"pp": 2, "ep": 2, "dp": 2},
    "tp2 pp2 vpp2 ep2 dp2": {"tp": 2, "pp": 2, "vpp": 2, "ep": 2, "dp": 2},
}
UNEVEN_LAYOUTS: dict[str, dict[str, int]] = {
    "uneven pp3": {"pp": 3},
    "uneven pp4, an empty stage": {"pp": 4},
    "uneven pp2 vpp2, an empty chunk": {"pp": 2, "vpp": 2},
}
HARD_LAYOUTS = ("tp2 pp2 dp2", "pp2 cp2")
HARD_EXPERT_LAYOUTS = (*HARD_LAYOUTS, "tp2 ep2 dp2", "tp2 pp2 vpp2 ep2 dp2")


def _cases(*, experts: bool, bf16: bool, layouts: tuple[str, ...] | None = None) -> dict[str, Case]:
    even = EXPERT_LAYOUTS if experts else DENSE_LAYOUTS
    kind = f"{'experts' if experts else 'dense'} {'bf16' if bf16 else 'fp32'}"
    model = {"experts": experts, "bf16": bf16, "uneven": False}
    uneven = {} if bf16 else UNEVEN_LAYOUTS
    chosen: dict[str, dict[str, int]] = {"one rank": {}} | {name: even[name] for name in layouts or even}
    cases = {f"{kind} {name}": {"model": model, "layout": layout} for name, layout in chosen.items()}
    return cases | {
        f"{kind} {name}": {"model": model | {"uneven": True}, "layout": layout} for name, layout in uneven.items()
    }


CASES = (
    _cases(experts=False, bf16=False)
    | _cases(experts=True, bf16=False)
    | _cases(experts=False, bf16=True, layouts=HARD_LAYOUTS)
    | _cases(experts=True, bf16=True, layouts=HARD_EXPERT_LAYOUTS)
)
EVERYDAY = (
    "dense fp32 pp2 vpp2",
    "dense fp32 tp2 pp2 dp2",
    "dense fp32 uneven pp3",
    "experts fp32 tp2 cp2",
    "experts fp32 tp2 ep2 dp2",
    "experts bf16 tp2 pp2 vpp2 ep2 dp2",
)
"""Every axis once, in every run of the tests. The other cases are long."""
COMPARED = [
    pytest.param(name, marks=() if name in EVERYDAY else pytest.mark.long)
    for name in CASES
    if not name.endswith("one rank")
]


@pytest.fixture(scope="module")
def everyday(ranks: RankServer) -> list[Results]:
    return _run(ranks, [name for name in CASES if name in EVERYDAY or name.endswith("one rank")])


@pytest.fixture(scope="module")
def rest(ranks: RankServer) -> list[Results]:
    return _run(ranks, [name for name in CASES if name not in EVERYDAY])


@pytest.fixture
def results(request: pytest.FixtureRequest, name: str) -> list[Results]:
    found: list[Results] = request.getfixturevalue("everyday" if name in EVERYDAY else "rest")
    return found


@pytest.mark.parametrize("name", COMPARED)
def test_loss_and_gradients_are_those_of_one_rank(results: list[Results], name: str) -> None:
    alone = " ".join(name.split()[:2]) + " one rank"
    tolerance = BF16_TOLERANCE if CASES[name]["model"]["bf16"] else FP32_TOLERANCE
    assert _loss(results, name) == pytest.approx(_loss(results, alone), rel=tolerance)
    want, got = _assembled(results, alone, "grad"), _assembled(results, name, "grad")
    errors = {key: max(_error(copy, want[key][0]) for copy in got[key]) for key in want}
    assert {key: error for key, error in errors.items() if not error <= tolerance} == {}


@pytest.mark.parametrize("name", COMPARED)
def test_the_initial_weights_are_the_same_bits_on_every_rank_that_holds_them(results: list[Results], name: str) -> None:
    alone = " ".join(name.split()[:2]) + " one rank"
    want, got = _assembled(results, alone, "param"), _assembled(results, name, "param")
    assert want.keys() == got.keys()
    for key, copies in got.items():
        for copy in copies:
            assert copy.tobytes() == want[key][0].tobytes(), key


def test_bf16_weights_are_the_fp32_draw_rounded(everyday: list[Results]) -> None:
    drawn, rounded = (_assembled(everyday, f"experts {dtype} one rank", "param") for dtype in ("fp32", "bf16"))
    for key, (draw,) in drawn.items():
        bits = draw.view(np.uint32)
        nearest_even = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
        assert rounded[key][0].tobytes() == nearest_even.view(np.float32).tobytes(), key


def test_padding_rows_of_the_vocabulary_start_at_zero(everyday: list[Results]) -> None:
    last = everyday[1]["dense fp32 tp2 pp2 dp2/param/embedding.word_embeddings.weight"]
    assert not last[-3:].any()
    assert last[:-3].any()


def _run(ranks: RankServer, names: list[str]) -> list[Results]:
    cases = {name: CASES[name] for name in names}
    return ranks.run("tests.integration.megatron.axis_ranks:gradients", NUM_RANKS, {"cases": cases}, timeout_s=120.0)


def _loss(results: list[Results], name: str) -> float:
    return sum(float(rank[key].sum()) for rank in results for key in rank if key == f"{name}/loss")


def _error(got: npt.NDArray[Any], want: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def _assembled(results: list[Results], name: str, kind: str) -> dict[str, list[npt.NDArray[Any]]]:
    """By logical name: each replica's copy, assembled from its tp shards. Elements that no rank holds stay NaN."""
    case = CASES[name]
    provider, layout = provider_of(**case["model"]), Layout(**case["layout"])
    mesh = provider.mesh(layout, tuple(range(layout.num_ranks)))
    parameters = {parameter.name: parameter for parameter in provider.parameters()}
    copies: dict[str, dict[Any, npt.NDArray[Any]]] = {}
    for index in range(layout.num_ranks):
        at = mesh.coordinates(index)
        for key, local in results[index].items():
            if not key.startswith(f"{name}/{kind}/"):
                continue
            label = key.removeprefix(f"{name}/{kind}/").removesuffix("/tied")
            parameter = parameters[label]
            shard = shard_of(parameter.shape, parameter.cut, tp=layout.tp, tp_rank=at.tp)
            whole = copies.setdefault(label, {}).setdefault(
                (at.stage, at.dp, at.cp), np.full(parameter.shape, np.nan, dtype=np.float32)
            )
            for piece in shard.pieces:
                part = local.reshape(shard.rows, shard.width)[:, piece.local : piece.local + piece.size]
                whole.reshape(shard.rows, -1)[:, piece.logical : piece.logical + piece.size] = part
    return {label: list(by_place.values()) for label, by_place in copies.items()}
