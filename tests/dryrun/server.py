"""What a server's worker does between a client's steps, on fake GPUs."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np

from penstock.engine.losses.client_loss import PolicyForwardBackward
from penstock.engine.moe.routers import Routers
from penstock.engine.multi_lora.model_pool import ModelPool
from penstock.engine.multi_lora.model_store import ModelStore
from penstock.engine.multi_lora.shared_base import SharedBase
from penstock.estimate.dryrun.rank import BuiltRank
from penstock.server.protocol.requests import OptimStep
from penstock.server.protocol.types import AdamParams, Array, Datum, LoraConfig
from penstock.server.protocol.worker_commands import ForwardBackwardCommand
from penstock.server.worker.batching import BatchDispatcher
from penstock.server.worker.generate import GenerationHandler
from penstock.server.worker.handlers import CommandHandlers


def server_step(rank: BuiltRank, hf_config: Mapping[str, Any]) -> None:
    """Log-probs, two passes forward and backward, and a step, of one of two clients' adapters; or
    of all weights."""
    handlers = command_handlers(rank, hf_config)
    lora = LoraConfig(rank=4) if rank.run.lora.enable_lora else None
    for model in ("a", "b") if lora else ("a",):
        handlers.models.open(model, handlers._build_lora_spec(lora), {})
    asked: dict[str, Any] = {
        "model": "a",
        "data": tuple(map(datum, (40, 7, 90, 30, 64))),
        "rows": ((0, 1), (2,), (3, 4)),
        "loss": "importance_sampling",
    }
    for command in (
        ForwardBackwardCommand(**asked, forward_only=True),
        ForwardBackwardCommand(**asked),
        ForwardBackwardCommand(**asked),
        OptimStep(model="a", adam=AdamParams(grad_clip_norm=1.0)),
    ):
        handlers.do(command)


def command_handlers(rank: BuiltRank, hf_config: Mapping[str, Any]) -> CommandHandlers:
    """Those of a worker, without folders."""
    built, layout = rank.built, rank.built.engine.model
    models = ModelPool(SharedBase(rank.run, hf_config, None, built, rank.ranks))
    return CommandHandlers(
        models,
        cast(ModelStore, None),
        PolicyForwardBackward(
            layout, rank.ranks, built.sequence_logprobs.log_probs, built.engine.part(Routers)
        ),
        BatchDispatcher(
            rank.run,
            num_replicas=built.dims.num_replicas,
            replica=layout.mesh.index("replicate", "shard"),
            pin_memory=True,
        ),
        GenerationHandler(models, lambda _: "", ()),
    )


def datum(length: int) -> Datum:
    """A sample of importance sampling."""
    numbers = {name: Array.of(np.ones(length), "float32") for name in ("logprobs", "advantages")}
    targets = Array.of(np.full(length, 5), "int64")
    return Datum(
        tokens=Array.of(np.full(length, 5), "int64"), inputs={"target_tokens": targets, **numbers}
    )
