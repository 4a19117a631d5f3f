"""Samples and losses of clients become what the engine computes, or are refused by name."""

import numpy as np
import pytest
import zstandard

from penstock.server.api import tinker_pb2 as pb
from penstock.server.protocol import works
from tests.server.engine_of_a_table import MODEL, client
from tests.server.requests_of_clients import PROTO, forward_backward, run, sample


def test_labels_are_shifted_once_and_masked_ones_are_not_trained_on():
    async def scenario():
        async with client() as (http, engine):
            labelled = sample([5, 6, 7, 8], labels=[-100, -100, 7, 8])
            assert (await forward_backward(http, labelled)).status_code == 200
            (work,) = engine.works(works.Pass)
            inputs = {name: array.numpy() for name, array in work.data[0].inputs.items()}
            # Token 6 is to bring 7, token 7 is to bring 8; after 8 there is none.
            np.testing.assert_array_equal(inputs["target_tokens"], [0, 7, 8, 0])
            np.testing.assert_array_equal(inputs["weights"], [0, 1, 1, 0])
            assert (work.loss, work.per) == ("cross_entropy", "token")

    run(scenario())


def test_targets_are_taken_as_they_are():
    async def scenario():
        async with client() as (http, engine):
            targets = {"data": [6, -100, 8], "dtype": "int64", "shape": [3]}
            shifted = sample([5, 6, 7], target_tokens=targets, weights=[0.5, 1, 2])
            assert (await forward_backward(http, shifted)).status_code == 200
            inputs = engine.works(works.Pass)[0].data[0].inputs
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
            weights = engine.works(works.Pass)[0].data[0].inputs["weights"].numpy()
            np.testing.assert_array_equal(weights, [0, 0.5, 0, 2])

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
            weights = engine.works(works.Pass)[0].data[0].inputs["weights"].numpy()
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
            weights = engine.works(works.Pass)[0].data[0].inputs["weights"].numpy()
            np.testing.assert_array_equal(weights, [1.5, -2.0])

    run(scenario())


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        ({"dense": b"123", "dtype": pb.DTYPE_FLOAT32, "shape": [2]}, "3 bytes"),
        ({"dense": b"", "dtype": pb.DTYPE_FLOAT32, "shape": [1 << 40]}, "over"),
        ({"dense": b"", "dtype": pb.DTYPE_FLOAT32, "shape": [-1]}, "shape"),
        ({"dense": b"\0" * 8, "dtype": 77, "shape": [2]}, "type 77"),
        (
            {
                "sparse_csr": pb.SparseCsr(
                    values=b"\0" * 4,
                    crow_indices=np.array([0, 1], "<i8").tobytes(),
                    col_indices=np.array([1 << 60], "<i8").tobytes(),
                ),
                "dtype": pb.DTYPE_FLOAT32,
                "shape": [1, 2],
            },
            "compressed sparse rows",
        ),
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
            assert [(ask.seq, ask.work.data) for ask in engine.asks] == [(1, ())]

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
            (work,) = engine.works(works.Pass)
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
            assert engine.works(works.Pass) == []

    run(scenario())


NO_NUMBERS = [
    [1, "a"],
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
            for data in NO_NUMBERS:
                bad = sample([1, 2], target_tokens=[2, 3], weights=data)
                answer = await forward_backward(http, bad)
                assert answer.status_code == 400, data
                assert "weights of sample 0" in answer.json()["error"]

    run(scenario())
