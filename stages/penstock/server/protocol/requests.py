"""What clients ask for, as the API puts it to the engine.

Those that name a `model` are done in the order of their sequence numbers; all others at once.
"""

from typing import Literal

from msgspec import field

from penstock.server.protocol.codec import Message
from penstock.server.protocol.types import (
    Adam,
    Array,
    Datum,
    Endpoint,
    Lora,
    Loss,
    Optimizer,
    Per,
    Quantization,
    Sampling,
    Secret,
)

# Works of sessions, answered at once.


class CreateSession(Message):
    """Begin a session: what a client's models and samplers belong to."""

    session: str | None = None
    """None: the engine names it."""
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class Heartbeat(Message):
    """Clients of these sessions live."""

    sessions: tuple[str, ...]


class EndSession(Message):
    """Unload all that belongs to a session, saved before."""

    session: str


class ListSessions(Message):
    """Of the owner."""


class SessionOf(Message):
    """What belongs to a session."""

    session: str


class Capabilities(Message):
    """What can be trained here."""


# Works of models, in the order of their sequence numbers.


class CreateModel(Message):
    """Train anew, or from the checkpoint at `path` (with the optimizer's states if `optimizer`)."""

    session: str
    model: str
    base_model: str | None
    """None: the server's, or that of the checkpoint."""
    lora: Lora | None
    """None: as the checkpoint was, or the server's file says."""
    optimizer_config: Optimizer = Optimizer()
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    path: str | None = None
    optimizer: bool = False


class UnloadModel(Message):
    """Free what a model takes, saved before if `save`."""

    model: str
    save: bool = True


class Pass(Message):
    """Forward, and backward unless `forward_only`: gradients add up until a step."""

    model: str
    data: tuple[Datum, ...]
    loss: Loss
    params: dict[str, float] = field(default_factory=dict[str, float])
    forward_only: bool = False
    per: Per = "sum"


class Step(Message):
    """One step of the optimizer along the gathered gradients, which are gone then."""

    model: str
    adam: Adam
    sync: "SyncWeights | None" = None
    """Send the weights that it made to the owner's inference servers, where there are any."""


class DropGradients(Message):
    """Forget the gradients that were gathered since the last step."""

    model: str


class SaveState(Message):
    """Save what training goes on from; `name` None: named by the time."""

    model: str
    name: str | None = None
    overwrite: bool = False
    ttl_seconds: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class LoadState(Message):
    """Go on from the checkpoint at `path`, with the optimizer's states if `optimizer`."""

    model: str
    path: str
    optimizer: bool = True


class SaveSampler(Message):
    """Save what is sampled from, as a folder of PEFT's, or a whole model where all weights are
    trained. `session` and `number` given: make a sampler of it, too. `keep` False: it need not
    outlive the sampler."""

    model: str
    name: str | None = None
    session: str | None = None
    number: int | None = None
    ttl_seconds: float | None = None
    keep: bool = True
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class SyncWeights(Message):
    """Send the model's weights to the endpoints of `pools` (all, where there are none)."""

    model: str
    master_address: str = ""
    master_port: int = 0
    group_name: str = "weight_sync_group"
    buffer_size_mb: int = 1024
    flush_cache: bool = False
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    weight_version: str | None = None
    quantization: Quantization | None = None
    pools: tuple[str, ...] = ()


# Works of samplers, in the order that they come, when no model waits longer.


class CreateSampler(Message):
    """Name what is sampled from: the checkpoint at `path`, or the base model."""

    session: str
    number: int
    base_model: str | None = None
    path: str | None = None


class SamplerOf(Message):
    """What a sampler samples from."""

    sampler: str


class Sample(Message):
    """Draw after a prompt; `sampler` or `path` or neither (the base model) say from what."""

    prompt: Array
    """int32 [T]."""
    sampling: Sampling
    count: int = 1
    sampler: str | None = None
    path: str | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


# Works of what is kept, answered at once.


class ModelOf(Message):
    """What there is to tell of a model."""

    model: str


class ListRuns(Message):
    """A page of the owner's models, the newest first."""

    limit: int = 20
    offset: int = 0


class ListCheckpoints(Message):
    """Of one model, or of all that the owner has."""

    model: str | None = None


class DeleteCheckpoint(Message):
    """Delete what was saved of a model by this name, as in Checkpoint."""

    model: str
    name: str


class KeepCheckpoint(Message):
    """Change until when it is kept (None: for ever), or whether others may read it."""

    model: str
    name: str
    ttl_seconds: float | None = None
    public: bool | None = None
    """None: as it is, and `ttl_seconds` counts; else `ttl_seconds` does not."""


class WeightsOf(Message):
    """What the checkpoint at a path is of."""

    path: str


# Works of inference endpoints.


class AddEndpoint(Message):
    """Name an inference server that weights are sent to. It is asked how many ranks it has."""

    endpoint: Endpoint
    is_sized: bool = True
    """Whether a client said `world_size`; if not, what the server says of itself counts."""
    api_key: Secret | None = None
    """What the server asks of its own clients."""


class RemoveEndpoint(Message):
    """Send it no more weights."""

    host: str
    port: int


class ListEndpoints(Message):
    """Those that weights are sent to."""


Ordered = (
    CreateModel
    | UnloadModel
    | Pass
    | Step
    | DropGradients
    | SaveState
    | LoadState
    | SaveSampler
    | SyncWeights
)
"""Works of one model."""

Immediate = (
    CreateSession
    | Heartbeat
    | EndSession
    | ListSessions
    | SessionOf
    | Capabilities
    | CreateSampler
    | SamplerOf
    | ModelOf
    | ListRuns
    | ListCheckpoints
    | DeleteCheckpoint
    | KeepCheckpoint
    | WeightsOf
    | RemoveEndpoint
    | ListEndpoints
)
"""Works that no worker is needed for."""

Work = Ordered | Immediate | Sample | AddEndpoint
