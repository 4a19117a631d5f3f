"""Whatever fits the OpenAPI document, and whatever nearly does, is answered: never with a fault of
the server's, and as the document says."""

import contextlib

import httpx
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.errors import Unsatisfiable

from penstock.server.api.wire import tinker_pb2 as pb
from tests.server.api.engine_of_a_table import listening

pytestmark = pytest.mark.slow

SECONDS = 20.0
"""In which every request is answered: the future of a poll is none that waits."""


@pytest.fixture(scope="module")
def url():
    with listening(max_pending_requests=100_000) as (url, _):
        yield url


# Imported by these alone: every process collects all tests, and this library takes a second.
@pytest.fixture(scope="module")
def schema(url):
    schemathesis = pytest.importorskip("schemathesis")
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


@pytest.mark.parametrize(
    ("examples", "least"),
    [(1, 60), pytest.param(32, 2_000, marks=pytest.mark.exhaustive)],
)
def test_every_request_is_answered_as_the_document_says(schema, examples, least):
    """`examples` of what fits, and twice as many of what does not, of each operation."""
    sent = 0
    for operation in (found.ok() for found in schema.get_all_operations()):
        for mode, count in (("positive", examples), ("negative", 2 * examples)):
            sent += sent_as_documented(operation, mode, count)
    assert sent >= least


def sent_as_documented(operation, mode, count):
    """How many requests were sent of it, at most `count`: all were answered as documented."""
    import schemathesis
    import schemathesis.checks
    from schemathesis.specs.openapi import checks

    sent = 0

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.explicit, Phase.generate, Phase.shrink],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )
    @given(case=operation.as_strategy(generation_mode=schemathesis.GenerationMode(mode)))
    def answered(case):
        nonlocal sent
        response = case.call(timeout=SECONDS)
        sent += 1
        case.validate_response(
            response,
            checks=[
                schemathesis.checks.not_a_server_error,
                checks.status_code_conformance,
                checks.content_type_conformance,
                checks.response_schema_conformance,
            ],
        )

    with contextlib.suppress(Unsatisfiable):
        # There is nothing wrong to say where nothing is said.
        answered()
    return sent


SHAPES = st.lists(st.integers(-1, 4) | st.integers(-(2**63), 2**63 - 1), max_size=3)
INDICES = st.lists(st.integers(-1, 4) | st.integers(-(2**63), 2**63 - 1), max_size=4).map(
    lambda indices: np.array(indices, "<i8").tobytes()
)
NUMBERS = st.binary(max_size=3) | st.integers(0, 3).flatmap(
    lambda count: st.binary(min_size=8 * count, max_size=8 * count)
)
TENSORS = st.builds(
    pb.Tensor,
    dtype=st.integers(0, 5),
    shape=SHAPES,
    dense=NUMBERS,
) | st.builds(
    pb.Tensor,
    dtype=st.integers(0, 5),
    shape=SHAPES,
    sparse_csr=st.builds(pb.SparseCsr, values=NUMBERS, crow_indices=INDICES, col_indices=INDICES),
)
CHUNKS = (
    st.builds(pb.Chunk, encoded_text=st.builds(pb.EncodedTextChunk, tokens=NUMBERS))
    | st.just(pb.Chunk(image=pb.ImageChunk(data=b"x", format="png")))
    | st.just(pb.Chunk(dmel=pb.OtherChunk()))
)
NAMES = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages"]) | st.text(
    max_size=3
)
PASSES = st.builds(
    pb.ForwardBackwardRequest,
    model_id=st.just("m") | st.text(max_size=5),
    seq_id=st.integers(-1, 3),
    loss_fn=st.sampled_from(["cross_entropy", "ppo"]) | st.text(max_size=5),
    loss_fn_config=st.dictionaries(st.text(max_size=3), st.floats(), max_size=1),
    data=st.lists(
        st.builds(
            pb.Datum,
            model_input=st.lists(CHUNKS, max_size=2),
            loss_fn_inputs=st.dictionaries(NAMES, TENSORS, max_size=3),
        ),
        max_size=2,
    ),
)


@pytest.mark.parametrize("examples", [60, pytest.param(2000, marks=pytest.mark.exhaustive)])
def test_every_message_is_taken_or_refused_as_its_clients_fault(url, examples):
    headers = {"Content-Type": "application/x-protobuf"}
    with httpx.Client(base_url=url, headers=headers, timeout=SECONDS) as http:

        @settings(max_examples=examples, deadline=None, database=None, derandomize=True)
        @given(PASSES.map(lambda message: message.SerializeToString()) | st.binary(max_size=50))
        def answered(body):
            answer = http.post("/api/v1/forward_backward", content=body)
            assert answer.status_code in (200, 400, 422), answer.text
            assert answer.status_code == 200 or answer.json()["category"] == "user"

        answered()
