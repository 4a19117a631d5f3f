"""Clients of xorl name their models, and reach what the SDK has no calls for."""

import asyncio

from penstock.server.protocol import results, works
from penstock.server.protocol.values import Run
from tests.server.engine_of_a_table import client, never, served
from tests.server.requests_of_clients import (
    retrieve,
    run,
)


def test_numbers_of_steps_are_those_that_the_model_was_created_with():
    async def scenario():
        made = []

        def told(work):
            run = {"model": work.model, "session": "m", "base_model": "b", "rank": 4}
            facts = {"last_request": 0.0, "user_metadata": made[0].user_metadata}
            return results.ModelTold(run=Run(**run, **facts), served=served(), pending=0)

        def create(work):
            made.append(work)
            return results.ModelMade(model=work.model)

        async with client({works.CreateModel: create, works.ModelOf: told}) as (http, engine):
            await http.post(
                "/api/v1/create_model",
                json={
                    "model_id": "mine",
                    "base_model": "tiny/byte-llama",
                    "lora_config": {"lora_rank": 4, "lora_alpha": 8},
                    "optimizer_config": {
                        "type": "muon",
                        "learning_rate": 3e-4,
                        "betas": [0.8, 0.9],
                    },
                },
            )
            assert (made[0].session, made[0].lora.rank, made[0].lora.alpha) == ("mine", 4, 8)
            assert made[0].optimizer_config.kind == "muon"
            assert engine.works(works.CreateSession)[0].session == "mine"
            await http.post("/api/v1/optim_step", json={"model_id": "mine", "gradient_clip": 1})
            adam = engine.works(works.Step)[0].adam
            assert (adam.learning_rate, adam.beta1, adam.grad_clip_norm) == (3e-4, 0.8, 1.0)
            saved = await http.post("/api/v1/save_weights", json={"model_id": "mine", "path": "a"})
            path = (await retrieve(http, saved.json()["request_id"])).json()["path"]
            assert path == "xorl://mine/weights/a"

    run(scenario())


def test_a_model_that_is_killed_is_saved_and_says_where():
    async def scenario():
        async with client() as (http, engine):
            answer = await http.post("/api/v1/kill_session", json={"model_id": "mine"})
            assert answer.json()["checkpoint_path"] == "xorl://mine/weights/ck1"
            assert engine.works(works.UnloadModel)[0].save
            reset = {"model_id": "mine", "reset_weights": True}
            assert (await http.post("/api/v1/kill_session", json=reset)).status_code == 400

    run(scenario())


def test_inference_servers_are_named_and_sent_weights():
    async def scenario():
        async with client() as (http, engine):
            endpoint = {"host": "node-1", "port": 30000, "world_size": 4, "pool": "b"}
            added = await http.post("/add_inference_endpoint", json=endpoint)
            assert added.json()["endpoint"] == endpoint
            quantised = {"quantization": {"quant_method": "fp8"}}
            await http.post("/api/v1/set_sync_quantization", json=quantised)
            synced = await http.post("/api/v1/sync_inference_weights", json={"pools": ["b"]})
            assert synced.json()["total_bytes"] == 64
            (work,) = engine.works(works.SyncWeights)
            assert (work.model, work.pools) == ("default", ("b",))
            assert work.quantization == {"quant_method": "fp8"}

    run(scenario())


def test_what_takes_too_long_is_told_and_not_begun():
    async def scenario():
        async with client({works.SyncWeights: never}, operation_timeout=0.1) as (http, engine):
            late = await http.post("/api/v1/sync_inference_weights", json={})
            assert late.status_code == 504
            await asyncio.sleep(0.05)
            assert engine.cancelled == [engine.asks[0].id]

    run(scenario())
