"""Futures are polled, kept, cancelled, and told in numbers that are what was computed."""

import asyncio

import numpy as np

from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.protocol import envelopes, requests, results
from penstock.server.protocol.codec import FrameError
from penstock.server.protocol.types import Array
from tests.server.api.engine_of_a_table import client, failure, never
from tests.server.api.requests_of_clients import (
    STEP,
    forward_backward,
    retrieve,
    run,
    sample,
    step,
)


def test_a_poll_ends_when_the_result_is_there():
    async def scenario():
        async with client({requests.OptimStep: never}, poll_seconds=10.0) as (http, engine):
            name = await step(http)
            poll = asyncio.create_task(retrieve(http, name))
            await asyncio.sleep(0.05)
            assert not poll.done()
            await engine.answer(engine.asks[0], results.OptimStepResult(metrics={"grad_norm": 2.0}))
            async with asyncio.timeout(2):
                assert (await poll).json()["metrics"] == {"grad_norm": 2.0}

    run(scenario())


def test_what_waits_is_told_to_each_client_as_it_reads_it():
    async def scenario():
        async with client({requests.OptimStep: never}) as (http, engine):
            name = await step(http)
            xorl = await retrieve(http, name)
            assert (xorl.status_code, xorl.json()["type"]) == (200, "try_again")
            await engine.end.send(envelopes.Status(workers="down", reason="rank 1 died"))
            await asyncio.sleep(0.05)
            sdk = await retrieve(http, name, json={"allow_metadata_only": True})
            assert sdk.status_code == 408
            assert sdk.json() == {
                "type": "try_again",
                "request_id": name,
                "queue_state": "paused_capacity",
                "queue_state_reason": "rank 1 died",
            }

    run(scenario())


def test_nobody_waits_longer_when_the_process_is_about_to_end():
    async def scenario():
        async with client({requests.OptimStep: never}, poll_seconds=60.0) as (http, engine):
            poll = asyncio.create_task(retrieve(http, await step(http)))
            await asyncio.sleep(0.05)
            assert not poll.done()
            engine.app.state.service.shutting_down.set()
            async with asyncio.timeout(2):
                assert (await poll).json()["type"] == "try_again"

    run(scenario())


def test_a_result_is_kept_for_its_time_and_gone_then():
    async def scenario():
        async with client(future_ttl=0.2) as (http, _):
            name = await step(http)
            assert (await retrieve(http, name)).status_code == 200
            assert (await retrieve(http, name)).status_code == 200
            await asyncio.sleep(0.6)
            gone = await retrieve(http, name)
            assert (gone.status_code, gone.json()["code"]) == (410, "gone")
            assert (await retrieve(http, "future_of_nobody")).status_code == 410

    run(scenario())


def test_results_beyond_the_bytes_that_are_kept_go_from_the_oldest_on():
    async def scenario():
        async with client(max_result_bytes=2_500) as (http, _):
            names = []
            for _ in range(4):
                # A thousand bytes of log-probabilities each.
                answer = await forward_backward(http, sample(range(250)))
                names.append(answer.json()["request_id"])
                await retrieve(http, names[-1])
            codes = [(await retrieve(http, name)).status_code for name in names]
            assert codes == [410, 410, 200, 200]

    run(scenario())


def test_a_future_is_cancelled_at_the_engine():
    async def scenario():
        async with client({requests.OptimStep: never}) as (http, engine):
            name = await step(http)
            done = await http.post("/api/v1/cancel_future", json={"request_id": name})
            assert done.status_code == 204
            assert (await retrieve(http, name)).json()["code"] == "cancelled"
            assert engine.cancelled == [name]

    run(scenario())


def test_the_same_request_sent_twice_is_done_once():
    async def scenario():
        async with client() as (http, engine):
            twice = {"X-Idempotency-Key": "again"}
            first, second = await step(http, headers=twice), await step(http, headers=twice)
            assert first == second
            assert await step(http) != first
            assert len(engine.asks) == 2
            assert (await retrieve(http, first)).json()["metrics"]
            assert await step(http, headers=twice) == first
            assert len(engine.asks) == 2

    run(scenario())


def test_one_idempotency_key_on_two_calls_names_two_requests():
    async def scenario():
        async with client() as (http, engine):
            key = {"X-Idempotency-Key": "again"}
            body = {"model_id": "default", "forward_backward_input": {"data": [sample(range(4))]}}
            computed = await http.post("/api/v1/forward_backward", json=body, headers=key)
            assert computed.json()["request_id"] != await step(http, headers=key)
            assert len(engine.asks) == 2

    run(scenario())


def test_the_same_request_sent_twice_at_once_is_done_once():
    async def scenario():
        async with client() as (http, engine):
            link = engine.app.state.service.scheduler
            send = link._channel.send

            async def slowly(message):
                await asyncio.sleep(0.02)
                await send(message)

            link._channel.send = slowly
            twice = {"X-Idempotency-Key": "again"}
            names = await asyncio.gather(*[step(http, headers=twice) for _ in range(2)])
            assert len(set(names)) == 1
            assert (await retrieve(http, names[0])).json()["metrics"]["grad_norm"] == 1.5
            assert len(engine.works(requests.OptimStep)) == 1

    run(scenario())


def test_what_could_not_be_handed_over_is_not_counted_as_waiting(monkeypatch):
    async def scenario():
        async with client(max_pending_requests=1) as (http, engine):
            link = engine.app.state.service.scheduler
            send = link._channel.send

            async def too_large(_):
                raise FrameError("too large")

            for _ in range(2):
                monkeypatch.setattr(link._channel, "send", too_large)
                answer = await http.post("/api/v1/optim_step", json=STEP | {"seq_id": None})
                assert (answer.status_code, answer.json()["error"]) == (413, "too large")
                await asyncio.sleep(0)
            monkeypatch.setattr(link._channel, "send", send)
            await step(http)

    run(scenario())


def test_what_did_not_go_is_tried_when_it_is_asked_for_again():
    async def scenario():
        async with client({requests.OptimStep: lambda _: failure("no")}) as (http, engine):
            twice = {"X-Idempotency-Key": "again"}
            name = await step(http, headers=twice)
            assert (await retrieve(http, name)).json()["error"] == "no"
            engine.table[requests.OptimStep] = lambda _: results.OptimStepResult(metrics={})
            second = await step(http, headers=twice)
            assert (await retrieve(http, second)).json()["metrics"] == {}
            assert (await retrieve(http, name)).json()["error"] == "no"

    run(scenario())


def test_a_large_result_is_announced_by_its_size_where_the_client_allows_it():
    async def scenario():
        async with client(max_inline_bytes=1000) as (http, _):
            name = (await forward_backward(http, sample(range(500)))).json()["request_id"]
            proto = {"Accept": "application/x-protobuf"}
            announced = await retrieve(
                http, name, json={"allow_metadata_only": True}, headers=proto
            )
            whole = await retrieve(http, name, json={"allow_metadata_only": False}, headers=proto)
            assert announced.json() == {
                "status": "complete_metadata",
                "response_payload_size": len(whole.content),
            }
            told = pb.ForwardBackwardOutput.FromString(whole.content)
            assert told.loss_fn_outputs[0].num_datums == 1

    run(scenario())


def test_a_number_that_is_not_finite_is_told_and_not_replaced():
    async def scenario():
        def diverged(_):
            logprobs = {"logprobs": Array.of([-1.0, np.nan], "float32")}
            return results.ForwardBackwardResult(
                outputs=(logprobs,), metrics={"loss:sum": float("inf")}
            )

        async with client({requests.ForwardBackward: diverged}) as (http, _):
            name = (await forward_backward(http, sample([1, 2]))).json()["request_id"]
            in_json = (await retrieve(http, name)).json()
            assert in_json["code"] == "not_finite"
            proto = await retrieve(http, name, headers={"Accept": "application/x-protobuf"})
            told = pb.ForwardBackwardOutput.FromString(proto.content)
            assert told.metrics["loss:sum"] == float("inf")
            values = np.frombuffer(told.loss_fn_outputs[0].fields["logprobs"].data, "<f4")
            assert np.isnan(values[1])

    run(scenario())
