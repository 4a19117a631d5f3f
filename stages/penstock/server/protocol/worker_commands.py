"""Commands from the scheduler to the workers, one at a time, and their replies.

The workers know model names, but no sessions, owners or client paths: folders are absolute paths
that the scheduler has checked.
"""

from typing import Literal

from msgspec import field

from penstock.server.protocol.codec import Category, Code, Message
from penstock.server.protocol.results import (
    Done,
    Loaded,
    Passed,
    Sampled,
    Saved,
    Served,
    Stepped,
    Synced,
)
from penstock.server.protocol.types import (
    Adam,
    Array,
    Datum,
    Endpoint,
    Lora,
    Loss,
    Optimizer,
    Quantization,
    Sampling,
    Secret,
)


class Open(Message):
    """Create a model. The reply is Opened."""

    model: str
    lora: Lora | None
    optimizer_config: Optimizer = Optimizer()


class Close(Message):
    """Unload a model."""

    model: str


class ForwardBackwardCommand(Message):
    """A forward-backward pass over packed samples.

    `rows` are the indices of the samples in each row, in order; a row has at most
    `sample_packing_sequence_len` tokens. Workers distribute rows over replicas and pad.
    """

    model: str
    data: tuple[Datum, ...]
    rows: tuple[tuple[int, ...], ...]
    loss: Loss
    params: dict[str, float]
    forward_only: bool
    per: Literal["sum", "token"]


class OptimStepCommand(Message):
    """One optimizer step of a model."""

    model: str
    adam: Adam


class ZeroGradCommand(Message):
    """Zero the accumulated gradients."""

    model: str


class Save(Message):
    """Save weights and optimizer state to a folder, atomically."""

    model: str
    folder: str
    facts: dict[str, str | int | float | bool | None]
    """Metadata stored with them."""


class Load(Message):
    """Load a checkpoint. Fails as not found or invalid if the folder does not match the model."""

    model: str
    folder: str
    optimizer: bool


class Export(Message):
    """Export the model for sampling: a PEFT folder, or a full model."""

    model: str
    folder: str
    dtype: Literal["bfloat16", "float32"] | None = None
    """None: adapters in their training dtype, so that samples come from exactly that model; full
    models in bfloat16."""


class Generate(Message):
    """Sample completions: `prompts` int32 [T] each, each `counts` times.

    `adapter`: a folder written by Export; None: the base model. `settings`: one per prompt.
    """

    prompts: tuple[Array, ...]
    counts: tuple[int, ...]
    settings: tuple[Sampling, ...]
    adapter: str | None = None
    prompt_logprobs: tuple[bool, ...] = ()
    topk: tuple[int, ...] = ()
    topk_drawn: tuple[int, ...] = ()


class WeightSyncCommand(Message):
    """Sync weights to inference servers."""

    model: str
    endpoints: tuple[Endpoint, ...]
    master_address: str
    master_port: int
    group_name: str
    buffer_size_mb: int
    flush_cache: bool
    pause_mode: Literal["retract", "abort", "in_place"]
    weight_version: str | None
    quantization: Quantization | None
    api_keys: tuple[Secret | None, ...] = ()
    """One per endpoint, or none at all."""


Order = (
    Open
    | Close
    | ForwardBackwardCommand
    | OptimStepCommand
    | ZeroGradCommand
    | Save
    | Load
    | Export
    | Generate
    | WeightSyncCommand
)


class Command(Message):
    """A command and its number."""

    id: str
    order: Order


class Hello(Message):
    """First message of the scheduler. The workers reply with Ready."""

    engine: str


class Shutdown(Message):
    """Stop the workers."""


ToWorkers = Hello | Command | Shutdown


class Ready(Message):
    """The workers' state."""

    instance: str
    """Unique id of each start: the state of earlier instances is lost."""
    served: Served
    models: tuple[str, ...]
    """Loaded models."""
    steps: dict[str, int] = field(default_factory=dict[str, int])
    """Number of optimizer steps of each loaded model."""
    gathering: tuple[str, ...] = ()
    """Loaded models with accumulated gradients."""
    replicas: int = 1
    """Number of data-parallel replicas, for balanced packing."""


class Opened(Message):
    """Reply to Open: the model's checkpoint sizes."""

    state_bytes: int
    """Bytes of a Save, including optimizer state that is only created by the first step."""
    export_bytes: int
    """Bytes of an Export."""


class Generated(Message):
    """Completions, one per prompt of Generate."""

    sampled: tuple[Sampled, ...]


class Reply(Message):
    """A command succeeded."""

    id: str
    result: Done | Opened | Passed | Stepped | Saved | Loaded | Generated | Synced


class Fault(Message):
    """A command failed, and changed nothing except as `lost` says."""

    id: str
    error: str
    category: Category
    code: Code
    ends: bool = False
    """Whether the ranks' state is undefined, so that they exit and are restarted."""


class Beat(Message):
    """Heartbeat of the workers. Sent every second, also while they compute."""

    instance: str
    running: str


FromWorkers = Ready | Reply | Fault | Beat
