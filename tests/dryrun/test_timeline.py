"""The replay of traces by hand-made records."""

import pytest

from penstock.estimate.dryrun.consistency import mismatched_collectives
from penstock.estimate.dryrun.timeline import Timeline, replay
from penstock.estimate.dryrun.trace import (
    Collective,
    HostSync,
    Launch,
    Record,
    RecordEvent,
    WaitEvent,
)


def kernel(seconds: float, *, stream: int = 0, host: float = 0.0) -> Launch:
    return Launch(stream, "kernel", seconds, host, "forward", "here")


def collective(
    name: str,
    seconds: float,
    *,
    stream: int,
    ranks: tuple[int, ...] = (0, 1),
    peer: int | None = None,
) -> Collective:
    return Collective(
        stream, name, "group", ranks, "bfloat16", 8, (4,), seconds, "forward", "here", peer
    )


def one(*records: Record) -> Timeline:
    return replay({0: records})[0]


def seconds(value: float) -> object:
    """Within the host's own microseconds."""
    return pytest.approx(value, abs=1e-3)


def test_kernels_of_a_stream_run_one_after_another() -> None:
    assert one(kernel(1.0), kernel(2.0)).seconds == seconds(3.0)


def test_streams_run_beside_each_other() -> None:
    assert one(kernel(1.0), kernel(2.0, stream=1)).seconds == seconds(2.0)


def test_a_stream_waits_for_an_event() -> None:
    found = one(kernel(1.0), RecordEvent(0, 7), WaitEvent(1, 7), kernel(2.0, stream=1))
    assert found.seconds == seconds(3.0)


def test_communication_that_overlaps_is_not_exposed() -> None:
    found = one(
        collective("allgather", 1.0, stream=1),
        RecordEvent(1, 7),
        kernel(2.0),
        WaitEvent(0, 7),
        kernel(1.0),
    )
    assert found.exposed_seconds == 0
    assert found.seconds == seconds(3.0)


def test_exposed_communication_is_the_time_without_kernels() -> None:
    found = one(
        collective("allgather", 3.0, stream=1),
        RecordEvent(1, 7),
        kernel(2.0),
        WaitEvent(0, 7),
        kernel(1.0),
    )
    assert found.exposed_seconds == seconds(1.0)
    assert found.seconds == seconds(4.0)


def test_a_collective_on_the_stream_of_kernels_is_exposed() -> None:
    assert one(kernel(1.0), collective("allreduce", 2.0, stream=0)).exposed_seconds == seconds(2.0)


def test_a_sync_stops_the_host() -> None:
    slow = [kernel(1.0, host=0.5), kernel(1.0, host=0.5)]
    assert one(*slow).seconds == seconds(2.5)
    assert one(slow[0], HostSync("item", "here", "forward", 0), slow[1]).seconds == seconds(3.0)


def test_a_late_host_is_told_from_a_late_collective() -> None:
    found = one(kernel(0.1, host=1.0), kernel(0.1, host=1.0))
    assert found.host_bound == seconds(1.9)
    assert found.exposed_seconds == 0


def test_a_receive_waits_for_the_send_of_its_peer() -> None:
    found = replay(
        {
            0: [
                kernel(2.0),
                RecordEvent(0, 1),
                WaitEvent(1, 1),
                collective("send", 0.5, stream=1, peer=1),
            ],
            1: [
                collective("recv", 0.5, stream=1, peer=0),
                RecordEvent(1, 1),
                WaitEvent(0, 1),
                kernel(1.0),
            ],
        }
    )
    assert found[1].seconds == seconds(3.5)
    assert found[1].exposed_seconds == seconds(2.5)


def test_a_message_is_received_when_its_rank_is_there_though_it_was_sent_before() -> None:
    found = replay(
        {
            0: [kernel(3.0), collective("recv", 0.5, stream=0, peer=1)],
            1: [collective("send", 0.5, stream=0, peer=0)],
        }
    )
    assert found[0].seconds == seconds(3.5)


def test_messages_in_both_directions_do_not_stop_the_replay() -> None:
    def rank(other: int) -> list[Record]:
        return [
            collective("recv", 0.1, stream=1, peer=other),
            collective("send", 0.1, stream=2, peer=other),
            RecordEvent(1, 1),
            WaitEvent(0, 1),
            kernel(1.0),
        ]

    assert replay({0: rank(1), 1: rank(0)})[0].seconds == seconds(1.1)


def test_ranks_that_wait_for_each_other_are_an_error() -> None:
    def rank(other: int) -> list[Record]:
        return [
            collective("recv", 0.1, stream=0, peer=other),
            collective("send", 0.1, stream=0, peer=other),
        ]

    with pytest.raises(ValueError, match="wait for one another: 0, 1"):
        replay({0: rank(1), 1: rank(0)})


def test_collectives_in_another_order_are_found() -> None:
    gather, reduce = (collective(name, 1.0, stream=0) for name in ("allgather", "allreduce"))
    assert list(mismatched_collectives({0: [gather, reduce], 1: [gather, reduce]})) == []
    [line] = mismatched_collectives({0: [gather, reduce], 1: [reduce, gather]})
    assert line.startswith("collective 0 of ranks 0 and 1 differs: allgather")
    [line] = mismatched_collectives({0: [gather, reduce], 1: [gather]})
    assert line.startswith("rank 0 issues allreduce")


def test_a_send_without_a_receive_is_found() -> None:
    send = collective("send", 1.0, stream=0, peer=1)
    receive = collective("recv", 1.0, stream=0, peer=0)
    assert list(mismatched_collectives({0: [send], 1: [receive]})) == []
    [line] = mismatched_collectives({0: [send, send], 1: [receive]})
    assert line.startswith("rank 0 issues send")
