"""Requests as clients make them, for tests of the HTTP side."""

import asyncio

from tests.server.api.engine_of_a_table import MODEL

ALICE = {"X-API-Key": "tml-of-alice"}
BOB = {"Authorization": "Bearer tml-of-bob"}
KEYS = ("tml-of-alice", "tml-of-bob")
STEP = {"model_id": MODEL, "seq_id": 1, "adam_params": {"learning_rate": 0.1}}
PROTO = {"Content-Type": "application/x-protobuf"}


def run(scenario):
    return asyncio.run(asyncio.wait_for(scenario, 20))


async def step(http, **kwargs):
    answer = await http.post("/api/v1/optim_step", json=STEP, **kwargs)
    assert answer.status_code == 200, answer.text
    return answer.json()["request_id"]


async def retrieve(http, name, **kwargs):
    body = {"request_id": name} | kwargs.pop("json", {})
    return await http.post("/api/v1/retrieve_future", json=body, **kwargs)


def sample(tokens=(1, 2, 3), **inputs):
    return {
        "model_input": {"input_ids": list(tokens)},
        "loss_fn_inputs": inputs or {"labels": list(tokens)},
    }


async def forward_backward(http, *samples, model="default", **said):
    body = {"model_id": model, "forward_backward_input": {"data": list(samples), **said}}
    return await http.post("/api/v1/forward_backward", json=body)
