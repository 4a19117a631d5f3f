"""Self test: a pass, an optimizer step and another pass, before any client connects."""

import math

import numpy as np

from penstock.core.errors import StageError
from penstock.server.protocol.requests import OptimStep
from penstock.server.protocol.results import ForwardBackwardResult, OptimStepResult
from penstock.server.protocol.types import AdamParams, Array, Datum
from penstock.server.protocol.worker_commands import (
    CheckpointSizes,
    CreateModelCommand,
    ForwardBackwardCommand,
    UnloadModelCommand,
)
from penstock.server.worker.handlers import CommandHandlers

NAME = "self-test"
TOKENS = 64  # Tokens per sample


def self_test(handlers: CommandHandlers) -> None:
    """Raises StageError for non-finite values, and the errors of the commands. Removes its model
    afterwards. Collective."""
    dispatcher = handlers.dispatcher
    vocabulary = handlers.models.substrate.built.vocab_size
    count = min(TOKENS, dispatcher.run.data.row_length)
    drawn = np.random.default_rng(0).integers(0, vocabulary, (dispatcher.num_replicas, count + 1))
    data = tuple(
        Datum(
            tokens=Array.of(ids[:-1], "int32"), inputs={"target_tokens": Array.of(ids[1:], "int64")}
        )
        for ids in drawn
    )
    rows = ForwardBackwardCommand(
        model=NAME,
        data=data,
        rows=tuple((number,) for number in range(len(data))),
        loss="cross_entropy",
        loss_reduction="token",
    )
    opened = handlers.do(CreateModelCommand(model=NAME, lora=None))
    assert isinstance(opened, CheckpointSizes)
    try:
        # Only a pass after the step shows whether the step left finite weights.
        step = OptimStep(model=NAME, adam=AdamParams())
        results = [handlers.do(command) for command in (rows, step, rows)]
    finally:
        handlers.do(UnloadModelCommand(model=NAME))
    for result in results:
        assert isinstance(result, ForwardBackwardResult | OptimStepResult)
        for name, value in result.metrics.items():
            if not math.isfinite(value):
                raise StageError(
                    f"the self test found {name} to be {value}.\n"
                    "  Look at the weights in model_path, and at the precisions that are written."
                )
