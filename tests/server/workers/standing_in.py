"""Workers that are small, quick, and may die when they are told to.

A model there is two numbers: what it has learnt, and what it has gathered since. What it learns
from a pass is the number of its tokens, so that a test can tell what was done, and how often.
"""

import asyncio
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.server.protocol.codec import Code, PeerLostError
from penstock.server.protocol.requests import OptimStep, ZeroGrad
from penstock.server.protocol.results import (
    Done,
    ForwardBackwardResult,
    OptimStepResult,
    SampleResult,
    ServedModel,
    SyncWeightsResult,
)
from penstock.server.protocol.types import Array, LoraConfig, SampledSequence
from penstock.server.protocol.worker_commands import (
    CheckpointSizes,
    Command,
    CommandFailure,
    CreateModelCommand,
    ExportCommand,
    ForwardBackwardCommand,
    GenerateCommand,
    GenerateResult,
    Hello,
    LoadCheckpointCommand,
    Ready,
    Reply,
    SaveCheckpointCommand,
    Shutdown,
    ToWorkers,
    UnloadModelCommand,
    WeightSyncCommand,
    WorkerHeartbeat,
    WorkerOperation,
)
from tests.server.in_process_channel import MemoryEnd

STATE_BYTES = 1000
VOCABULARY = 100

SERVED = ServedModel(
    base_model="tiny",
    tokenizer="bytes",
    arch="llama",
    max_context=64,
    trains="adapters",
    max_rank=16,
    samples=True,
    vocab_size=VOCABULARY,
)

Dies = Callable[[WorkerOperation], str | None]
"""Whether workers die over an order: `before` or `after` it is done, or not."""


def lives(_: WorkerOperation) -> None:
    return None


class Dead(Exception):  # noqa: N818 - it is no error
    """The workers' process ended."""


class Model:
    """One that is trained."""

    def __init__(self, lora: LoraConfig | None) -> None:
        self.lora = lora
        self.learnt = 0
        self.gathered = 0
        self.step = 0


class StandIn:
    """All ranks, in one task."""

    names = itertools.count(1)

    def __init__(self, served: ServedModel = SERVED, end: Any = None) -> None:
        """`end`: of the channel to the engine; None: one within this process."""
        self.instance = f"workers-{next(self.names)}"
        self.end: Any = end or MemoryEnd(ToWorkers, "listens")
        self.served = served
        self.models: dict[str, Model] = {}
        self.orders: list[Any] = []
        self.dies: Dies = lives
        self.slowly = 0.0
        """Seconds that each order takes."""
        self.is_silent = False
        self.has_left = False
        """Whether they were told to leave, and did."""
        self.fails: Callable[[Any], bool] = lambda _: False
        """Whether they refuse an order."""
        self.refusal: Code = "not_found"
        """How they do."""
        self.breaks: Callable[[Any], bool] = lambda _: False
        """Whether they fail over an order as they never should."""

    async def run(self) -> None:
        """Serve until it dies."""
        while True:
            try:
                message = await self.end.receive()
            except PeerLostError:
                continue
            match message:
                case Hello():
                    await self.end.send(
                        Ready(
                            instance=self.instance,
                            served=self.served,
                            models=tuple(self.models),
                            steps={name: model.step for name, model in self.models.items()},
                            models_with_gradients=tuple(
                                n for n, each in self.models.items() if each.gathered
                            ),
                            replicas=2,
                        )
                    )
                case Shutdown():
                    self.has_left = True
                    self.end.drop()
                    return
                case Command():
                    try:
                        await self._command(message)
                    except Dead:
                        self.end.drop()
                        return

    async def beat(self) -> None:
        while not self.is_silent:
            await self.end.send(WorkerHeartbeat(instance=self.instance))
            await asyncio.sleep(0.05)

    async def _command(self, command: Command) -> None:
        order = command.operation
        self.orders.append(order)
        moment = self.dies(order)
        if moment == "before":
            raise Dead
        await asyncio.sleep(self.slowly)
        try:
            result = self._refuse() if self.fails(order) else self._do(order)
        except LookupError as error:
            fault = CommandFailure(
                id=command.id, error=str(error), category="user", code=self.refusal
            )
            await self.end.send(fault)
            return
        if self.breaks(order):
            fault = CommandFailure(
                id=command.id,
                error="broken",
                category="server",
                code="internal",
                needs_restart=True,
            )
            await self.end.send(fault)
            await asyncio.sleep(0.1)
            raise Dead
        if moment == "after":
            raise Dead
        await self.end.send(Reply(id=command.id, result=result))

    def _refuse(self) -> Any:
        raise LookupError("this order is refused")

    def _do(self, order: WorkerOperation) -> Any:
        match order:
            case CreateModelCommand():
                assert order.model not in self.models
                self.models[order.model] = Model(order.lora)
                return CheckpointSizes(state_bytes=STATE_BYTES, export_bytes=STATE_BYTES // 2)
            case UnloadModelCommand():
                del self.models[order.model]
                return Done()
            case GenerateCommand():
                drawn = (self._drawn(order, sample.count) for sample in order.samples)
                return GenerateResult(results=tuple(drawn))
            case WeightSyncCommand():
                return SyncWeightsResult(
                    num_parameters=1, total_bytes=2, num_buckets=1, seconds=0.0, endpoints=()
                )
        return self._with(order, self.models[order.model])

    def _with(self, order: WorkerOperation, model: Model) -> Any:
        match order:
            case ForwardBackwardCommand():
                tokens = [datum.tokens.shape[0] for datum in order.data]
                model.gathered += 0 if order.forward_only else sum(tokens)
                outputs = tuple({"logprobs": Array.of(np.zeros(n), "float32")} for n in tokens)
                return ForwardBackwardResult(
                    outputs=outputs, metrics={"loss:sum": float(sum(tokens))}
                )
            case OptimStep():
                model.learnt, model.gathered = model.learnt + model.gathered, 0
                model.step += 1
                return OptimStepResult(metrics={"step": model.step, "learnt": model.learnt})
            case ZeroGrad():
                model.gathered = 0
            case SaveCheckpointCommand():
                self._write(Path(order.folder), STATE_BYTES, model)
            case ExportCommand():
                self._write(Path(order.folder), STATE_BYTES // 2, model)
            case LoadCheckpointCommand():
                found = json.loads((Path(order.folder) / "state.json").read_text())
                model.learnt, model.gathered = found["learnt"], 0
                model.step = found["step"] if order.optimizer else 0
        return Done()

    def _drawn(self, order: GenerateCommand, count: int) -> SampleResult:
        learnt = 0
        if order.adapter is not None:
            learnt = json.loads((Path(order.adapter) / "state.json").read_text())["learnt"]
        one = SampledSequence(
            stop_reason="length",
            tokens=Array.of([learnt], "int32"),
            logprobs=Array.of([0.0], "float32"),
        )
        return SampleResult(sequences=(one,) * count)

    def _write(self, folder: Path, size: int, model: Model) -> None:
        folder.mkdir(parents=True)
        state = json.dumps({"learnt": model.learnt, "step": model.step})
        (folder / "state.json").write_text(state)
        (folder / "weights").write_bytes(b"w" * (size - len(state)))
