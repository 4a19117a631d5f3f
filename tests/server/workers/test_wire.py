"""Messages arrive whole and in order, nonsense is dropped, and the death of a peer is heard of."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.core.errors import StageError
from penstock.server.protocol import zmq_channel
from penstock.server.protocol.codec import Codec, FrameError, PeerLostError
from penstock.server.protocol.requests import ZeroGrad
from penstock.server.protocol.results import Done
from penstock.server.protocol.secret import new_secret
from penstock.server.protocol.threaded_channel import ThreadedEnd
from penstock.server.protocol.worker_commands import (
    Command,
    FromWorkers,
    Hello,
    Reply,
    ToWorkers,
    UnloadModelCommand,
    WorkerHeartbeat,
)
from penstock.server.protocol.zmq_channel import connecting, listening
from tests.server.in_process_channel import memory_pair

ANYWHERE = "tcp://127.0.0.1:*"
LOSS_SECONDS = 1.0
"""In which the death of a process must be heard of."""


def command(number):
    return Command(id=str(number), operation=UnloadModelCommand(model="m"))


@contextlib.asynccontextmanager
async def pair(secret=None, other=None):
    """The workers' end, which listens, and the engine's, which connects."""
    workers = listening(ToWorkers, ANYWHERE, secret)
    engine = connecting(FromWorkers, workers.address, other or secret)
    try:
        yield workers, engine
    finally:
        engine.close()
        workers.close()


async def hear(channel, seconds=5.0):
    return await asyncio.wait_for(channel.receive(), seconds)


@pytest.mark.parametrize("secret", [None, new_secret()], ids=["plain", "encrypted"])
def test_messages_arrive_in_order_both_ways(secret):
    async def scenario():
        async with pair(secret) as (workers, engine):
            for number in range(300):
                await engine.send(command(number))
            assert [(await hear(workers)).id for _ in range(300)] == [str(n) for n in range(300)]
            for number in range(300):
                await workers.send(Reply(id=str(number), result=Done()))
            assert [(await hear(engine)).id for _ in range(300)] == [str(n) for n in range(300)]

    asyncio.run(scenario())


def test_what_is_sent_before_the_peer_is_there_waits_for_it():
    async def scenario():
        free = listening(ToWorkers, ANYWHERE)
        address = free.address
        free.close()
        await asyncio.sleep(0.1)
        engine = connecting(FromWorkers, address)
        sending = asyncio.create_task(engine.send(Hello(instance="e")))
        await asyncio.sleep(0.2)
        assert not sending.done()
        workers = listening(ToWorkers, address)
        assert await hear(workers) == Hello(instance="e")
        await sending
        engine.close()
        workers.close()

    asyncio.run(scenario())


SPEAKER = """
import asyncio, os, signal, sys
from penstock.server.protocol.worker_commands import FromWorkers, Hello, ToWorkers, WorkerHeartbeat
from penstock.server.protocol import zmq_channel
from penstock.server.protocol.zmq_channel import connecting, listening

async def main():
    kind, address = sys.argv[1:3]
    if kind == "connects":
        end = connecting(FromWorkers, address)
        await end.send(Hello(instance="child"))
    else:
        end = listening(ToWorkers, address)
        print(end.address, flush=True)
        await end.receive()
        await end.send(WorkerHeartbeat(instance="child"))
    if len(sys.argv) > 3:
        await asyncio.sleep(0.2)
        os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.sleep(60)

asyncio.run(main())
"""


def speaker(kind, address, *options):
    return subprocess.Popen(
        [sys.executable, "-c", SPEAKER, kind, address, *options], stdout=subprocess.PIPE, text=True
    )


def test_the_end_that_listens_hears_within_a_second_that_its_peer_was_killed():
    async def scenario():
        workers = listening(ToWorkers, ANYWHERE)
        with speaker("connects", workers.address) as child:
            assert await hear(workers, 20) == Hello(instance="child")
            child.kill()
            with pytest.raises(PeerLostError):
                await hear(workers, LOSS_SECONDS)
            # Told once; with nobody there, what is sent is dropped.
            await workers.send(WorkerHeartbeat(instance="i"))
            with pytest.raises(TimeoutError):
                await hear(workers, 0.2)
        with speaker("connects", workers.address) as child:
            assert await hear(workers, 20) == Hello(instance="child")
            child.kill()
        workers.close()

    asyncio.run(scenario())


def test_the_end_that_connects_hears_of_a_kill_and_speaks_to_the_next_one_alone():
    async def scenario():
        with speaker("listens", ANYWHERE) as child:
            assert child.stdout
            address = child.stdout.readline().strip()
            engine = connecting(FromWorkers, address)
            await engine.send(Hello(instance="e"))
            assert await hear(engine) == WorkerHeartbeat(instance="child")
            child.kill()
            child.wait()
            await asyncio.sleep(0.3)
            # Nobody has heard of the loss yet: this was meant for the one that died.
            await engine.send(command("for the dead"))
            with pytest.raises(PeerLostError):
                await hear(engine, LOSS_SECONDS)
        sending = asyncio.create_task(engine.send(command("for the next")))
        workers = listening(ToWorkers, address)
        assert (await hear(workers)).id == "for the next"
        await sending
        workers.close()
        engine.close()

    asyncio.run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("fate", ["killed", "unreachable"])
@pytest.mark.parametrize("kind", ["connects", "listens"])
def test_a_peer_that_is_gone_while_a_large_message_is_in_flight_is_heard_of_in_time(
    kind, fate, monkeypatch
):
    """The peer stops reading, as a machine that cannot be reached does; or it is killed then."""
    dead_after = 1.0
    monkeypatch.setattr(zmq_channel, "HEARTBEAT_MS", 200)
    monkeypatch.setattr(zmq_channel, "HEARTBEAT_TIMEOUT_MS", int(1000 * dead_after))
    large = "x" * (64 << 20)  # more than the system's buffers take

    async def scenario():
        channel = listening(ToWorkers, ANYWHERE) if kind == "connects" else None
        address = channel.address if channel else ANYWHERE
        with speaker(kind, address, "stops") as child, contextlib.ExitStack() as last:
            last.callback(child.kill)
            if channel is None:
                assert child.stdout
                channel = connecting(FromWorkers, child.stdout.readline().strip())
                await channel.send(Hello(instance="e"))
            await hear(channel, 20)
            while Path(f"/proc/{child.pid}/stat").read_text().split()[2] != "T":
                await asyncio.sleep(0.01)
            message = Hello(instance=large)
            sending = asyncio.create_task(channel.send(message))
            done, _ = await asyncio.wait({sending}, timeout=0.3)
            assert not done
            if fate == "killed":
                child.kill()
            with pytest.raises(PeerLostError):
                await hear(channel, LOSS_SECONDS if fate == "killed" else 3 * dead_after)
            await asyncio.wait_for(sending, LOSS_SECONDS)
        channel.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("other", [new_secret(), None], ids=["another secret", "no secret"])
def test_who_does_not_know_the_secret_is_not_heard_and_disturbs_nobody(other, caplog):
    async def scenario():
        secret = new_secret()
        async with pair(secret) as (workers, engine):
            await engine.send(Hello(instance="right"))
            assert (await hear(workers)).instance == "right"
            stranger = connecting(FromWorkers, workers.address, other)
            sending = asyncio.create_task(stranger.send(Hello(instance="wrong")))
            with pytest.raises(TimeoutError):
                await hear(workers, 0.5)
            sending.cancel()
            stranger.close()
            await engine.send(command("still here"))
            assert (await hear(workers)).id == "still here"
            await workers.send(WorkerHeartbeat(instance="i"))
            assert (await hear(engine)).instance == "i"

    asyncio.run(scenario())
    assert "does not know the secret" in caplog.text


def test_another_that_comes_and_goes_is_not_taken_for_the_peer():
    async def scenario():
        async with pair() as (workers, engine):
            await engine.send(Hello(instance="e"))
            await hear(workers)
            raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
            raw.connect(workers.address)
            await raw.send(b"no message")
            with pytest.raises(TimeoutError):
                await hear(workers, 0.3)
            raw.close(linger=0)
            with pytest.raises(TimeoutError):
                await hear(workers, 0.3)
            await workers.send(WorkerHeartbeat(instance="i"))
            assert (await hear(engine)).instance == "i"

    asyncio.run(scenario())


def test_messages_that_are_none_of_ours_are_dropped_with_a_line_each(caplog):
    good = Codec(ToWorkers).encode(command("good"))
    nonsense = [b"", b"\xc1", b"\x81\xa4type\xa5Hello", good[:-1], good + b"\x00", b"\xdf" * 9000]

    async def scenario():
        workers = listening(ToWorkers, ANYWHERE)
        raw = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        raw.connect(workers.address)
        for frame in nonsense:
            await raw.send(frame)
        await raw.send_multipart([good, good])
        await raw.send(good)
        assert (await hear(workers)).id == "good"
        raw.close(linger=0)
        workers.close()

    asyncio.run(scenario())
    lines = [record.getMessage() for record in caplog.records]
    assert sum("dropped a message of" in line for line in lines) == len(nonsense) + 1
    assert any("dropped a message of 9000 bytes" in line for line in lines)


@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(
    frame=st.binary(max_size=200), at=st.integers(0, 60), mode=st.sampled_from(["raw", "mutated"])
)
def test_any_bytes_are_a_message_or_a_frame_error(frame, at, mode):
    codec = Codec(ToWorkers)
    if mode == "mutated":
        good = codec.encode(Command(id="x", operation=ZeroGrad(model="m")))
        frame = good[: at % len(good)] + frame[:3] + good[at % len(good) + len(frame[:3]) :]
    with contextlib.suppress(FrameError):
        assert isinstance(codec.decode(frame), ToWorkers)


@pytest.mark.parametrize("what", [{"id": "half \ud800 of a pair"}, {"id": 2**70}], ids=str)
def test_what_no_frame_holds_is_a_frame_error(what):
    message = Command(operation=UnloadModelCommand(model="m"), **what)
    with pytest.raises(FrameError, match="cannot be sent"):
        Codec(ToWorkers).encode(message)


@pytest.mark.parametrize("frame_bytes", [4096, 1000])
def test_the_largest_message_arrives_encrypted_and_one_byte_more_is_told(monkeypatch, frame_bytes):
    monkeypatch.setattr("penstock.server.protocol.zmq_channel.FRAME_BYTES", frame_bytes)
    for module in ("codec", "zmq_channel"):
        monkeypatch.setattr(f"penstock.server.protocol.{module}.MAX_BYTES", 4096)
    rest = len(Codec(ToWorkers).encode(Hello(instance="x" * 256))) - 256
    largest = Hello(instance="x" * (4096 - rest))

    async def scenario():
        async with pair(new_secret()) as (workers, engine):
            await engine.send(largest)
            assert await hear(workers) == largest
            with pytest.raises(FrameError, match="4097 bytes is over the limit of 4096"):
                await engine.send(Hello(instance=largest.instance + "x"))

    asyncio.run(scenario())


def test_an_address_that_is_taken_is_told():
    async def scenario():
        first = listening(ToWorkers, ANYWHERE)
        with pytest.raises(StageError, match="in use"):
            listening(ToWorkers, first.address)
        first.close()

    asyncio.run(scenario())


def test_ends_in_memory_hear_each_other_and_of_a_peer_that_died():
    async def scenario():
        engine, workers = memory_pair(ToWorkers, FromWorkers)
        await engine.send(Hello(instance="e"))
        await workers.send(WorkerHeartbeat(instance="i"))
        workers.drop()
        await engine.send(command("lost"))
        assert await hear(engine) == WorkerHeartbeat(instance="i")
        with pytest.raises(PeerLostError):
            await hear(engine)
        await engine.send(command("kept for the next"))
        _, others = memory_pair(ToWorkers, FromWorkers)
        engine.join(others)
        with pytest.raises(FrameError):
            await engine.send(WorkerHeartbeat(instance="wrong way"))
        with pytest.raises(PeerLostError):
            await hear(others)
        assert (await hear(others)).id == "kept for the next"

    asyncio.run(scenario())


def test_a_thread_beats_and_listens_while_the_main_thread_computes():
    async def engine_side(address, busy):
        engine = connecting(FromWorkers, address)
        await engine.send(command("1"))
        await engine.send(command("2"))
        beats = 0
        while not busy.is_set():
            beats += isinstance(await hear(engine), WorkerHeartbeat)
            if beats == 3:
                busy.set()
        while not isinstance(reply := await hear(engine), Reply):
            pass
        engine.close()
        return reply

    busy = threading.Event()
    address: list[str] = []

    def begin():
        channel = listening(ToWorkers, ANYWHERE)
        address.append(channel.address)
        return channel

    end: ThreadedEnd[Reply | WorkerHeartbeat, Command] = ThreadedEnd(
        begin, lambda: WorkerHeartbeat(instance="i"), 0.05
    )
    found = []
    engine = threading.Thread(
        target=lambda: found.append(asyncio.run(engine_side(address[0], busy)))
    )
    engine.start()
    assert end.receive(5.0) == command(1)
    assert busy.wait(5.0)
    end.send(Reply(id="1", result=Done()))
    assert end.receive(5.0) == command(2)
    engine.join(5.0)
    assert found == [Reply(id="1", result=Done())]
    with pytest.raises(PeerLostError):
        end.receive(LOSS_SECONDS)
    began = time.monotonic()
    assert end.receive(0.05) is None
    end.close()
    assert time.monotonic() - began < 2


def test_a_thread_that_cannot_listen_says_so_where_it_was_asked():
    def refuse():
        raise StageError("the address is taken")

    with pytest.raises(StageError, match="taken"):
        ThreadedEnd(refuse)
