"""Commands from the scheduler to the workers, and their replies: one at a time, apart from
GenerateCommands for the same weights, which join the one that runs.

The workers know model names, but no sessions, owners or client paths: folders are absolute paths
that the scheduler has checked.
"""

from typing import Literal

from msgspec import field

from penstock.server.protocol.codec import Message
from penstock.server.protocol.envelopes import Failure, Hello
from penstock.server.protocol.requests import (
    ForwardBackward,
    ModelConfig,
    OptimStep,
    Sample,
    WeightSyncOptions,
    ZeroGrad,
)
from penstock.server.protocol.results import (
    Done,
    ForwardBackwardResult,
    OptimStepResult,
    SampleResult,
    ServedModel,
    SyncWeightsResult,
)
from penstock.server.protocol.types import Endpoint, Secret


class CreateModelCommand(ModelConfig):
    """Create a model. The result is CheckpointSizes."""


class UnloadModelCommand(Message):
    """Unload a model."""

    model: str


class ForwardBackwardCommand(ForwardBackward, kw_only=True):
    """A forward-backward pass over packed samples. `rows` are the indices of the samples in each
    row, in order; a row has at most `sample_packing_sequence_len` tokens. Workers distribute rows
    over replicas and pad."""

    rows: tuple[tuple[int, ...], ...]


class SaveCheckpointCommand(Message):
    """Save weights and optimizer state to a folder, atomically."""

    model: str
    folder: str
    metadata: dict[str, str | int | float | bool | None]


class LoadCheckpointCommand(Message):
    """Load a checkpoint. Fails as not found or invalid if the folder does not match the model."""

    model: str
    folder: str
    optimizer: bool


class ExportCommand(Message):
    """Export the model for sampling: a PEFT folder, or a full model."""

    model: str
    folder: str
    dtype: Literal["bfloat16", "float32"] | None = None
    """None: adapters in their training dtype, so that samples come from exactly that model; full
    models in bfloat16."""


class GenerateCommand(Message):
    """Sample completions. `adapter`: a folder written by ExportCommand; None: the base model."""

    samples: tuple[Sample, ...]
    adapter: str | None = None


class WeightSyncCommand(WeightSyncOptions, kw_only=True):
    """Sync weights to inference servers."""

    endpoints: tuple[Endpoint, ...]
    api_keys: tuple[Secret | None, ...] = ()  # One per endpoint, or none at all


WorkerOperation = (
    CreateModelCommand
    | UnloadModelCommand
    | ForwardBackwardCommand
    | OptimStep
    | ZeroGrad
    | SaveCheckpointCommand
    | LoadCheckpointCommand
    | ExportCommand
    | GenerateCommand
    | WeightSyncCommand
)


class Command(Message):
    """A command and its number."""

    id: str
    operation: WorkerOperation


class Arrivals(Message):
    """Commands that join a running one; between workers alone."""

    commands: tuple[Command, ...]


class Shutdown(Message):
    """Stop the workers."""


ToWorkers = Hello | Command | Shutdown


class Ready(Message):
    """The workers' state."""

    instance: str  # Unique id of each start: the state of earlier instances is lost
    served: ServedModel
    models: tuple[str, ...]  # Loaded models
    steps: dict[str, int] = field(default_factory=dict[str, int])
    """Number of optimizer steps of each loaded model."""
    models_with_gradients: tuple[str, ...] = ()  # Loaded models with accumulated gradients
    replicas: int = 1  # Number of data-parallel replicas, for balanced packing


class CheckpointSizes(Message):
    """Result of CreateModelCommand: the model's checkpoint sizes."""

    state_bytes: int
    """Of a training checkpoint, including optimizer state that only the first step creates."""
    export_bytes: int  # Bytes of sampler weights


class GenerateResult(Message):
    """Completions, in the order of the samples of GenerateCommand."""

    results: tuple[SampleResult, ...]


Result = (
    Done
    | CheckpointSizes
    | ForwardBackwardResult
    | OptimStepResult
    | GenerateResult
    | SyncWeightsResult
)


class Reply(Message):
    """A command succeeded."""

    id: str
    result: Result


class CommandFailure(Failure, kw_only=True):
    """A command failed, and changed nothing unless `needs_restart`."""

    needs_restart: bool = False
    """Whether the ranks' state is undefined, so that they exit and are restarted."""


class WorkerHeartbeat(Message):
    """Heartbeat of the workers. Sent every second, also while they compute."""

    instance: str


FromWorkers = Ready | Reply | CommandFailure | WorkerHeartbeat
