"""Frames come out whole, in order and once, however the bytes arrive. Bytes that are not a frame end the channel."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidegate.runtime.channel import MAX_FRAME_BYTES, AsyncChannel, BlockingChannel, ChannelClosed, frame
from tidegate.v1 import workers_pb2 as wire

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    one, other = socket.socketpair()
    with one, other:
        yield one, other


def call(call_id: int, text: str = "") -> wire.WorkerCall:
    return wire.WorkerCall(call_id=call_id, save=wire.Save(folder=text))


@given(texts=st.lists(st.text(max_size=40), min_size=1, max_size=6), cut=st.integers(1, 50))
def test_frames_cut_anywhere_come_out_whole_and_in_order(texts: list[str], cut: int) -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver:
        channel = BlockingChannel(receiver, wire.WorkerCall)
        calls = [call(number, text) for number, text in enumerate(texts)]
        data = b"".join(map(frame, calls))
        received = []
        for start in range(0, len(data), cut):
            sender.sendall(data[start : start + cut])
            while (message := channel.receive(0)) is not None:
                received.append(message)
        assert received == calls


def test_receive_returns_none_when_no_frame_comes_in_time(pair: Pair) -> None:
    channel = BlockingChannel(pair[1], wire.WorkerCall)
    assert channel.receive(0) is None
    pair[0].sendall(frame(call(1))[:-1])
    assert channel.receive(0.01) is None


async def test_both_ends_understand_each_other(pair: Pair) -> None:
    service = await AsyncChannel.open(pair[0].dup(), wire.WorkerReply)
    worker = BlockingChannel(pair[1], wire.WorkerCall)
    await service.send(call(1, "x" * 100_000))
    assert worker.receive(1) == call(1, "x" * 100_000)
    worker.send(wire.WorkerReply(call_id=1, last=True))
    assert await service.receive() == wire.WorkerReply(call_id=1, last=True)
    service.close()


@pytest.mark.parametrize(
    ("data", "want"),
    [
        pytest.param(struct.pack("!I", MAX_FRAME_BYTES + 1), "over the limit", id="a frame that is too long"),
        pytest.param(struct.pack("!I", 3) + b"\xff\xff\xff", "not a Worker", id="bytes that are no message"),
        pytest.param(b"\x00", "closed", id="an end in the middle of a frame"),
    ],
)
async def test_bytes_that_are_not_a_frame_end_the_channel(pair: Pair, data: bytes, want: str) -> None:
    ours, theirs = pair
    service = await AsyncChannel.open(ours.dup(), wire.WorkerReply)
    worker = BlockingChannel(theirs, wire.WorkerCall)
    ours.sendall(data)
    theirs.sendall(data)
    for end in (ours, theirs):
        end.shutdown(socket.SHUT_WR)
    with pytest.raises(ChannelClosed, match=want):
        worker.receive(1)
    with pytest.raises(ChannelClosed, match=want):
        await service.receive()
    service.close()


def test_a_send_to_a_closed_channel_is_refused(pair: Pair) -> None:
    worker = BlockingChannel(pair[1], wire.WorkerCall)
    pair[0].close()
    with pytest.raises(ChannelClosed):
        worker.send(wire.WorkerReply())
