"""Requests from the API to the scheduler. Requests with a `model` run in the order of their
sequence numbers; all others run immediately."""

from typing import Literal

from msgspec import field

from penstock.server.protocol.codec import Message
from penstock.server.protocol.images import Image
from penstock.server.protocol.types import (
    AdamParams,
    Array,
    Datum,
    Endpoint,
    LoraConfig,
    Loss,
    LossReduction,
    OptimizerConfig,
    Quantization,
    SamplingParams,
    Secret,
)

# Session requests, answered immediately.


class CreateSession(Message):
    """Create a session, which owns a client's models and samplers."""

    session: str | None = None  # None: the scheduler chooses a name
    tags: tuple[str, ...] = ()
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class Heartbeat(Message):
    """Heartbeats of these sessions."""

    sessions: tuple[str, ...]


class EndSession(Message):
    """Save and unload everything in a session."""

    session: str


class ListSessions(Message):
    """List the owner's sessions."""


class GetSession(Message):
    """List the models and samplers of a session."""

    session: str


class GetCapabilities(Message):
    """The served model and its limits."""


# Model requests, run in the order of their sequence numbers.


class ModelConfig(Message):
    """What the workers need to create a model."""

    model: str
    lora: LoraConfig | None  # None: as in the checkpoint, or the server config
    optimizer_config: OptimizerConfig = OptimizerConfig()


class CreateModel(ModelConfig, kw_only=True):
    """Create a model, optionally from the checkpoint at `path`, with its optimizer state or not."""

    session: str
    base_model: str | None  # None: the server's, or that of the checkpoint
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])
    path: str | None = None
    optimizer: bool = False


class UnloadModel(Message):
    """Unload a model, saving it first if `save`."""

    model: str
    save: bool = True


class ForwardBackward(Message):
    """Forward, and backward unless `forward_only`: gradients accumulate until a step."""

    model: str
    data: tuple[Datum, ...]
    loss: Loss
    images: tuple[Image, ...] = ()  # The distinct images of all samples
    params: dict[str, float] = field(default_factory=dict[str, float])
    forward_only: bool = False
    loss_reduction: LossReduction = "sum"


class OptimStep(Message):
    """One optimizer step with the accumulated gradients, which are then zeroed."""

    model: str
    adam: AdamParams
    sync: "SyncWeights | None" = None
    """Sync the new weights to the owner's inference servers, if there are any."""


class ZeroGrad(Message):
    """Zero the gradients accumulated since the last step."""

    model: str


class SaveState(Message):
    """Save a checkpoint for resuming training; `name` None: named by timestamp."""

    model: str
    name: str | None = None
    overwrite: bool = False
    ttl_seconds: float | None = None
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class LoadState(Message):
    """Load the checkpoint at `path`, with optimizer state if `optimizer`."""

    model: str
    path: str
    optimizer: bool = True


class SaveSamplerWeights(Message):
    """Save weights for sampling: a PEFT folder, or a full model for full fine-tuning. With
    `session` and `number`, also creates a sampler. `keep` False: it is deleted with the sampler."""

    model: str
    name: str | None = None
    session: str | None = None
    number: int | None = None
    ttl_seconds: float | None = None
    keep: bool = True
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class WeightSyncOptions(Message):
    """How weights are sent to inference servers."""

    model: str
    master_address: str = ""
    master_port: int = 0
    group_name: str = "weight_sync_group"
    buffer_size_mb: int = 1024
    flush_cache: bool = False
    pause_mode: Literal["retract", "abort", "in_place"] = "retract"
    weight_version: str | None = None
    quantization: Quantization | None = None


class SyncWeights(WeightSyncOptions):
    """Sync the model's weights to the endpoints of `pools` (all, if empty)."""

    pools: tuple[str, ...] = ()


# Sampling requests, run in arrival order, when no model has waited longer.


class CreateSampler(Message):
    """Create a sampler of the checkpoint at `path`, or of the base model."""

    session: str
    number: int
    base_model: str | None = None
    path: str | None = None


class GetSampler(Message):
    """The model of a sampler."""

    sampler: str


class Sample(Message):
    """Sample completions of a prompt; from `sampler`, `path`, or neither (the base model)."""

    prompt: Array  # int32 [T]
    sampling: SamplingParams
    images: tuple[Image, ...] = ()  # Those of the prompt, in the order of their tokens
    count: int = 1
    sampler: str | None = None
    path: str | None = None
    prompt_logprobs: bool = False
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0


# Checkpoint requests, answered immediately.


class GetModel(Message):
    """Metadata of a model."""

    model: str


class ListModels(Message):
    """A page of the owner's models, newest first."""

    limit: int = 20
    offset: int = 0


class ListCheckpoints(Message):
    """List checkpoints of one model, or of all of the owner's."""

    model: str | None = None


class DeleteCheckpoint(Message):
    """Delete a model's checkpoint by name, as in Checkpoint."""

    model: str
    name: str


class UpdateCheckpoint(Message):
    """Change the expiry time (None: never) or visibility of a checkpoint."""

    model: str
    name: str
    ttl_seconds: float | None = None
    public: bool | None = None
    """None: unchanged, and `ttl_seconds` applies; else `ttl_seconds` is ignored."""


class GetCheckpoint(Message):
    """Metadata of the checkpoint at a path."""

    path: str


# Inference endpoint requests.


class AddEndpoint(Message):
    """Register an inference server for weight sync. Its number of ranks is requested from it."""

    endpoint: Endpoint
    is_sized: bool = True
    """Whether the client set `world_size`; if not, the server's own value is used."""
    api_key: Secret | None = None  # The API key of the inference server


class RemoveEndpoint(Message):
    """Unregister an inference server."""

    host: str
    port: int


class ListEndpoints(Message):
    """List the registered inference servers."""


TrainingOperation = (
    ForwardBackward
    | OptimStep
    | ZeroGrad
    | SaveState
    | LoadState
    | SaveSamplerWeights
    | SyncWeights
    | UnloadModel
)
"""Requests for an existing model."""

ModelOperation = CreateModel | TrainingOperation  # Model requests

ImmediateOperation = (
    CreateSession
    | Heartbeat
    | EndSession
    | ListSessions
    | GetSession
    | GetCapabilities
    | CreateSampler
    | GetSampler
    | GetModel
    | ListModels
    | ListCheckpoints
    | DeleteCheckpoint
    | UpdateCheckpoint
    | GetCheckpoint
    | RemoveEndpoint
    | ListEndpoints
)
"""Requests that need no worker."""

Operation = ModelOperation | ImmediateOperation | Sample | AddEndpoint
