"""What spans tell of the calls that a worker does."""

from __future__ import annotations

from tidegate.runtime.call_work import CallWork
from tidegate.v1 import samples_pb2, types_pb2
from tidegate.v1 import workers_pb2 as wire

PUBLISHED = wire.WorkerCall(publish=wire.Publish(version=4))
LOADED = wire.WorkerCall(load_shards=wire.LoadShards(version=5))
GENERATE = wire.WorkerCall(
    generate=wire.Generate(requests=[wire.GenerationRequest(id=types_pb2.SampleId(iteration=5, prompt=1))])
)


def test_an_update_has_its_iteration_the_published_version_and_the_tokens_of_its_samples() -> None:
    work = CallWork()
    sample = wire.TrainSample(id=types_pb2.SampleId(iteration=4), prompt_tokens=[1, 2], response_tokens=[3, 4, 5])
    assert work.of_call(PUBLISHED) == {"version": 4}
    want = {"iteration": 4, "minibatch": 7, "version": 4, "tokens": 10}
    update = wire.WorkerCall(train=wire.Train(update_id="1.4.7", samples=[sample, sample]))
    assert work.of_call(update) == want
    portion = wire.WorkerCall(accumulate=wire.Accumulate(update_id="1.4.7", samples=[sample, sample]))
    assert work.of_call(portion) == want


def test_a_scoring_has_what_its_groups_say() -> None:
    sample = samples_pb2.Sample(response_tokens=[3, 4, 5])
    group = samples_pb2.SampleGroup(iteration=2, version=2, prompt_tokens=[1], samples=[sample, sample])
    call = wire.WorkerCall(score=wire.Score(groups=[group]))
    assert CallWork().of_call(call) == {"iteration": 2, "version": 2, "tokens": 8}


def test_steps_between_calls_are_at_the_iteration_and_version_of_the_last_ones() -> None:
    work = CallWork()
    assert work.of_steps() == {}
    work.of_call(LOADED)
    assert work.of_call(GENERATE) == work.of_steps() == {"iteration": 5, "version": 5}
    assert work.of_call(wire.WorkerCall(look=wire.Look())) == {}


def test_the_reference_policy_is_not_the_version_in_use() -> None:
    work = CallWork()
    work.of_call(LOADED)
    reference = wire.WorkerCall(load_shards=wire.LoadShards(version=0, reference=True))
    assert work.of_call(reference) == {"version": 0}
    assert work.of_steps() == {"version": 5}
