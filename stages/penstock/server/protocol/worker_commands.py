"""What the engine tells the workers to do, one command at a time, and what they reply.

The workers know models by name and nothing of sessions, owners or paths of clients: folders are
whole paths that the engine has checked.
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
    """Make a model, as it starts. The reply is Opened."""

    model: str
    lora: Lora | None
    optimizer_config: Optimizer = Optimizer()


class Close(Message):
    """Free what a model takes."""

    model: str


class ForwardBackwardCommand(Message):
    """A pass over packed samples.

    `rows` say which samples lie in each row, in order; a row has no more tokens than
    `sample_packing_sequence_len`. Workers deal rows out to replicas, and fill up with padding.
    """

    model: str
    data: tuple[Datum, ...]
    rows: tuple[tuple[int, ...], ...]
    loss: Loss
    params: dict[str, float]
    forward_only: bool
    per: Literal["sum", "token"]


class OptimStepCommand(Message):
    """One step of a model's optimizer."""

    model: str
    adam: Adam


class ZeroGradCommand(Message):
    """Drop the gathered gradients."""

    model: str


class Save(Message):
    """Weights and the optimizer's states to a folder that is there complete or not at all."""

    model: str
    folder: str
    facts: dict[str, str | int | float | bool | None]
    """Written beside them."""


class Load(Message):
    """Raises as not found or invalid where the folder does not hold what the model is."""

    model: str
    folder: str
    optimizer: bool


class Export(Message):
    """The model for others to sample from: a folder of PEFT's, or a whole model."""

    model: str
    folder: str
    dtype: Literal["bfloat16", "float32"] | None = None
    """None: adapters as they are trained, so that samples are of the very model; whole models in
    bfloat16."""


class Generate(Message):
    """Draw after prompts: `prompts` int32 [T] each, each `counts` times.

    `adapter`: a folder that Export wrote; None: the base model. `settings` one for each prompt.
    """

    prompts: tuple[Array, ...]
    counts: tuple[int, ...]
    settings: tuple[Sampling, ...]
    adapter: str | None = None
    prompt_logprobs: tuple[bool, ...] = ()
    topk: tuple[int, ...] = ()
    topk_drawn: tuple[int, ...] = ()


class WeightSyncCommand(Message):
    """Send weights to inference servers."""

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
    """One for each endpoint, or none at all."""


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
    """An order and its number."""

    id: str
    order: Order


class Hello(Message):
    """First word of the engine. The workers answer Ready."""

    engine: str


class Shutdown(Message):
    """End the workers."""


ToWorkers = Hello | Command | Shutdown


class Ready(Message):
    """What the workers are."""

    instance: str
    """Another one after each start: what an earlier one held is lost."""
    served: Served
    models: tuple[str, ...]
    """Those that are open."""
    steps: dict[str, int] = field(default_factory=dict[str, int])
    """How many steps each of them has made."""
    gathering: tuple[str, ...] = ()
    """Those of them that have gathered gradients since their last step."""
    replicas: int = 1
    """How many rows are computed at the same time: what packing balances rows for."""


class Opened(Message):
    """Of Open: how much the model will write."""

    state_bytes: int
    """Of a Save, the optimizer's states included, also where no step has made them yet."""
    export_bytes: int
    """Of an Export."""


class Generated(Message):
    """One for each prompt of Generate."""

    sampled: tuple[Sampled, ...]


class Reply(Message):
    """A command was done."""

    id: str
    result: Done | Opened | Passed | Stepped | Saved | Loaded | Generated | Synced


class Fault(Message):
    """The command was not done, and changed nothing but what `lost` says."""

    id: str
    error: str
    category: Category
    code: Code
    ends: bool = False
    """Whether nobody knows what the ranks hold, so that they end, and are started again."""


class Beat(Message):
    """The workers live. Told once a second, also while they compute."""

    instance: str
    running: str


FromWorkers = Ready | Reply | Fault | Beat
