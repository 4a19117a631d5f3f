"""What is written in a server's file reaches the process that is to do it, in each of them."""

import asyncio
import faulthandler
import gc
import json
import logging
import runpy
import socket
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import uvicorn

from penstock.config.server.config import ServerConfig, to_run_config
from penstock.config.server.load import load_server
from penstock.config.server.run_fields import SAME
from penstock.core.errors import ConfigError
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.server.api import __main__ as api
from penstock.server.api.log_limit import LogLimit
from penstock.server.api.wire.codec_pool import CodecPool
from penstock.server.launch import child_main
from penstock.server.launch.addresses import free_port, workers_address, workers_bind
from penstock.server.launch.job import ServerJob
from penstock.server.launch.prepare import LaunchPlan, prepare
from penstock.server.launch.supervisor import managed_processes, torchrun_words, workers_environment
from penstock.server.protocol.requests import AddEndpoint, ListEndpoints
from penstock.server.protocol.types import Endpoint
from penstock.server.scheduler.__main__ import read_settings
from penstock.server.worker import __main__ as worker
from tests.server.engine_house import house

ALONE = ProcessInfo(0, 0, 1, torch.device("cpu"))


class Reached(Exception):  # noqa: N818 - it is no error
    """A process came to where the test ends it."""


def reached(*said: Any, **more: Any) -> Any:
    raise Reached(*said, *more)


def written(**fields: Any) -> ServerConfig:
    return ServerConfig(
        **{"model_path": "builtin:tiny-qwen3", "tokenizer_path": "builtin:bytes", **fields}
    )


def job_of(folder, **fields: Any) -> ServerJob:
    return ServerJob(
        config=written(output_dir=str(folder), **fields),
        mode="auto",
        output_dir=folder,
        config_path="builtin:tiny-qwen3",
        weights=folder / "weights",
        tokenizer="builtin:bytes",
        api_host="127.0.0.1",
        api_port=1,
        engine_address="tcp://127.0.0.1:1",
        workers_bind="tcp://127.0.0.1:2",
        workers_address="tcp://127.0.0.1:2",
    )


OF_ENGINE: dict[str, Any] = {
    "skip_initial_checkpoint": True,
    "idle_session_timeout": 7.0,
    "sequence_gap_timeout": 8.0,
    "sample_packing_sequence_len": 4096,
    "enable_packing": False,
    "sample_packing_strategy": "best_fit",
    "worker_connection_timeout": 9.0,
    "worker_max_retries": 5,
    "worker_max_restarts": 6,
    "operation_timeout": 11.0,
    "max_models": 12,
    "max_owner_models": 13,
    "max_sessions": 14,
    "max_owner_sessions": 15,
    "stop_timeout": 16.0,
    "sync_allowed_hosts": ["infer-1.internal"],
}
"""Other values than the defaults, each told under the name it has in the file."""


def test_the_engine_is_told_what_is_written(tmp_path):
    told = read_settings(job_of(tmp_path, **OF_ENGINE, storage_limit="3kB", model_name="mine"))
    assert {name: getattr(told, name) for name in OF_ENGINE} == OF_ENGINE
    assert told.storage_limit == 3000
    assert told.base_names == ("mine", "builtin:tiny-qwen3")


def test_the_api_is_told_what_is_written():
    same = {
        "max_pending_requests": 3,
        "max_connections": 300,
        "sync_after_step": True,
        "requests_per_minute": 4,
        "operation_timeout": 5.0,
        "future_ttl": 6.0,
        "idle_session_timeout": 7.0,
    }
    told = api.read_settings(written(**same, max_request_mb=2), ("a key",))
    assert {name: getattr(told, name) for name in same} == same
    assert told.max_request_bytes == 2 * 2**20
    assert told.keys == ("a key",)


@pytest.mark.slow
def test_no_full_look_for_garbage_passes_over_modules_while_the_api_serves(tmp_path, monkeypatch):
    """It would keep heartbeats waiting for some 50 ms each time."""
    port = free_port("127.0.0.1", 0, "")
    config = written(output_dir=str(tmp_path), api_port=port)
    looked_at = []

    class Serving:
        def __init__(self, _config):
            self.should_exit = False

        async def serve(self):
            looked_at.append(gc.get_freeze_count())
            looked_at.append(sum(len(gc.get_objects(generation)) for generation in range(3)))

    async def nothing(_pool):
        pass

    monkeypatch.setattr(uvicorn, "Server", Serving)
    monkeypatch.setattr(api, "connecting", lambda *_: None)
    monkeypatch.setattr(CodecPool, "start", nothing)
    try:
        asyncio.run(api.serve(prepare(config, "auto").job, ()))
    finally:
        gc.unfreeze()
    frozen, left = looked_at
    assert frozen > 20 * left


def test_the_api_listens_where_that_is_written(tmp_path, monkeypatch):
    port = free_port("127.0.0.1", 0, "")
    config = written(output_dir=str(tmp_path), api_host="localhost", api_port=port)
    listening = []

    def noted(settings):
        listening.append((settings.host, settings.port))
        raise Reached

    monkeypatch.setattr(uvicorn, "Server", noted)
    monkeypatch.setattr(api, "connecting", lambda *_: None)
    with pytest.raises(Reached):
        asyncio.run(api.serve(prepare(config, "auto").job, ()))
    assert listening == [("localhost", port)]


def test_a_model_is_taken_from_where_each_part_of_it_is_said_to_be(tmp_path):
    for name in ("weights", "config", "tokenizer"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"model_type": "qwen3"}))
        (tmp_path / name / "tokenizer.json").write_text("{}")
    (tmp_path / "weights" / "model.safetensors").touch()
    places: dict[str, Any] = {
        "model_path": str(tmp_path / "weights"),
        "config_path": str(tmp_path / "config"),
        "tokenizer_path": str(tmp_path / "tokenizer"),
    }

    def found(**fields):
        config = ServerConfig(output_dir=str(tmp_path / "out"), api_port=0, **fields)
        job = prepare(config, "auto").job
        return str(job.weights), job.config_path, job.tokenizer

    weights, config, tokenizer = places.values()
    assert found(**places) == (weights, config, tokenizer)
    del places["tokenizer_path"]
    assert found(**places) == (weights, config, config)
    del places["config_path"]
    assert found(**places) == (weights, weights, weights)


def test_all_is_kept_in_the_folder_that_is_written(tmp_path):
    job = prepare(written(output_dir=str(tmp_path / "mine"), api_port=0), "auto").job
    assert read_settings(job).output_dir == tmp_path / "mine"
    assert job.folder == tmp_path / "mine" / "server"


def test_workers_assemble_what_is_written(tmp_path, monkeypatch):
    job = job_of(
        tmp_path,
        model_name="mine",
        foundation={"num_hidden_layers": 3},
        load_checkpoint_path=str(tmp_path / "kept"),
        sync_allowed_hosts=["10.0.0.0/8"],
        enable_lora=True,
    )
    seen: dict[str, Any] = {}

    def substrate(run, hf_config, weights, *_):
        seen.update(run=run, layers=hf_config["num_hidden_layers"], weights=weights)

    def operations(_, **told):
        seen.update(told)
        raise Reached

    monkeypatch.setattr(worker, "build_shared_base", substrate)
    monkeypatch.setattr(worker, "build_handlers", operations)
    with pytest.raises(Reached):
        worker.run_rank(job, ALONE)
    assert seen["run"] == to_run_config(job.config)
    assert (seen["layers"], seen["weights"]) == (3, tmp_path / "weights")
    assert (seen["base_model"], seen["tokenizer"].typed) == ("mine", "builtin:bytes")
    assert seen["init_checkpoint"] == tmp_path / "kept"
    assert set(seen["allowed_hosts"]) == {"localhost", "127.0.0.0/8", "::1", "10.0.0.0/8"}
    with pytest.raises(Reached):
        worker.run_rank(replace(job, requires_keys=True), ALONE)
    assert seen["allowed_hosts"] == ("10.0.0.0/8",)


@pytest.mark.parametrize(("asked", "comes_to"), [(True, "a test"), (False, "others in 5030 s")])
def test_workers_try_themselves_only_where_that_is_written(tmp_path, monkeypatch, asked, comes_to):
    monkeypatch.setattr(worker, "build_shared_base", lambda *_: None)
    monkeypatch.setattr(worker, "build_handlers", lambda *_, **__: None)
    monkeypatch.setattr(worker, "self_test", lambda _: reached("a test"))
    monkeypatch.setattr(
        worker, "ControlBroadcast", lambda _, seconds: reached(f"others in {seconds:g} s")
    )
    with pytest.raises(Reached, match=comes_to):
        # Longer than the engine waits for them.
        worker.run_rank(job_of(tmp_path, enable_self_test=asked, operation_timeout=5000.0), ALONE)


@pytest.fixture
def beginning(tmp_path, monkeypatch):
    """What a worker of these settings has done before it joins the others."""

    def begun(**fields: Any) -> dict[str, Any]:
        seen: dict[str, Any] = {}

        def join(seconds, *, reaches_out):
            seen["joined for"], seen["reaches out"] = seconds, reaches_out
            raise Reached

        monkeypatch.setattr(worker, "end_with_parent", lambda: None)
        monkeypatch.setattr(worker, "outlive_parent_by", lambda s: seen.update(outlives=s))
        monkeypatch.setattr(worker, "init_process_group", join)
        monkeypatch.setattr(faulthandler, "enable", lambda: None)
        monkeypatch.setattr(logging, "basicConfig", lambda **how: seen.update(level=how["level"]))
        with pytest.raises(Reached):
            worker.main(job_of(tmp_path, **fields).write())
        return seen

    return begun


def test_workers_wait_as_long_as_is_written(beginning):
    short, long = (beginning(operation_timeout=limit) for limit in (5.0, 500.0))
    assert not short["reaches out"]
    assert beginning(sync_allowed_hosts=["10.0.0.0/8"])["reaches out"]
    # The engine gives them up before they give up one another.
    assert short["joined for"] > 5
    assert long["joined for"] - short["joined for"] == 495


def test_workers_have_as_long_to_end_as_is_written(tmp_path, beginning):
    assert beginning(stop_timeout=7.5)["outlives"] == 7.5
    [workers] = workers_of(tmp_path, stop_timeout=123.0)
    assert 123 < workers.stop_seconds < 140


def test_processes_tell_of_themselves_as_much_as_is_written(tmp_path, monkeypatch, beginning):
    assert beginning(log_level="DEBUG")["level"] == "DEBUG"
    seen = []
    monkeypatch.setattr(sys, "argv", [])
    monkeypatch.setattr(child_main, "end_with_parent", lambda _: None)
    monkeypatch.setattr(runpy, "run_module", lambda *_, **__: None)
    monkeypatch.setattr(logging, "basicConfig", lambda **how: seen.append(how["level"]))
    child_main.main("1", "api", "none", str(job_of(tmp_path, log_level="ERROR").write()))
    assert seen == ["ERROR"]


def test_the_api_limits_lines_on_handlers_of_its_own_process_alone(tmp_path, monkeypatch):
    async def served(_job, _keys):
        pass

    handler = logging.NullHandler()
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.setattr(api, "connecting", reached)
    with pytest.raises(Reached):
        asyncio.run(api.serve(job_of(tmp_path), ()))
    assert handler.filters == []
    monkeypatch.setattr(api, "serve", served)
    api.main(job_of(tmp_path).write())
    assert [type(each) for each in handler.filters] == [LogLimit]


def workers_of(folder, **fields: Any) -> list[Any]:
    children = managed_processes(LaunchPlan(job_of(folder, **fields), (), "", ""), lambda _: None)
    return [one for one in children if one.name == "workers"]


def test_workers_are_started_again_as_often_as_is_written(tmp_path):
    written_and_most = [({"worker_max_restarts": 7}, 7), ({}, 10), ({"worker_max_retries": 20}, 21)]
    for fields, most in written_and_most:
        [workers] = workers_of(tmp_path, **fields)
        assert workers.most_deaths == most


def test_torchrun_is_told_of_workers_and_machines_as_is_written(tmp_path):
    config = written(nproc_per_node=3, nnodes=4, node_rank=2, master_addr="first", master_port=4321)
    config = config.model_copy(update={"stop_timeout": 1.5})
    words = torchrun_words(config, tmp_path)
    told = dict(pairwise(words))
    assert told["--nproc-per-node"] == "3"
    assert (told["--nnodes"], told["--node-rank"]) == ("4", "2")
    assert (told["--rdzv-endpoint"], told["--rdzv-conf"]) == ("first:4321", "rank=2")
    assert "1.5" in words
    assert workers_environment(config)["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] == "2"
    assert "--rdzv-endpoint" not in torchrun_words(written(), tmp_path)


def test_rank_0_listens_where_that_is_written(tmp_path):
    port = free_port("127.0.0.1", 0, "")

    def bound(**fields):
        return workers_bind(written(**fields), alone=False)

    assert bound(worker_bind_port=port) == f"tcp://127.0.0.1:{port}"
    assert bound(worker_bind_host="0.0.0.0", worker_bind_port=port) == f"tcp://0.0.0.0:{port}"
    assert bound(worker_bind_address="tcp://127.0.0.9:5", worker_bind_port=port) == (
        "tcp://127.0.0.9:5"
    )
    assert bound().startswith("tcp://127.0.0.1:")
    config = written(
        output_dir=str(tmp_path),
        worker_bind_address=f"tcp://0.0.0.0:{port}",
        engine_connect_host="node0",
    )
    prepared = prepare(config, "workers")
    assert prepared.job.workers_bind == f"tcp://0.0.0.0:{port}"
    assert prepared.job.workers_address == f"tcp://node0:{port}"
    assert workers_address(written(), prepared.job.workers_bind) == f"tcp://127.0.0.1:{port}"


@pytest.mark.parametrize("field", ["worker_bind_host", "worker_bind_address"])
def test_workers_that_listen_everywhere_tell_others_the_name_of_their_machine(
    tmp_path, monkeypatch, field
):
    monkeypatch.setattr(socket, "getfqdn", lambda: "node7")
    port = free_port("0.0.0.0", 0, "")
    where = {
        "worker_bind_host": {"worker_bind_host": "0.0.0.0", "worker_bind_port": port},
        "worker_bind_address": {"worker_bind_address": f"tcp://0.0.0.0:{port}"},
    }
    prepare(written(output_dir=str(tmp_path), **where[field]), "workers").publish()
    told = (tmp_path / "server" / "workers.address").read_text()
    assert told.strip() == f"tcp://node7:{port}"


WHERE_IT_CAN_BE = {
    *("attn_implementation", "ce_mode", "enable_forward_prefetch", "init_device"),
    "reshard_after_forward",
}
"""Settings whose defaults are only preferences, as their descriptions say."""


def test_workers_are_told_of_every_other_default_what_the_file_says_of_it():
    config: Any = ServerConfig(model_path="org/m")
    run = to_run_config(config)
    others = set()
    for name, place in SAME.items():
        section, _, field = place.partition(".")
        if getattr(getattr(run, section), field) != getattr(config, name):
            others.add(name)
    # These are null in a run, and come to what the file says.
    assert others == WHERE_IT_CAN_BE | {"quant_group_size", "sample_packing_sequence_len"}
    assert run.data.row_length == config.sample_packing_sequence_len
    assert run.lora.resolved_group_size == config.quant_group_size


def test_norms_of_layers_are_asked_for_unless_that_is_turned_off():
    assert to_run_config(written()).train.log_grad_norm == "layers"
    assert to_run_config(written(log_gradient_norms=False)).train.log_grad_norm is True


REFUSALS = {
    "sync_inference_method": "p2p",
    "ckpt_manager": "torch",
    "load_weights_mode": "dcp",
    "encoders": "{image: {}}",
    "sync_allowed_hosts": "['http://infer-1']",
}


@pytest.mark.parametrize("field", REFUSALS)
def test_a_value_that_is_not_served_is_refused(tmp_path, field):
    file = tmp_path / "s.yaml"
    file.write_text(f"model_path: builtin:tiny-qwen3\n{field}: {REFUSALS[field]}\n")
    with pytest.raises(ConfigError) as caught:
        load_server(file)
    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{file}:2: {field}")


@pytest.mark.parametrize("name", ["", " a", "10.0.0.1/8", "a/b", "tcp://a"])
def test_what_is_no_host_is_refused_and_not_passed_over(name):
    with pytest.raises(ValueError, match="sync_allowed_hosts"):
        written(sync_allowed_hosts=["infer-1", "10.0.0.0/8", name])


def test_servers_elsewhere_are_added_only_where_they_are_allowed(tmp_path):
    def asked(host):
        return AddEndpoint(endpoint=Endpoint(host=host, port=1))

    async def check():
        async with house(tmp_path / "no") as here:
            failed = await here.client.fails(asked("10.1.2.3"))
            assert (failed.category, failed.code) == ("user", "invalid")
            assert "'10.1.2.3' is no host that is allowed" in failed.error
            assert "sync_allowed_hosts" in failed.error
            assert (await here.client.do(ListEndpoints())).endpoints == ()
            await here.client.do(asked("127.0.0.1"))
        async with house(tmp_path / "yes", sync_allowed_hosts=["10.0.0.0/8"]) as here:
            await here.client.do(asked("10.1.2.3"))
            await here.client.do(asked("localhost"))
            assert (await here.client.fails(asked("11.1.2.3"))).code == "invalid"
            assert len((await here.client.do(ListEndpoints())).endpoints) == 2
        keys: dict[str, Any] = {"requires_keys": True, "sync_allowed_hosts": ["localhost:1"]}
        async with house(tmp_path / "keys", **keys) as here:
            for host in ("127.0.0.1", "::1", "127.8.8.8"):
                failed = await here.client.fails(asked(host))
                assert "no host that is allowed (localhost:1)" in failed.error
            await here.client.do(asked("localhost"))
            elsewhere = AddEndpoint(endpoint=Endpoint(host="localhost", port=2))
            assert (await here.client.fails(elsewhere)).code == "invalid"

    asyncio.run(check())
