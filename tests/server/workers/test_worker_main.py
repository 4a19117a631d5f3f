"""A whole rank of the workers, from its job to its end, with the engine's side of the wire."""

import asyncio
import threading

import pytest

from penstock.config.server.config import ServerConfig
from penstock.core.errors import CapabilityError
from penstock.engine.distributed.ranks import init_process_group
from penstock.engine.multi_lora.shared_base import build_shared_base
from penstock.server.launch.addresses import free_port
from penstock.server.launch.job import ServerJob
from penstock.server.protocol.results import ForwardBackwardResult, OptimStepResult
from penstock.server.protocol.worker_commands import (
    CheckpointSizes,
    Command,
    ExportCommand,
    FromWorkers,
    Hello,
    Ready,
    Reply,
    Shutdown,
    WorkerHeartbeat,
)
from penstock.server.protocol.zmq_channel import connecting
from penstock.server.worker.__main__ import run_rank
from tests.engine import runs
from tests.server.workers.orders import data, opening, passing, stepping, write_model

pytestmark = pytest.mark.dist

SECRET_VARIABLE = "PENSTOCK_SERVER_WORKERS_SECRET"


def job_of(folder, **fields):
    config = ServerConfig.model_validate(
        {
            "model_path": str(folder / "model"),
            "model_name": "tiny",
            "tokenizer_path": "builtin:bytes",
            "output_dir": str(folder / "out"),
            "enable_lora": True,
            "lora_rank": 8,
            "data_parallel_mode": "none",
            "enable_mixed_precision": False,
            "ce_mode": "eager",
            "sample_packing_sequence_len": 256,
            "log_level": "WARNING",
            "enable_self_test": True,
            **fields,
        }
    )
    address = f"tcp://127.0.0.1:{free_port('127.0.0.1', 0, 'here')}"
    return ServerJob(
        config=config,
        mode="auto",
        output_dir=folder / "out",
        config_path=str(folder / "model"),
        weights=folder / "model",
        tokenizer="builtin:bytes",
        api_host="127.0.0.1",
        api_port=1,
        engine_address="tcp://127.0.0.1:1",
        workers_bind=address,
        workers_address=address,
    )


async def as_engine(job, orders):
    """What the workers say of each order, and what they said before; then they are let go."""
    channel = connecting(FromWorkers, job.workers_address)
    told, beats = [], 0
    for message in (
        Hello(instance="e"),
        *(Command(id=str(number), operation=order) for number, order in enumerate(orders)),
        Hello(instance="another"),
    ):
        await channel.send(message)
        while isinstance(heard := await channel.receive(), WorkerHeartbeat):
            beats += 1
        told.append(heard)
    await channel.send(Shutdown())
    await asyncio.sleep(0.2)
    channel.close()
    return told, beats


def test_a_rank_tests_itself_tells_what_it_is_obeys_and_leaves(tmp_path, monkeypatch):
    monkeypatch.delenv(SECRET_VARIABLE, raising=False)
    write_model(tmp_path / "model")
    job = job_of(tmp_path)
    orders = [
        opening("a", 4),
        passing("a", data(3)),
        stepping("a"),
        passing("a", data(3)),
        ExportCommand(model="a", folder=str(tmp_path / "sampler")),
        opening("b", 9),
    ]
    found = []
    engine = threading.Thread(target=lambda: found.append(asyncio.run(as_engine(job, orders))))
    engine.start()
    run_rank(job, init_process_group(60))
    engine.join(20)
    [(told, _)] = found
    ready, *replies, refused, again = told
    assert isinstance(ready, Ready)
    assert ready.models == ()
    assert (again.models, again.steps, again.models_with_gradients) == (("a",), {"a": 1}, ("a",))
    served = ready.served
    assert (served.base_model, served.arch, served.trains) == ("tiny", "qwen3", "adapters")
    assert (served.max_rank, served.vocab_size, served.max_context) == (8, runs.VOCAB, 512)
    kinds = [type(each.result) for each in replies if isinstance(each, Reply)]
    assert kinds[:4] == [
        CheckpointSizes,
        ForwardBackwardResult,
        OptimStepResult,
        ForwardBackwardResult,
    ]
    assert (tmp_path / "sampler" / "adapter_model.safetensors").is_file()
    assert (refused.code, refused.category) == ("invalid", "user")
    assert "1 to 8" in refused.error


@pytest.mark.parametrize(
    "lora", [{"use_dora": True}, {"lora_dropout": 0.1}, {"use_rslora": True}], ids=str
)
def test_adapters_that_clients_cannot_share_a_base_with_are_refused_at_the_start(tmp_path, lora):
    lora = {"enable_lora": True, **lora}
    run = runs.run_config(tmp_path / "out", tmp_path, lora=lora, data_parallel_mode="none")
    with pytest.raises(CapabilityError, match=f"Leave {list(lora)[-1]} out"):
        build_shared_base(run, dict(runs.TINY), None, init_process_group(60), lambda _: None)
