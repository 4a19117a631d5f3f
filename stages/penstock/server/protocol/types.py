"""Common types of the server's messages. No torch and no HTTP."""

from typing import Any, Literal, dataclass_transform

import msgspec
import numpy as np
import numpy.typing as npt

MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,127}"  # Of sessions and samplers, too
CHECKPOINT_NAME = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}"

DType = Literal["float32", "int64", "int32"]  # Wire dtype, by numpy name; little-endian

Loss = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo", "drgrpo"]
"""The loss of a forward-backward pass."""

LossReduction = Literal["sum", "token"]
"""Gradient normalization: of the summed loss, or divided at the optimizer step by the number of
trained tokens."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a message."""


def common_fields(source: object, kind: type[msgspec.Struct]) -> dict[str, Any]:
    """The values of `source` for those fields of `kind` that it has, too."""
    return {name: getattr(source, name) for name in kind.__struct_fields__ if hasattr(source, name)}


class Array(Value):
    """Values and their shape."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, numbers: npt.ArrayLike, dtype: DType) -> "Array":
        array = np.ascontiguousarray(numbers, dtype=np.dtype(dtype).newbyteorder("<"))
        return cls(dtype=dtype, shape=array.shape, data=array.tobytes())

    def numpy(self) -> npt.NDArray[np.generic]:
        """The values, read-only. Raises ValueError if they do not match the shape."""
        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class Datum(Value):
    """A client's sample: T tokens, and per-token loss inputs.

    `inputs` are [T] each: `target_tokens` (already shifted: the target of token t is at t), and
    depending on the loss `weights`, `logprobs`, `advantages`, `mask`. With K targets per token, for
    losses in SEVERAL_TARGETS, all of them are [T, K].
    """

    tokens: Array
    inputs: dict[str, Array]
    images: tuple[int, ...] = ()
    """Its images, in the order of their tokens: indices among those of the request."""


class LoraConfig(Value):
    """LoRA config of a model."""

    rank: int
    alpha: float | None = None  # None: as in the server config
    seed: int | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None
    """Whether layers of these kinds are trained; None: if the server config has adapters for them.
    True is rejected if none of a kind has adapters."""


class OptimizerConfig(Value):
    """Optimizer of a model; None: as in the server config."""

    kind: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] | None = None
    dtype: Literal["fp32", "bf16"] | None = None
    """The dtype of its states, if different from the weights'."""
    # msgspec copies an empty default, so that structs do not share it.
    kwargs: dict[str, float | bool | str] = {}


class AdamParams(Value):
    """Adam parameters of one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0  # 0: no gradient clipping


class SamplingParams(Value):
    """Sampling parameters."""

    max_tokens: int | None = None  # None: until the context length is reached
    temperature: float = 1.0
    top_k: int = -1  # -1: the whole vocabulary
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    """Stop strings, compared with text decoded by the worker's tokenizer."""
    ignore_eos: bool = False  # Whether end-of-sequence tokens do not stop generation


class SampledSequence(Value):
    """A completion of one prompt."""

    stop_reason: Literal["stop", "length"]
    tokens: Array  # int32 [n], including the token that stopped it
    logprobs: Array  # float32 [n]: logprobs of each token at temperature 1
    topk_tokens: Array | None = None  # int32 [n, k]: the top-k tokens at each position
    topk_logprobs: Array | None = None  # float32 [n, k]


class Checkpoint(Value):
    """A stored checkpoint."""

    name: str  # `weights/<name>` or `sampler_weights/<name>`, relative to its model
    model: str
    kind: Literal["training", "sampler"]
    time: float  # Seconds since the epoch
    size: int  # Bytes
    expires: float | None = None  # Seconds since the epoch; None: never
    public: bool = False
    user_metadata: dict[str, str] = {}


class ModelInfo(Value):
    """A model that is or was trained."""

    model: str
    base_model: str
    rank: int | None  # LoRA rank; None: full fine-tuning
    last_request: float  # Seconds since the epoch
    is_open: bool = True  # Whether it is loaded; otherwise it was unloaded
    corrupted: bool = False  # Whether state that a client has seen was lost with the workers
    user_metadata: dict[str, str] = {}
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None


class Endpoint(Value):
    """An inference server that receives weights."""

    host: str
    port: int
    world_size: int = 1  # Number of receiving ranks: its tensor parallel size
    pool: str = "default"

    @property
    def address(self) -> str:
        """Its host and port, with brackets for an IPv6 address."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class Secret(Value):
    """A value that must not appear in logs, errors and responses."""

    text: str

    def __repr__(self) -> str:
        return "Secret(...)"


Quantization = dict[str, str | int | float | bool | tuple[int, ...]]
"""Weight format, with the keys of a checkpoint's `quantization_config`."""
