"""Requests to SGLang and the reading of its answers, without a server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from services.rollout.engine import (
    EngineFailed,
    FinishReason,
    Response,
    SamplingParams,
    VersionSpan,
    WeightsRefused,
)
from services.rollout.sglang.client import SglangClient
from services.rollout.sglang.features import Rest, features_of
from services.rollout.sglang.names import as_held, held_name, pieces_of, served_config
from services.rollout.sglang.replies import (
    ReplyUnreadable,
    ServerLoad,
    checksums_of,
    generate_body,
    generation_of,
    is_aborted,
    load_of,
    num_lost_tokens,
)
from services.rollout.sglang.server import ServerSettings, server_environment, server_options
from services.rollout.sglang.weights import write_weights
from tests.unit.rollout.tiny_models import TINY, random_weights, request_of
from tidegate.elastic.plan.gpt import EMBEDDING
from tidegate.elastic.plan.parameters import Parameter
from tidegate.huggingface.sglang_support import OWN_OPTIONS
from tidegate.megatron.family import model_parameters
from tidegate.model_config import ModelConfig

PARTIAL = Response(tokens=(9, 8), log_probs=(-0.5, -0.25), versions=(VersionSpan(3, 0, 2),))


def reply(**changes: Any) -> dict[str, Any]:
    """A reply with three tokens of versions 3 and 4, ended by a stop token."""
    meta = {
        "output_token_logprobs": [[-1.0, 4, None], [-2.0, 5, None], [-3.0, 6, None]],
        "weight_versions": [{"version": "3", "start": 0, "end": 1}, {"version": "4", "start": 1, "end": 3}],
        "finish_reason": {"type": "stop", "matched": 6},
    }
    return {"output_ids": [4, 5, 6], "meta_info": meta | changes}


def settings_of(*, device: str = "cpu", gpu_index: int = 0, num_sharing: int = 1) -> ServerSettings:
    return ServerSettings(
        python=Path("python"),
        folder=Path("folder"),
        scratch=Path("/memory"),
        model=TINY,
        device=device,
        gpu_index=gpu_index,
        dtype="bfloat16",
        max_running_requests=3,
        start_timeout_s=60.0,
        num_sharing=num_sharing,
    )


def parameter_named(name: str) -> Parameter:
    return next(each for each in model_parameters(TINY, padded_vocab=TINY.vocab_size) if each.name == name)


def test_a_continued_request_sends_its_tokens_as_prompt_and_asks_only_for_the_remaining_tokens() -> None:
    sampling = SamplingParams(max_new_tokens=12, temperature=0.5, top_p=0.75, seed=2**64 - 1, stop_token_ids=(2, 60))
    assert generate_body(request_of(sampling=sampling, partial=PARTIAL), rid="7") == {
        "rid": "7",
        "input_ids": [5, 17, 3, 9, 8],
        "sampling_params": {
            "max_new_tokens": 10,
            "temperature": 0.5,
            "top_p": 0.75,
            "sampling_seed": 2**63 - 1,
            "stop_token_ids": [2, 60],
        },
        "return_logprob": True,
    }


def test_a_request_without_a_stop_token_ends_at_none() -> None:
    assert generate_body(request_of(), rid="7")["sampling_params"]["ignore_eos"] is True


def test_a_reply_follows_its_partial_and_neighbouring_versions_become_one_span() -> None:
    generation = generation_of(request_of(partial=PARTIAL), reply())
    assert generation.finish_reason is FinishReason.STOP
    assert generation.response == Response(
        tokens=(9, 8, 4, 5, 6),
        log_probs=(-0.5, -0.25, -1.0, -2.0, -3.0),
        versions=(VersionSpan(3, 0, 3), VersionSpan(4, 3, 5)),
    )


def test_a_reply_aborted_before_its_first_token_is_the_partial() -> None:
    empty = reply(
        output_token_logprobs=None,
        weight_versions=[{"version": "3", "start": 0, "end": 0}],
        finish_reason={"type": "abort", "message": "Abort in waiting queue"},
    ) | {"output_ids": []}
    generation = generation_of(request_of(partial=PARTIAL), empty)
    assert (generation.response, generation.finish_reason) == (PARTIAL, FinishReason.ABORT)


@pytest.mark.parametrize(
    ("sampling", "want"),
    [
        pytest.param(SamplingParams(max_new_tokens=9, stop_token_ids=(2,)), FinishReason.ABORT, id="could go on"),
        pytest.param(SamplingParams(max_new_tokens=9, stop_token_ids=(2, 6)), FinishReason.STOP, id="the stop token"),
        pytest.param(SamplingParams(max_new_tokens=5), FinishReason.LENGTH, id="all tokens"),
    ],
)
def test_an_aborted_response_is_complete_where_the_last_token_that_it_got_ends_it(
    sampling: SamplingParams, want: FinishReason
) -> None:
    aborted = reply(finish_reason={"type": "abort", "message": "Aborted"})
    assert generation_of(request_of(sampling=sampling, partial=PARTIAL), aborted).finish_reason is want


def test_the_tokens_that_an_abort_lost_are_those_of_the_waiting_requests_that_did_not_come_back() -> None:
    """A prompt of 3 and a partial of 2 with 3 new tokens, of which 7 were made; and a prompt of 3 without any."""
    load = ServerLoad(num_running=1, num_waiting=2, num_used_tokens=8, num_capacity_tokens=99, num_waiting_tokens=15)
    queued = [(request_of(partial=PARTIAL), reply()), (request_of(), {"output_ids": []})]
    assert num_lost_tokens(load, queued) == 4
    assert num_lost_tokens(load, [*queued, (request_of(), reply())]) == 0, "one came after the load was reported"


@pytest.mark.parametrize(("wrong"), [{}, {"meta_info": {}}, {"meta_info": {"finish_reason": None}}], ids=str)
def test_a_reply_without_a_reason_for_its_end_is_unreadable(wrong: Any) -> None:
    with pytest.raises(ReplyUnreadable, match="no reason for its end"):
        is_aborted(wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({}, id="an empty answer"),
        pytest.param(reply(output_token_logprobs=[[-1.0, 4, None]]), id="a token without a log-probability"),
        pytest.param(reply(weight_versions=[]), id="no versions"),
        pytest.param(reply(weight_versions=[{"version": "default", "start": 0, "end": 3}]), id="weights of nobody"),
        pytest.param(reply(finish_reason=None), id="no end"),
    ],
)
def test_a_reply_that_does_not_add_up_is_unreadable(wrong: dict[str, Any]) -> None:
    with pytest.raises(ReplyUnreadable, match="request a: SGLang's reply cannot be read"):
        generation_of(request_of(), wrong)


def test_a_load_and_checksums_are_read_by_name() -> None:
    load = {
        "num_running_reqs": 2,
        "num_waiting_reqs": 1,
        "num_used_tokens": 30,
        "num_total_tokens": 49,
        "max_total_num_tokens": 500,
    }
    want = ServerLoad(num_running=2, num_waiting=1, num_used_tokens=30, num_capacity_tokens=500, num_waiting_tokens=19)
    assert load_of({"loads": [load]}) == want
    checksums = {"model.norm.weight": "0a", "lm_head.weight": "0b"}
    assert checksums_of({"ranks": [{"checksums": checksums}]}, {"output": "lm_head.weight"}) == {"output": "0b"}


@pytest.mark.parametrize("wrong", [None, {}, {"loads": [], "ranks": []}, {"loads": [{}], "ranks": [{}]}], ids=str)
def test_an_invalid_load_or_invalid_checksums_are_unreadable(wrong: Any) -> None:
    with pytest.raises(ReplyUnreadable, match="SGLang's load cannot be read"):
        load_of(wrong)
    with pytest.raises(ReplyUnreadable, match="SGLang's checksums cannot be read"):
        checksums_of(wrong, {"output": "lm_head.weight"})


def test_every_tensor_of_the_model_has_a_held_name_of_its_own() -> None:
    family = replace(TINY, qkv_bias=True)
    parameters = model_parameters(family, padded_vocab=family.vocab_size)
    held = [held_name(parameter, family) for parameter in parameters]
    assert len(set(held)) == len(held)
    assert "model.layers.1.self_attn.qkv_proj.bias" in held
    assert "model.layers.0.mlp.gate_up_proj.weight" in held


def test_pieces_take_queries_keys_and_values_out_of_their_groups() -> None:
    rows = torch.arange(TINY.qkv_size * TINY.hidden_size, dtype=torch.float32).view(TINY.qkv_size, -1)
    pieces = dict(pieces_of(parameter_named("decoder.layers.1.self_attention.linear_qkv.weight"), TINY, rows))
    # Two groups of two queries, a key and a value, 16 rows each.
    want = {"q": [0, 16, 64, 80], "k": [32, 96], "v": [48, 112]}
    for letter, starts in want.items():
        piece = pieces[f"model.layers.1.self_attn.{letter}_proj.weight"]
        assert torch.equal(piece, torch.cat([rows[start : start + 16] for start in starts]))


def test_padding_rows_are_not_sent_and_are_zeros_in_what_is_held() -> None:
    tensors = dict(random_weights(TINY, padding_rows=3))
    ((_, piece),) = pieces_of(parameter_named(EMBEDDING), TINY, tensors[EMBEDDING])
    assert len(piece) == TINY.vocab_size
    held = as_held(EMBEDDING, (piece,))
    assert len(held) == 64
    assert not held[TINY.vocab_size :].any()


def test_the_config_is_llamas_and_ends_responses_at_no_token() -> None:
    config = served_config(TINY, dtype="bfloat16")
    assert (config["architectures"], config["eos_token_id"], config["torch_dtype"]) == (
        ["LlamaForCausalLM"],
        None,
        "bfloat16",
    )


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (replace(TINY, num_experts=4, experts_per_token=2), "this one has 4 experts: set rollout.engine=embedded"),
        (replace(TINY, qkv_bias=True, qk_norm=True), "no architecture of .* qkv_bias=True, qk_norm=True"),
        (replace(TINY, qkv_bias=True), "48 / 4 for a Qwen2, and this one has head_dim=16"),
    ],
    ids=["experts", "no family's shape", "a Qwen2 with wide heads"],
)
def test_a_model_that_sglang_would_compute_differently_is_refused(model: ModelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        served_config(model, dtype="bfloat16")


def test_a_set_larger_than_a_file_is_written_into_several_files_with_each_piece_once_and_cast(tmp_path: Path) -> None:
    weights = random_weights(TINY)
    write_weights(TINY, tmp_path, version=2, dtype=torch.bfloat16, tensors=weights, file_bytes=9000)

    files = [load_file(path) for path in sorted(tmp_path.iterdir())]
    assert len(files) > 1
    assert all(len(file) <= 3 or sum(tensor.nbytes for tensor in file.values()) <= 9000 for file in files)
    written = [name for file in files for name in file]
    named = dict(weights)
    want = {
        name: tensor.bfloat16()
        for each in model_parameters(TINY, padded_vocab=TINY.vocab_size)
        for name, tensor in pieces_of(each, TINY, named[each.name])
    }
    assert sorted(written) == sorted(want)
    assert all(torch.equal(file[name], want[name]) for file in files for name in file)


def test_a_refused_set_of_weights_is_refused_before_the_server_reads_it(tmp_path: Path) -> None:
    with pytest.raises(WeightsRefused, match="1 of 15 tensors are missing"):
        write_weights(TINY, tmp_path, version=2, dtype=torch.float32, tensors=random_weights(TINY)[:-1])
    numbers = [(name, tensor.long()) for name, tensor in random_weights(TINY)]
    with pytest.raises(WeightsRefused, match=r"is torch\.int64; weights are floating point"):
        write_weights(TINY, tmp_path, version=2, dtype=torch.float32, tensors=numbers)


def test_weights_that_the_host_memory_has_no_room_for_are_refused_with_the_numbers(tmp_path: Path) -> None:
    huge = replace(TINY, vocab_size=64 << 40)
    with pytest.raises(WeightsRefused, match=r"version 2 take \d+ bytes in .*, which has \d+ free: .*shm-size"):
        write_weights(huge, tmp_path, version=2, dtype=torch.float32, tensors=[])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("version", ["0.5.23", "0.5.24.post1", "0.6.0rc1"])
def test_a_version_with_the_api_is_accepted(version: str) -> None:
    info = {"version": version, "enable_deterministic_inference": True}
    assert features_of(info).version == version
    assert features_of(info).repeats_draws


@pytest.mark.parametrize(
    ("version", "message"),
    [
        ("0.5.9", r"SGLang 0\.5\.9 is older than 0\.5\.23.*install"),
        ("unknown", "'unknown' is not a version number"),
        ("None", "'None' is not a version number"),
    ],
)
def test_a_version_without_the_api_is_refused_with_the_remedy(version: str, message: str) -> None:
    with pytest.raises(EngineFailed, match=message):
        features_of({"version": version})


@pytest.mark.parametrize(
    ("saves_memory", "device", "want"),
    [(True, "cuda", Rest.RELEASED), (False, "cuda", Rest.ENDED), (False, "cpu", Rest.KEPT)],
)
def test_a_server_rests_up_unless_it_would_keep_memory_of_a_gpu(saves_memory: bool, device: str, want: Rest) -> None:
    info = {"version": "0.5.23", "enable_memory_saver": saves_memory}
    assert features_of(info).rest(device) is want


def test_only_a_server_on_cuda_that_may_rest_gets_the_memory_saver() -> None:
    def is_on(**settings: Any) -> bool:
        given = replace(settings_of(device=settings.pop("device")), **settings)
        return "enable-memory-saver" in server_options(given, Path("model"), SglangClient(4321, "secret"))

    assert is_on(device="cuda", may_rest=True)
    assert not is_on(device="cuda")
    assert not is_on(device="cpu", may_rest=True), "it exists on CUDA alone"


def test_a_server_listens_on_loopback_keeps_no_prefixes_and_has_a_token() -> None:
    options = server_options(settings_of(), Path("model"), SglangClient(4321, "secret"))
    want = {"host": "127.0.0.1", "port": 4321, "api-key": "secret", "disable-radix-cache": True, "device": "cpu"}
    assert {key: options[key] for key in want} == want
    assert options["max-total-tokens"] == 3 * 168
    assert "secret" not in repr(SglangClient(4321, "secret"))


def test_on_cuda_a_server_takes_its_own_slots_gpu_and_draws_by_seed() -> None:
    settings = settings_of(device="cuda", gpu_index=3)
    options = server_options(settings, Path("model"), SglangClient(4321, "secret"))
    want = {"device": "cuda", "base-gpu-id": 3, "enable-deterministic-inference": True}
    assert {key: options[key] for key in want} == want
    assert "max-total-tokens" not in options
    assert "base-gpu-id" not in server_options(settings_of(), Path("model"), SglangClient(4321, "secret"))


def test_further_options_join_those_that_tidegate_sets_and_none_of_these_may_be_given() -> None:
    settings = replace(settings_of(device="cuda"), options={"attention-backend": "triton"}, may_rest=True)
    options = server_options(settings, Path("model"), SglangClient(4321, "secret"))
    assert options["attention-backend"] == "triton"
    assert options.keys() - {"attention-backend", "log-level"} <= OWN_OPTIONS


def test_servers_that_share_a_gpu_share_its_memory() -> None:
    alone, shared = (
        server_options(settings_of(device="cuda", num_sharing=count), Path("model"), SglangClient(4321, "secret"))
        for count in (1, 4)
    )
    assert "mem-fraction-static" not in alone
    assert shared["mem-fraction-static"] == 0.2


def test_a_servers_ranks_meet_at_a_file_and_its_sockets_are_in_its_scratch_folder() -> None:
    environment = server_environment(settings_of(), SglangClient(4321, "secret"))
    assert environment["SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"] == "file:///memory/ranks"
    assert environment["TMPDIR"] == "/memory"
    assert environment["SGLANG_USE_CPU_ENGINE"] == "1"
    assert "SGLANG_USE_CPU_ENGINE" not in server_environment(settings_of(device="cuda"), SglangClient(4321, "secret"))
