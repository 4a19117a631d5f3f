"""Results of requests, sent from the scheduler to the API."""

from typing import Literal

from msgspec import field

from penstock.server.protocol.codec import Message
from penstock.server.protocol.types import (
    Array,
    Checkpoint,
    Endpoint,
    LoraConfig,
    ModelInfo,
    SampledSequence,
)


class Done(Message):
    """An empty result."""


class HeartbeatResult(Message):
    """Result of Heartbeat: sessions that do not exist, are of another owner, or have ended."""

    sessions: tuple[str, ...] = ()


class CreateSessionResult(Message):
    """Result of CreateSession."""

    session: str
    notice: str = ""  # As in ServedModel


class ListSessionsResult(Message):
    """Result of ListSessions."""

    sessions: tuple[str, ...]


class SessionResult(Message):
    """Result of GetSession."""

    session: str
    models: tuple[str, ...]
    samplers: tuple[str, ...]
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class ServedModel(Message):
    """Result of GetCapabilities: the served base model and its limits."""

    base_model: str
    tokenizer: str
    arch: str
    max_context: int
    trains: Literal["adapters", "all weights"]
    max_rank: int
    samples: bool
    vocab_size: int | None = None  # Vocabulary size; None: unknown
    image_token_id: int | None = None
    """The token that takes a feature of an image; None: samples have no images."""
    notice: str = ""  # Notice about the model for clients that create a session


class CreateModelResult(Message):
    """Result of CreateModel and LoadState."""

    model: str


class ModelResult(Message):
    """Result of GetModel."""

    info: ModelInfo
    served: ServedModel
    pending: int  # Number of unanswered requests


class ForwardBackwardResult(Message):
    """Outputs of each datum by name, in the shape of its targets, [T] or [T, K]; and metrics."""

    outputs: tuple[dict[str, Array], ...]
    metrics: dict[str, float]  # May be non-finite


class OptimStepResult(Message):
    """Result of OptimStep: `grad_norm`, `learning_rate`, `step` and other metrics."""

    metrics: dict[str, float]


class SaveResult(Message):
    """Result of SaveState and SaveSamplerWeights."""

    model: str
    name: str  # As in Checkpoint
    sampler: str | None = None


class SamplerResult(Message):
    """Result of CreateSampler and GetSampler."""

    sampler: str
    base_model: str
    path: str | None


class SampleResult(Message):
    """Result of Sample: one sequence per requested completion."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: Array | None = None
    """float32 [T]; NaN for the first token, which has no logprob."""
    topk_prompt_tokens: Array | None = None  # int32 [T, k]
    topk_prompt_logprobs: Array | None = None  # float32 [T, k]


class ListModelsResult(Message):
    """Result of ListModels."""

    models: tuple[ModelInfo, ...]
    total: int


class ListCheckpointsResult(Message):
    """Result of ListCheckpoints."""

    checkpoints: tuple[Checkpoint, ...]


class CheckpointResult(Message):
    """Result of GetCheckpoint."""

    base_model: str
    lora: LoraConfig | None  # None: full fine-tuning
    checkpoint: Checkpoint


class EndpointsResult(Message):
    """Result of AddEndpoint, RemoveEndpoint and ListEndpoints."""

    endpoints: tuple[Endpoint, ...]


class SyncWeightsResult(Message):
    """Result of SyncWeights."""

    num_parameters: int
    total_bytes: int
    num_buckets: int
    seconds: float
    endpoints: tuple[Endpoint, ...]


Result = (
    Done
    | HeartbeatResult
    | CreateSessionResult
    | ListSessionsResult
    | SessionResult
    | ServedModel
    | CreateModelResult
    | ModelResult
    | ForwardBackwardResult
    | OptimStepResult
    | SaveResult
    | SamplerResult
    | SampleResult
    | ListModelsResult
    | ListCheckpointsResult
    | CheckpointResult
    | EndpointsResult
    | SyncWeightsResult
)
