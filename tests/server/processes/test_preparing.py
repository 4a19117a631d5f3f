"""Where workers listen, and how an engine that is elsewhere finds them and knows their secret."""

import json

import pytest

from penstock.config.server.config import ServerConfig
from penstock.core.errors import ConfigError
from penstock.server.launch.addresses import free_port
from penstock.server.launch.prepare import prepare


def tiny(folder, **fields):
    return ServerConfig(
        model_path="builtin:tiny-qwen3",
        tokenizer_path="builtin:bytes",
        output_dir=str(folder),
        **{"api_port": 0, **fields},
    )


def test_workers_that_are_started_again_are_reached_by_the_engine_that_was_there(tmp_path):
    config = tiny(tmp_path, worker_bind_port=free_port("127.0.0.1", 0, ""))
    prepare(config, "workers").publish()
    engine = prepare(config, "connect")
    again = prepare(config, "workers")
    assert (again.workers_secret, again.job.workers_address) == (
        engine.workers_secret,
        engine.job.workers_address,
    )
    # Those of another folder, and those beside their engine, are reached by nobody else.
    assert prepare(tiny(tmp_path / "other"), "workers").workers_secret != again.workers_secret
    assert prepare(config, "auto").workers_secret != again.workers_secret


def test_where_workers_are_said_to_be_is_heard_of_or_refused(tmp_path):
    config = tiny(tmp_path, worker_connection_timeout=0.1)
    with pytest.raises(ConfigError, match="--mode is auto"):
        prepare(config, "auto", "tcp://node0:5556")
    with pytest.raises(ConfigError, match="node0:5556 is no address"):
        prepare(config, "connect", "node0:5556")
    with pytest.raises(ConfigError, match="--mode workers"):
        prepare(config, "connect", "tcp://node0:5556")
    prepare(config, "workers").publish()
    assert prepare(config, "connect", "tcp://node0:5556").job.workers_address == "tcp://node0:5556"


def test_other_machines_listen_nowhere_whatever_the_file_says_of_rank_0(tmp_path):
    fields = {"nnodes": 2, "master_addr": "node0", "worker_bind_host": "192.0.2.1"}
    with pytest.raises(ConfigError, match="worker_bind_port"):
        prepare(tiny(tmp_path, **fields), "auto")
    assert not prepare(tiny(tmp_path, node_rank=1, **fields), "auto").serves
    with pytest.raises(ConfigError, match="clients come to the first machine"):
        prepare(tiny(tmp_path, node_rank=1, **fields), "connect")


def test_a_whole_address_may_leave_the_port_open(tmp_path):
    bind = prepare(tiny(tmp_path, worker_bind_address="tcp://127.0.0.1:0"), "auto").job
    assert bind.workers_bind == bind.workers_address
    assert not bind.workers_bind.endswith(":0")


def test_a_model_that_takes_images_needs_its_image_processor(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}))
    for name in ("model.safetensors", "tokenizer.json"):
        (model / name).write_bytes(b"{}")
    fields = {"model_path": str(model), "output_dir": str(tmp_path / "out"), "api_port": 0}
    with pytest.raises(ConfigError, match="a qwen2_5_vl, which takes images, and "):
        prepare(ServerConfig(**fields), "auto")
    (model / "preprocessor_config.json").write_text("{}")
    assert prepare(ServerConfig(**fields), "auto").job.image_processor == str(model)
    assert prepare(ServerConfig(**fields, backend="transformers"), "auto").job.image_processor == ""
    assert prepare(tiny(tmp_path / "text"), "auto").job.image_processor == ""
