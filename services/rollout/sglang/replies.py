"""Translates requests into SGLang's form, and its replies into ours. Pure.

The tokens of a partial come last in the prompt that SGLang gets, and first in the response that we return. They keep
their log-probabilities and versions. SGLang's draws depend on the seed and the token's position, so a continued
response draws as an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from services.rollout.engine import FinishReason, Generation, GenerationRequest, Response, VersionSpan

_SEED_MASK = 2**63 - 1
"""SGLang takes a signed 64-bit seed."""


class ReplyUnreadable(ValueError):
    """The reply lacks what SGLang returns for this request."""


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """`num_waiting_tokens`: prompts and responses so far of the waiting requests, a retracted one's included."""

    num_running: int
    num_waiting: int
    num_used_tokens: int
    num_capacity_tokens: int
    num_waiting_tokens: int = 0


def generate_body(request: GenerationRequest, *, rid: str) -> dict[str, Any]:
    sampling, partial = request.sampling, request.partial.tokens
    params: dict[str, Any] = {
        "max_new_tokens": sampling.max_new_tokens - len(partial),
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "sampling_seed": sampling.seed & _SEED_MASK,
    }
    if sampling.stop_token_ids:
        params["stop_token_ids"] = list(sampling.stop_token_ids)
    else:
        params["ignore_eos"] = True
    return {
        "rid": rid,
        "input_ids": [*request.prompt_tokens, *partial],
        "sampling_params": params,
        "return_logprob": True,
    }


def generation_of(request: GenerationRequest, reply: Mapping[str, Any]) -> Generation:
    """The generation. Raises ReplyUnreadable, which names the missing or inconsistent field."""
    try:
        meta = reply["meta_info"]
        tokens = tuple(int(token) for token in reply["output_ids"])
        log_probs = tuple(float(entry[0]) for entry in meta["output_token_logprobs"] or ())
        reason = FinishReason(meta["finish_reason"]["type"])
        spans = _shifted(meta["weight_versions"], by=len(request.partial.tokens))
        partial = request.partial
        response = Response(partial.tokens + tokens, partial.log_probs + log_probs, joined((*partial.versions, *spans)))
        if reason is FinishReason.ABORT and tokens:
            reason = _reason_of_aborted(request, response)
    except (KeyError, TypeError, ValueError) as error:
        raise ReplyUnreadable(f"request {request.id}: SGLang's reply cannot be read ({error!r})") from error
    return Generation(request.id, response, reason)


def is_aborted(reply: Mapping[str, Any]) -> bool:
    """Whether the reply is to a request that an abort ended. Raises ReplyUnreadable."""
    try:
        return bool(reply["meta_info"]["finish_reason"]["type"] == FinishReason.ABORT)
    except (KeyError, TypeError) as error:
        raise ReplyUnreadable(f"SGLang's reply has no reason for its end ({error!r})") from error


def _reason_of_aborted(request: GenerationRequest, response: Response) -> FinishReason:
    """SGLang makes one more token of a running request that it aborts. That token may be the response's last."""
    if response.tokens[-1] in request.sampling.stop_token_ids:
        return FinishReason.STOP
    is_full = len(response.tokens) >= request.sampling.max_new_tokens
    return FinishReason.LENGTH if is_full else FinishReason.ABORT


def load_of(reply: Mapping[str, Any]) -> ServerLoad:
    try:
        (rank,) = reply["loads"]
        return ServerLoad(
            num_running=rank["num_running_reqs"],
            num_waiting=rank["num_waiting_reqs"],
            num_used_tokens=rank["num_used_tokens"],
            num_capacity_tokens=rank["max_total_num_tokens"],
            num_waiting_tokens=rank["num_total_tokens"] - rank["num_used_tokens"],
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ReplyUnreadable(f"SGLang's load cannot be read ({error!r})") from error


def num_lost_tokens(load: ServerLoad, queued: Iterable[tuple[GenerationRequest, Mapping[str, Any]]]) -> int:
    """The tokens that the abort of these requests lost. An upper bound where some that waited in `load` run since.

    A retracted request waits with its response, and its abort returns only what was sent of it before. Replies as
    `generation_of` reads them."""
    returned = (
        len(request.prompt_tokens) + len(request.partial.tokens) + len(reply["output_ids"]) for request, reply in queued
    )
    return max(0, load.num_waiting_tokens - sum(returned))


def checksums_of(reply: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """The checksum of each tensor, by our name. `names` maps our names to those in SGLang."""
    try:
        (rank,) = reply["ranks"]
        return {name: str(rank["checksums"][held]) for name, held in names.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise ReplyUnreadable(f"SGLang's checksums cannot be read ({error!r})") from error


def joined(spans: Iterable[VersionSpan]) -> tuple[VersionSpan, ...]:
    """The spans, with neighbours of one version joined into one."""
    result: list[VersionSpan] = []
    for span in spans:
        if result and result[-1].version == span.version:
            span = VersionSpan(span.version, result.pop().start, span.end)
        result.append(span)
    return tuple(result)


def _shifted(spans: Iterable[Mapping[str, Any]], *, by: int) -> tuple[VersionSpan, ...]:
    return tuple(
        VersionSpan(int(span["version"]), span["start"] + by, span["end"] + by)
        for span in spans
        if span["end"] > span["start"]
    )
