"""Clients of xorl name their models, and reach what the SDK has no calls for."""

import asyncio

import pytest
from msgspec import structs

from penstock.server.protocol import requests, results
from penstock.server.protocol.types import Endpoint, ModelInfo, OptimizerConfig, Secret
from tests.server.api.engine_of_a_table import checkpoint, client, failure, never, run_of, served
from tests.server.api.requests_of_clients import retrieve, run


def test_numbers_of_steps_are_those_that_the_model_was_created_with():
    async def scenario():
        made = []

        def told(work):
            run = {"model": work.model, "base_model": "b", "rank": 4}
            facts = {"last_request": 0.0, "user_metadata": made[0].user_metadata}
            return results.ModelResult(info=ModelInfo(**run, **facts), served=served(), pending=0)

        def create(work):
            made.append(work)
            return results.CreateModelResult(model=work.model)

        async with client({requests.CreateModel: create, requests.GetModel: told}) as (
            http,
            engine,
        ):
            await http.post(
                "/api/v1/create_model",
                json={
                    "model_id": "mine",
                    "user_metadata": {"of": "mine"},
                    "base_model": "tiny/byte-llama",
                    "lora_config": {"lora_rank": 4, "alpha": 8},
                    "optimizer_config": {
                        "type": "muon",
                        "optimizer_dtype": "fp32",
                        "learning_rate": 3e-4,
                        "betas": [0.8, 0.9],
                    },
                },
            )
            assert (made[0].session, made[0].lora.rank, made[0].lora.alpha) == ("mine", 4, 8)
            assert made[0].optimizer_config == OptimizerConfig(kind="muon", dtype="fp32")
            assert engine.works(requests.CreateSession)[0].session == "mine"
            await http.post("/api/v1/optim_step", json={"model_id": "mine", "gradient_clip": 1})
            adam = engine.works(requests.OptimStep)[0].adam
            assert (adam.learning_rate, adam.beta1, adam.grad_clip_norm) == (3e-4, 0.8, 1.0)
            shown = await http.get("/api/v1/training_runs/mine")
            assert shown.json()["user_metadata"] == {"of": "mine"}
            saved = await http.post("/api/v1/save_weights", json={"model_id": "mine", "path": "a"})
            path = (await retrieve(http, saved.json()["request_id"])).json()["path"]
            assert path == "xorl://mine/weights/a"

    run(scenario())


def test_a_model_that_is_killed_is_saved_and_says_where():
    async def scenario():
        async with client() as (http, engine):
            answer = await http.post("/api/v1/kill_session", json={"model_id": "mine"})
            assert answer.json()["checkpoint_path"] == "xorl://mine/weights/ck1"
            assert engine.works(requests.UnloadModel)[0].save
            # What is created anew begins with the base's weights, whether one asks for it or not.
            reset = {"model_id": "mine", "reset_weights": True, "save_checkpoint": False}
            assert (await http.post("/api/v1/kill_session", json=reset)).status_code == 200
            assert not engine.works(requests.UnloadModel)[1].save

    run(scenario())


def test_inference_servers_are_named_and_sent_weights():
    async def scenario():
        async with client() as (http, engine):
            endpoint = {"host": "node-1", "port": 30000, "world_size": 4, "pool": "b"}
            added = await http.post("/add_inference_endpoint", json=endpoint)
            assert added.json()["endpoint"] == endpoint
            quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
            path = "/api/v1/set_sync_quantization"
            said = await http.post(path, json={"quantization": quantized})
            assert said.json()["quantization"] == quantized
            synced = await http.post("/api/v1/sync_inference_weights", json={"pools": ["b"]})
            assert synced.json()["total_bytes"] == 64
            (work,) = engine.works(requests.SyncWeights)
            assert (work.model, work.pools) == ("default", ("b",))
            assert work.quantization == {"quant_method": "fp8", "weight_block_size": (128, 128)}

    run(scenario())


def test_an_inference_server_says_its_size_itself_unless_a_client_does():
    def add(work):
        sized = work.endpoint if work.is_sized else endpoint(world_size=8)
        return results.EndpointsResult(endpoints=(sized,))

    def endpoint(**said):
        return Endpoint(host="node-1", port=30000, **said)

    async def scenario():
        async with client({requests.AddEndpoint: add}) as (http, engine):
            for said, size in (({}, 8), ({"world_size": 2, "worker_port": 30000}, 2)):
                body = {"host": "node-1", "port": 30000, "api_key": "secret"} | said
                added = await http.post("/add_inference_endpoint", json=body)
                assert added.json()["endpoint"]["world_size"] == size
                assert "secret" not in added.text + repr(engine.asks)
            assert engine.works(requests.AddEndpoint)[0].api_key == Secret(text="secret")
            elsewhere = {"host": "node-1", "port": 30000, "worker_port": 30001}
            refused = await http.post("/add_inference_endpoint", json=elsewhere)
            assert refused.status_code == 400

    run(scenario())


def test_a_server_that_could_not_be_sent_weights_is_known_all_the_same():
    async def scenario():
        async with client({requests.SyncWeights: lambda _: failure("no such model")}) as (http, _):
            body = {"host": "node-1", "port": 30000, "sync_weights": True}
            told = (await http.post("/add_inference_endpoint", json=body)).json()
            assert (told["success"], told["weights_synced"]) == (True, False)
            assert told["sync_message"] == "no such model"

    run(scenario())


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ({"model_path": "xorl://mine/sampler_weights/a"}, "mine/sampler_weights/a"),
        ({"model_path": "sampler_weights/a"}, "default/sampler_weights/a"),
        ({"model_path": "a", "model_id": "mine"}, "mine/sampler_weights/a"),
    ],
)
def test_what_is_sampled_from_has_a_path_or_a_name(said, path):
    async def scenario():
        async with client() as (http, engine):
            told = (await http.post("/api/v1/create_sampling_session", json=said)).json()
            assert [work.path for work in engine.works(requests.GetCheckpoint)] == [path]
            assert (told["model_path"], told["lora_name"]) == (f"xorl://{path}", path)

    run(scenario())


def test_what_training_goes_on_from_is_not_sampled_from():
    async def scenario():
        async with client() as (http, _):
            said = {"model_path": "xorl://mine/weights/a"}
            answer = await http.post("/api/v1/create_sampling_session", json=said)
            assert answer.status_code == 400

    run(scenario())


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("a", "weights/a"),
        ("weights/a", "weights/a"),
        ("weights/mine/a", "weights/a"),
        ("sampler_weights/a", "sampler_weights/a"),
        ("weights/others/a", None),
        ("mine/a", None),
        ("weights/mine/../a", None),
    ],
)
def test_checkpoints_are_deleted_by_their_names(written, name):
    async def scenario():
        async with client() as (http, engine):
            body = {"model_id": "mine", "checkpoint_id": written}
            answer = await http.post("/api/v1/delete_checkpoint", json=body)
            deleted = [(work.model, work.name) for work in engine.works(requests.DeleteCheckpoint)]
            if name is None:
                assert (answer.status_code, deleted) == (400, [])
            else:
                assert deleted == [("mine", name)]
                assert answer.json()["deleted_path"] == f"xorl://mine/{name}"

    run(scenario())


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_pages_of_checkpoints_one_after_another_are_all_of_them(limit):
    kept = [checkpoint("mine", f"weights/{number}", time=number) for number in range(5)]
    table = {
        requests.ListCheckpoints: lambda _: results.ListCheckpointsResult(checkpoints=tuple(kept))
    }

    async def scenario():
        async with client(table) as (http, _):
            told = []
            for offset in range(0, 6, limit):
                where = {"limit": limit, "offset": offset}
                page = (await http.get("/api/v1/checkpoints", params=where)).json()
                assert page["cursor"] == {**where, "total_count": 5}
                told.append([one["checkpoint_id"] for one in page["checkpoints"]])
            newest_first = [f"weights/{number}" for number in (4, 3, 2, 1, 0)]
            assert [name for names in told for name in names] == newest_first
            assert max(map(len, told)) == limit

    run(scenario())


def test_checkpoints_are_told_the_newest_first():
    kept = [checkpoint("mine", f"weights/{name}", time=time) for name, time in (("a", 1), ("b", 2))]
    table = {
        requests.ListCheckpoints: lambda _: results.ListCheckpointsResult(checkpoints=tuple(kept))
    }

    async def scenario():
        async with client(table) as (http, _):
            told = await http.post("/api/v1/list_checkpoints", json={"model_id": "mine"})
            names = [one["checkpoint_id"] for one in told.json()["checkpoints"]]
            assert names == ["weights/b", "weights/a"]
            page = (await http.get("/api/v1/checkpoints?limit=1")).json()
            assert [one["checkpoint_id"] for one in page["checkpoints"]] == ["weights/b"]
            assert page["cursor"] == {"offset": 0, "limit": 1, "total_count": 2}

    run(scenario())


def test_weights_tell_of_the_adapter():
    async def scenario():
        async with client() as (http, _):
            said = {"xorl_path": "xorl://mine/weights/a"}
            told = (await http.post("/api/v1/weights_info", json=said)).json()
            assert told["lora_config"] == {"lora_rank": 8, "lora_alpha": 16}

    run(scenario())


def test_of_models_the_loaded_ones_are_told_apart_whatever_they_are_of():
    models = [structs.replace(run_of(name), is_open=name == "new") for name in ("new", "old")]
    table = {
        requests.ListSessions: lambda _: results.ListSessionsResult(
            sessions=tuple(map(str, range(300)))
        ),
        requests.ListModels: lambda _: results.ListModelsResult(models=tuple(models), total=2),
    }

    async def scenario():
        async with client(table) as (http, engine):
            told = (await http.get("/api/v1/session_info")).json()
            assert told["active_sessions"] == 300
            assert told["registered_models"] == ["new", "old"]
            assert told["loaded_training_adapters"] == ["new"]
            assert list(told["session_activity"]) == ["new"]
            assert len(engine.asks) == 2

    run(scenario())


def test_a_session_is_not_begun_for_an_adapter_that_cannot_be():
    async def scenario():
        async with client() as (http, engine):
            body = {"session_id": "mine", "lora_config": {"lora_alpha": 8}}
            assert (await http.post("/api/v1/create_session", json=body)).status_code == 400
            assert engine.asks == []

    run(scenario())


def test_a_name_that_another_has_taken_is_told_at_once():
    async def scenario():
        taken = {requests.CreateSession: lambda _: failure("the name is taken", "exists")}
        async with client(taken) as (http, engine):
            answer = await http.post("/api/v1/create_model", json={"model_id": "mine"})
            assert (answer.status_code, answer.json()["error"]) == (409, "the name is taken")
            assert engine.works(requests.CreateModel) == []

    run(scenario())


def test_what_takes_too_long_is_told_and_not_begun():
    async def scenario():
        async with client({requests.SyncWeights: never}, operation_timeout=0.1) as (http, engine):
            late = await http.post("/api/v1/sync_inference_weights", json={})
            assert late.status_code == 504
            await asyncio.sleep(0.05)
            assert engine.cancelled == [engine.asks[0].id]

    run(scenario())


@pytest.mark.parametrize("is_written", [True, False])
def test_a_step_asks_for_its_weights_to_be_sent_where_that_is_written(is_written):
    async def scenario():
        async with client(sync_after_step=is_written) as (http, engine):
            said = {"quantization": {"quant_method": "fp8"}}
            await http.post("/api/v1/set_sync_quantization", json=said)
            body = {"model_id": "mine", "adam_params": {}}
            assert (await http.post("/api/v1/optim_step", json=body)).status_code == 200
            [work] = engine.works(requests.OptimStep)
            if not is_written:
                assert work.sync is None
                return
            assert work.sync is not None
            assert (work.sync.model, work.sync.pools) == ("mine", ("default", "mine"))
            assert work.sync.quantization == said["quantization"]

    run(scenario())
