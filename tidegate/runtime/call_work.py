"""What a worker's spans tell of its work: the iteration, the version of the weights, and the number of tokens.

- A call names what it is about. The version is that of the weights which the worker last published or loaded.
- The tokens of an update or a scoring are those of its samples, prompts included. A generating span has the tokens of
  the response that ended with it, which the worker adds.

Invariants:
- A span of steps between calls names what the last call asked for. [test_call_work: steps_between_calls]
- The reference policy is not the version in use. [test_call_work: reference_policy]
"""

from __future__ import annotations

from tidegate.v1 import samples_pb2
from tidegate.v1 import workers_pb2 as wire

Work = dict[str, int]


class CallWork:
    """The work of one worker. One thread uses it."""

    def __init__(self) -> None:
        self._version: Work = {}
        self._generating: Work = {}

    def of_steps(self) -> Work:
        """The work of the steps between calls: they answer the last call that asked to generate."""
        return {**self._generating, **self._version}

    def of_call(self, call: wire.WorkerCall) -> Work:
        match call.WhichOneof("body"):
            case "train" | "accumulate" as kind if getattr(call, kind).samples:
                samples = getattr(call, kind).samples
                num_tokens = sum(len(each.prompt_tokens) + len(each.response_tokens) for each in samples)
                minibatch = _minibatch_of(getattr(call, kind).update_id)
                return {"iteration": samples[0].id.iteration, **minibatch, **self._version, "tokens": num_tokens}
            case "score" if call.score.groups:
                groups = call.score.groups
                num_tokens = sum(map(_num_tokens, groups))
                return {"iteration": groups[0].iteration, "version": groups[0].version, "tokens": num_tokens}
            case "generate" if call.generate.requests:
                self._generating = {"iteration": call.generate.requests[0].id.iteration}
                return self.of_steps()
            case "publish":
                self._version = {"version": call.publish.version}
                return self._version
            case "load_shards":
                loaded = {"version": call.load_shards.version}
                self._version = self._version if call.load_shards.reference else loaded
                return loaded
        return {}


def _num_tokens(group: samples_pb2.SampleGroup) -> int:
    return sum(len(group.prompt_tokens) + len(sample.response_tokens) for sample in group.samples)


def _minibatch_of(update_id: str) -> Work:
    """The number of the minibatch in its iteration; {} for an id of another form."""
    number = update_id.rpartition(".")[2]
    return {"minibatch": int(number)} if number.isdecimal() else {}
