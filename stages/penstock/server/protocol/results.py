"""What came of a work, as the engine tells it."""

from typing import Literal

from msgspec import field

from penstock.server.protocol.codec import Message
from penstock.server.protocol.types import Array, Checkpoint, Endpoint, Lora, Run, Sequence


class Done(Message):
    """There is nothing to tell."""


class Gone(Message):
    """Of Heartbeat: which of those sessions are not there, are another's, or have ended."""

    sessions: tuple[str, ...] = ()


class SessionMade(Message):
    """Of CreateSession."""

    session: str
    notice: str = ""
    """As in Served."""


class Sessions(Message):
    """Of ListSessions."""

    sessions: tuple[str, ...]


class SessionResult(Message):
    """Of SessionOf."""

    session: str
    models: tuple[str, ...]
    samplers: tuple[str, ...]
    user_metadata: dict[str, str] = field(default_factory=dict[str, str])


class Served(Message):
    """What can be trained and sampled from."""

    base_model: str
    tokenizer: str
    arch: str
    max_context: int
    trains: Literal["adapters", "all weights"]
    max_rank: int
    samples: bool
    vocab_size: int | None = None
    """Tokens are below it; None: not known."""
    notice: str = ""
    """What whoever begins a session is to know of the model."""


class ModelMade(Message):
    """Of CreateModel."""

    model: str


class ModelResult(Message):
    """Of ModelOf."""

    run: Run
    served: Served
    pending: int
    """Asks that have not been answered."""


class Passed(Message):
    """For each datum its outputs by name, [T] each, or [T, K] as its targets are; and numbers about
    all of them."""

    outputs: tuple[dict[str, Array], ...]
    metrics: dict[str, float]
    """Not finite where the numbers are: never hidden."""


class Stepped(Message):
    """Of Step: `grad_norm`, `learning_rate`, `step` and what else there is to tell."""

    metrics: dict[str, float]


class Saved(Message):
    """Of SaveState and SaveSampler."""

    model: str
    name: str
    """As in Checkpoint."""
    sampler: str | None = None


class Loaded(Message):
    """Of LoadState."""

    model: str
    name: str


class SamplerResult(Message):
    """Of CreateSampler and SamplerOf."""

    sampler: str
    base_model: str
    path: str | None


class Sampled(Message):
    """Of Sample: one sequence for each that was asked for."""

    sequences: tuple[Sequence, ...]
    prompt_logprobs: Array | None = None
    """float32 [T]; of the first token there is none, which is NaN."""
    topk_prompt_tokens: Array | None = None
    """int32 [T, k]."""
    topk_prompt_logprobs: Array | None = None
    """float32 [T, k]."""


class Runs(Message):
    """Of ListRuns."""

    runs: tuple[Run, ...]
    total: int


class CheckpointsResult(Message):
    """Of ListCheckpoints."""

    checkpoints: tuple[Checkpoint, ...]


class WeightsResult(Message):
    """Of WeightsOf."""

    base_model: str
    lora: Lora | None
    """None: all weights."""
    checkpoint: Checkpoint


class Endpoints(Message):
    """Of AddEndpoint, RemoveEndpoint and ListEndpoints."""

    endpoints: tuple[Endpoint, ...]


class Synced(Message):
    """Of SyncWeights."""

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
