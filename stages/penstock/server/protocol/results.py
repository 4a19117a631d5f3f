"""Results of requests, sent from the scheduler to the API."""

from typing import Literal

from msgspec import field

from penstock.server.protocol.codec import Message
from penstock.server.protocol.types import Array, Checkpoint, Endpoint, Lora, Run, Sequence


class Done(Message):
    """An empty result."""


class Gone(Message):
    """Result of Heartbeat: those sessions that do not exist, belong to another owner, or have
    ended."""

    sessions: tuple[str, ...] = ()


class SessionMade(Message):
    """Result of CreateSession."""

    session: str
    notice: str = ""
    """As in Served."""


class Sessions(Message):
    """Result of ListSessions."""

    sessions: tuple[str, ...]


class SessionResult(Message):
    """Result of SessionOf."""

    session: str
    models: tuple[str, ...]
    samplers: tuple[str, ...]
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class Served(Message):
    """The served base model and its limits."""

    base_model: str
    tokenizer: str
    arch: str
    max_context: int
    trains: Literal["adapters", "all weights"]
    max_rank: int
    samples: bool
    vocab_size: int | None = None
    """Vocabulary size; None: unknown."""
    notice: str = ""
    """Notice about the model for clients that create a session."""


class ModelMade(Message):
    """Result of CreateModel."""

    model: str


class ModelResult(Message):
    """Result of ModelOf."""

    run: Run
    served: Served
    pending: int
    """Number of unanswered requests."""


class Passed(Message):
    """Outputs by name for each datum, [T] each, or [T, K] in the shape of its targets; and metrics
    over all of them."""

    outputs: tuple[dict[str, Array], ...]
    metrics: dict[str, float]
    """May be non-finite."""


class Stepped(Message):
    """Result of Step: `grad_norm`, `learning_rate`, `step` and other metrics."""

    metrics: dict[str, float]


class Saved(Message):
    """Result of SaveState and SaveSampler."""

    model: str
    name: str
    """As in Checkpoint."""
    sampler: str | None = None


class Loaded(Message):
    """Result of LoadState."""

    model: str
    name: str


class SamplerResult(Message):
    """Result of CreateSampler and SamplerOf."""

    sampler: str
    base_model: str
    path: str | None


class Sampled(Message):
    """Result of Sample: one sequence per requested completion."""

    sequences: tuple[Sequence, ...]
    prompt_logprobs: Array | None = None
    """float32 [T]; NaN for the first token, which has no logprob."""
    topk_prompt_tokens: Array | None = None
    """int32 [T, k]."""
    topk_prompt_logprobs: Array | None = None
    """float32 [T, k]."""


class Runs(Message):
    """Result of ListRuns."""

    runs: tuple[Run, ...]
    total: int


class CheckpointsResult(Message):
    """Result of ListCheckpoints."""

    checkpoints: tuple[Checkpoint, ...]


class WeightsResult(Message):
    """Result of WeightsOf."""

    base_model: str
    lora: Lora | None
    """None: full fine-tuning."""
    checkpoint: Checkpoint


class Endpoints(Message):
    """Result of AddEndpoint, RemoveEndpoint and ListEndpoints."""

    endpoints: tuple[Endpoint, ...]


class Synced(Message):
    """Result of SyncWeights."""

    num_parameters: int
    total_bytes: int
    num_buckets: int
    seconds: float
    endpoints: tuple[Endpoint, ...]


Result = (
    Done
    | Gone
    | SessionMade
    | Sessions
    | SessionResult
    | Served
    | ModelMade
    | ModelResult
    | Passed
    | Stepped
    | Saved
    | Loaded
    | SamplerResult
    | Sampled
    | Runs
    | CheckpointsResult
    | WeightsResult
    | Endpoints
    | Synced
)
