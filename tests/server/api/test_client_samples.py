"""Samples and losses of clients become what the engine computes, or are refused by name."""

import tracemalloc

import numpy as np
import pytest
import zstandard

from penstock.server.api import context
from penstock.server.api.errors import ApiError
from penstock.server.api.wire import datums, request_bodies, tensors
from penstock.server.api.wire import tinker_pb2 as pb
from penstock.server.protocol import requests
from tests.server.api.engine_of_a_table import MODEL, client
from tests.server.api.requests_of_clients import PROTO, forward_backward, retrieve, run, sample


def test_labels_are_shifted_once_and_masked_ones_are_not_trained_on():
    async def scenario():
        async with client() as (http, engine):
            labelled = sample([5, 6, 7, 8], labels=[-100, -100, 7, 8])
            assert (await forward_backward(http, labelled)).status_code == 200
            (work,) = engine.works(requests.ForwardBackward)
            inputs = {name: array.numpy() for name, array in work.data[0].inputs.items()}
            # Token 6 is to bring 7, token 7 is to bring 8; after 8 there is none.
            np.testing.assert_array_equal(inputs["target_tokens"], [0, 7, 8, 0])
            np.testing.assert_array_equal(inputs["weights"], [0, 1, 1, 0])
            assert (work.loss, work.loss_reduction) == ("cross_entropy", "token")

    run(scenario())


def test_targets_are_taken_as_they_are():
    async def scenario():
        async with client() as (http, engine):
            targets = {"data": [6, -100, 8], "dtype": "int64", "shape": [3]}
            shifted = sample([5, 6, 7], target_tokens=targets, weights=[0.5, 1, 2])
            assert (await forward_backward(http, shifted)).status_code == 200
            inputs = engine.works(requests.ForwardBackward)[0].data[0].inputs
            np.testing.assert_array_equal(inputs["target_tokens"].numpy(), [6, 0, 8])
            np.testing.assert_array_equal(inputs["weights"].numpy(), [0.5, 0, 2])

    run(scenario())


def test_sparse_targets_are_filled_up():
    async def scenario():
        async with client() as (http, engine):
            sparse = {
                "data": [0.5, 2.0],
                "dtype": "float32",
                "shape": [1, 4],
                "sparse_crow_indices": [0, 2],
                "sparse_col_indices": [1, 3],
            }
            told = await forward_backward(
                http, sample([1, 2, 3, 4], target_tokens=[2, 3, 4, 5], weights=sparse)
            )
            assert told.status_code == 200, told.text
            weights = engine.works(requests.ForwardBackward)[0].data[0].inputs["weights"].numpy()
            np.testing.assert_array_equal(weights, [0, 0.5, 0, 2])

    run(scenario())


SEVERAL = [
    ([[2, 3], [3, 4], [4, 5]], [[0.75, 0.25], [1, 0], [0, 1]]),
    # What is said of a token is said of all of its targets.
    ([[2, 3], [3, 4], [4, 5]], [0.5, 1, 2]),
    ([[2], [3], [4]], [[0.5], [1], [2]]),
]


@pytest.mark.parametrize(("targets", "weights"), SEVERAL)
def test_several_targets_of_a_token_reach_the_engine_and_so_do_their_answers(targets, weights):
    async def scenario():
        async with client() as (http, engine):
            several = sample([1, 2, 3], target_tokens=targets, weights=weights)
            answer = await forward_backward(http, several, loss_fn="cross_entropy")
            assert answer.status_code == 200, answer.text
            inputs = engine.works(requests.ForwardBackward)[0].data[0].inputs
            np.testing.assert_array_equal(inputs["target_tokens"].numpy(), targets)
            each = np.array(weights, np.float32)
            each = each if each.ndim == 2 else each[:, None]
            wanted = np.broadcast_to(each, np.shape(targets))
            np.testing.assert_array_equal(inputs["weights"].numpy(), wanted)
            told = (await retrieve(http, answer.json()["request_id"])).json()
            assert told["loss_fn_outputs"][0]["logprobs"]["shape"] == list(np.shape(targets))

    run(scenario())


def test_a_target_of_several_that_is_masked_counts_nothing():
    async def scenario():
        async with client() as (http, engine):
            several = sample([1, 2], target_tokens=[[2, -100], [-100, 5]])
            answer = await forward_backward(http, several, loss_fn="cross_entropy")
            assert answer.status_code == 200, answer.text
            inputs = engine.works(requests.ForwardBackward)[0].data[0].inputs
            np.testing.assert_array_equal(inputs["target_tokens"].numpy(), [[2, 0], [0, 5]])
            np.testing.assert_array_equal(inputs["weights"].numpy(), [[1, 0], [0, 1]])

    run(scenario())


def test_the_ratio_of_a_sequence_is_of_the_tokens_that_are_marked():
    async def scenario():
        inputs = {
            "target_tokens": [2, 3, 4],
            "logprobs": [0, -1, -1],
            "advantages": [0, 1, 1],
            "sequence_ratio_mask": [0, 1, 1],
            "weights": [1, 1, 2],
        }
        async with client() as (http, engine):
            told = await forward_backward(http, sample([1, 2, 3], **inputs), loss_fn="gspo")
            assert told.status_code == 200, told.text
            got = engine.works(requests.ForwardBackward)[0].data[0].inputs
            assert "sequence_ratio_mask" not in got
            np.testing.assert_array_equal(got["mask"].numpy(), [0, 1, 1])
            np.testing.assert_array_equal(got["weights"].numpy(), [1, 1, 2])
            beyond = sample([1, 2, 3], **inputs | {"advantages": [1, 1, 1]})
            uncounted = sample([1, 2, 3], **inputs | {"weights": [1, 0, 2]})
            no_target = sample([1, 2, 3], **inputs | {"target_tokens": [2, -100, 4]})
            plain = sample([1, 2, 3], **inputs)
            wrong = [(beyond, "gspo"), (uncounted, "gspo"), (no_target, "gspo"), (plain, "ppo")]
            for bad, loss in wrong:
                refused = await forward_backward(http, bad, loss_fn=loss)
                assert refused.status_code == 400
                assert "sequence_ratio_mask" in refused.json()["error"]

    run(scenario())


def test_several_targets_are_of_losses_that_take_them():
    async def scenario():
        inputs = {"logprobs": [-1, -1], "advantages": [1, 1]}
        bad = sample([1, 2], target_tokens=[[2, 3], [4, 5]], **inputs)
        async with client() as (http, engine):
            answer = await forward_backward(http, bad, loss_fn="ppo")
            assert answer.status_code == 400
            assert "target_tokens of sample 0 is [2, 2] for 2 tokens" in answer.json()["error"]
            assert engine.works(requests.ForwardBackward) == []

    run(scenario())


def test_targets_of_few_bytes_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(datums, "MAX_NUMBERS", 100)
    sparse = {
        "data": [],
        "dtype": "int64",
        "shape": [2, 20],
        "sparse_crow_indices": [0, 0, 0],
        "sparse_col_indices": [],
    }

    async def scenario():
        async with client() as (http, engine):
            many = sample([1, 2], target_tokens=sparse)
            codes = []
            for count in (2, 3):
                said = {"data": [many] * count, "loss_fn": "cross_entropy"}
                body = {"seq_id": count, "forward_backward_input": said}
                answer = await http.post("/api/v1/forward_backward", json=body)
                codes.append(answer.status_code)
            assert codes == [200, 413]
            # Its number is given up, so that what comes after it does not wait for it.
            assert [(ask.seq, len(ask.operation.data)) for ask in engine.asks] == [(2, 2), (3, 0)]

    run(scenario())


@pytest.mark.slow
@pytest.mark.parametrize("path", ["forward", "forward_backward"])
def test_a_large_body_says_the_same_as_one_that_is_decoded_in_the_event_loop(monkeypatch, path):
    async def scenario():
        async with client() as (http, engine):
            body = {"seq_id": 7, f"{path}_input": {"data": [sample([1] * 3000)] * 2}}
            stray = {**body, "seq_id": 8, "stray": 1}
            ragged = {"seq_id": 9, f"{path}_input": {"data": [sample([1, 2], labels=[1])]}}
            bodies, answers = (body, stray, ragged), []
            for limit in (request_bodies.INLINE_BYTES, 0):
                monkeypatch.setattr(request_bodies, "INLINE_BYTES", limit)
                monkeypatch.setattr(context, "INLINE_BYTES", limit)
                told = [await http.post(f"/api/v1/{path}", json=each) for each in bodies]
                assert [each.status_code for each in told] == [200, 422, 400]
                answers.append([each.text for each in told[1:]])
                assert "labels of sample 0" in told[2].json()["error"]
            assert answers[0] == answers[1]
            assert engine.app.state.service.codec_pool.jobs == 3
            assert [ask.seq for ask in engine.asks] == [7, 8, 9] * 2
            first, _, _, second, *_ = engine.works(requests.ForwardBackward)
            assert first == second
            assert len(first.data) == 2

    run(scenario())


def test_what_a_loss_does_not_take_is_not_unpacked():
    async def scenario():
        async with client() as (http, _):
            request = proto_request()
            vast = pb.Tensor(dtype=pb.DTYPE_FLOAT32, shape=[1 << 40], dense=b"123")
            request.data[0].loss_fn_inputs["stray"].CopyFrom(vast)
            content = request.SerializeToString()
            answer = await http.post("/api/v1/forward_backward", content=content, headers=PROTO)
            assert answer.status_code == 400
            assert "sample 0 has stray" in answer.json()["error"]

    run(scenario())


def proto_request(**tensor):
    request = pb.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = np.array([1, 2], "<i4").tobytes()
    datum.loss_fn_inputs["target_tokens"].CopyFrom(
        pb.Tensor(dense=np.array([2, 3], "<i8").tobytes(), dtype=pb.DTYPE_INT64, shape=[2])
    )
    if tensor:
        datum.loss_fn_inputs["weights"].CopyFrom(pb.Tensor(**tensor))
    return request


def test_numbers_that_are_not_finite_reach_the_engine_as_they_are():
    async def scenario():
        async with client() as (http, engine):
            infinite = np.array([np.nan, -np.inf], "<f4").tobytes()
            request = proto_request(dense=infinite, dtype=pb.DTYPE_FLOAT32, shape=[2])
            content = request.SerializeToString()
            answer = await http.post("/api/v1/forward_backward", content=content, headers=PROTO)
            assert answer.status_code == 200, answer.text
            weights = engine.works(requests.ForwardBackward)[0].data[0].inputs["weights"].numpy()
            np.testing.assert_array_equal(weights, [np.nan, -np.inf])

    run(scenario())


def test_half_precision_weights_arrive_as_they_are():
    async def scenario():
        async with client() as (http, engine):
            # 1.5 and -2.0: the upper halves of their float32.
            halves = np.array([0x3FC0, 0xC000], "<u2").tobytes()
            request = proto_request(dense=halves, dtype=pb.DTYPE_BFLOAT16, shape=[2])
            content = zstandard.compress(request.SerializeToString())
            answer = await http.post(
                "/api/v1/forward_backward",
                content=content,
                headers=PROTO | {"Content-Encoding": "zstd"},
            )
            assert answer.status_code == 200, answer.text
            weights = engine.works(requests.ForwardBackward)[0].data[0].inputs["weights"].numpy()
            np.testing.assert_array_equal(weights, [1.5, -2.0])

    run(scenario())


def csr(rows, columns, shape):
    return {
        "sparse_csr": pb.SparseCsr(
            values=b"\0" * 4 * len(columns),
            crow_indices=np.array(rows, "<i8").tobytes(),
            col_indices=np.array(columns, "<i8").tobytes(),
        ),
        "dtype": pb.DTYPE_FLOAT32,
        "shape": shape,
    }


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ({"dense": b"123", "dtype": pb.DTYPE_FLOAT32, "shape": [2]}, "3 bytes"),
        ({"dense": b"", "dtype": pb.DTYPE_FLOAT32, "shape": [1 << 40]}, "over"),
        ({"dense": b"", "dtype": pb.DTYPE_FLOAT32, "shape": [0, 1 << 62]}, "over"),
        ({"dense": b"", "dtype": pb.DTYPE_FLOAT32, "shape": [-1]}, "shape"),
        ({"dense": b"\0" * 8, "dtype": 77, "shape": [2]}, "type 77"),
        (csr([0, 1], [1 << 60], [1, 2]), "compressed sparse rows"),
        (csr([0, 2**63 - 1, -(2**63), -1, 1], [0], [4, 2]), "compressed sparse rows"),
        (csr([0, 2, 2], [1, 1], [2, 2]), "compressed sparse rows"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_their_name(tensor, said):
    async def scenario():
        async with client() as (http, engine):
            content = proto_request(**tensor).SerializeToString()
            answer = await http.post("/api/v1/forward_backward", content=content, headers=PROTO)
            assert answer.status_code == 400
            assert "weights of sample 0" in answer.json()["error"]
            assert said in answer.json()["error"]
            # Its number is given up, so that what comes after it does not wait for it.
            assert [(ask.seq, ask.operation.data) for ask in engine.asks] == [(1, ())]

    run(scenario())


@pytest.mark.parametrize(
    ("said", "loss", "params"),
    [
        ({"loss_fn": "policy_loss"}, "ppo", (0.8, 1.2)),
        (
            {"loss_fn": "policy_loss", "loss_fn_params": {"eps_clip": 0.1, "eps_clip_high": 0.3}},
            "ppo",
            (0.9, 1.3),
        ),
        ({"loss_fn": "cispo"}, "cispo", (0.0, 4.0)),
        ({"loss_fn": "drgrpo"}, "drgrpo", (0.8, 1.28)),
    ],
)
def test_losses_of_xorl_become_those_they_are(said, loss, params):
    async def scenario():
        inputs = {"target_tokens": [2, 3], "logprobs": [-1, -1], "advantages": [1, 1]}
        async with client() as (http, engine):
            answer = await forward_backward(http, sample([1, 2], **inputs), **said)
            assert answer.status_code == 200, answer.text
            (work,) = engine.works(requests.ForwardBackward)
            assert work.loss == loss
            got = work.params["clip_low_threshold"], work.params["clip_high_threshold"]
            assert got == pytest.approx(params, abs=1e-12)

    run(scenario())


@pytest.mark.parametrize(
    "said",
    [
        {"loss_fn": "opd_loss"},
        {"loss_fn": "policy_loss", "loss_fn_params": {"icepop_beta": 2.0}},
        {"loss_fn": "policy_loss", "loss_fn_params": {"eps_clap": 0.2}},
        {"loss_fn": "drgrpo", "loss_fn_params": {"kl_type": "k1"}},
        {"routed_experts": [[1]]},
        {"loss_fn": "causallm_loss", "loss_fn_params": {"beta": 1.0}},
    ],
)
def test_what_has_no_counterpart_is_refused_and_not_replaced(said):
    async def scenario():
        async with client() as (http, engine):
            answer = await forward_backward(http, sample(), **said)
            assert answer.status_code in (400, 422)
            assert engine.works(requests.ForwardBackward) == []

    run(scenario())


def test_a_long_text_among_numbers_takes_no_more_memory_than_itself():
    numbers = [0.5] * 100 + ["a" * 1_000_000]
    tracemalloc.start()
    try:
        with pytest.raises(ApiError, match="no number"):
            tensors.from_list(numbers, "weights")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1_000_000


NON_NUMERIC_ROPE_KEYS = [
    [1, "a"],
    [[1, 2], 3],
    [[[1]], [[1], [2]]],
    [{}, 1],
    [10**400, 0.5],
    [[1], [1, 2]],
    [None, 1],
    [2**70, 1],
    [1e300, 1.0],
    {"data": [1, 2], "shape": [3]},
    {"data": [1, 2], "shape": "ab"},
    {"data": [1, 2], "dtype": "complex64", "shape": [2]},
    {"data": "ab"},
    "ab",
    {},
]


def test_weights_that_are_no_numbers_are_refused():
    async def scenario():
        async with client() as (http, _):
            for weights in NON_NUMERIC_ROPE_KEYS:
                bad = sample([1, 2], target_tokens=[2, 3], weights=weights)
                answer = await forward_backward(http, bad)
                assert answer.status_code == 400, weights
                assert "weights of sample 0" in answer.json()["error"]

    run(scenario())
