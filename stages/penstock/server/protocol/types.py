"""What the messages of the server are made of. No torch, and nothing of HTTP."""

from typing import Literal, dataclass_transform

import msgspec
import numpy as np
import numpy.typing as npt

DType = Literal["float32", "int64", "int32"]
"""Of what numbers travel in, as numpy names them; little-endian."""

Loss = Literal[
    "cross_entropy",
    "importance_sampling",
    "ppo",
    "cispo",
    "dro",
    "gspo",
    "drgrpo",
]
"""What a pass computes of each token's log-probability."""

Per = Literal["sum", "token"]
"""Whether gradients are of the sum of losses, or the optimizer's step divides them by the number of
trained tokens that they were gathered over."""


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Value(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Part of a message."""


class Array(Value):
    """Numbers and their shape."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, numbers: npt.ArrayLike, dtype: DType) -> "Array":
        """A copy of the numbers, in this type."""
        array = np.ascontiguousarray(numbers, dtype=np.dtype(dtype).newbyteorder("<"))
        return cls(dtype=dtype, shape=array.shape, data=array.tobytes())

    def numpy(self) -> npt.NDArray[np.generic]:
        """The numbers, read-only. Raises ValueError where they do not fill the shape."""
        return np.frombuffer(self.data, np.dtype(self.dtype).newbyteorder("<")).reshape(self.shape)


class Datum(Value):
    """One sample of a client's: T tokens, and for each of them what the loss takes.

    `inputs` are [T] each: `target_tokens` (already shifted: the target of token t stands at t),
    and by the loss `weights`, `logprobs`, `advantages`, `mask`. Where tokens have K targets each,
    which losses of SEVERAL_TARGETS take, all of them are [T, K].
    """

    tokens: Array
    inputs: dict[str, Array]


class Lora(Value):
    """What a session asks for its adapter."""

    rank: int
    alpha: float | None = None
    """None: what the server's file says."""
    seed: int | None = None
    train_attn: bool | None = None
    train_mlp: bool | None = None
    train_unembed: bool | None = None
    """Whether layers of these kinds learn; None: where the server's file has them bear adapters.
    True where none of a kind does is refused."""


class Optimizer(Value):
    """What steps a session's weights; None: what the server's file says."""

    kind: Literal["adamw", "anyprecision_adamw", "sgd", "muon"] | None = None
    dtype: Literal["fp32", "bf16"] | None = None
    """Of its states, where it keeps them in another than the weights'."""
    kwargs: dict[str, float | bool | str] = {}


class Adam(Value):
    """The numbers of one step."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0
    """0: nothing is clipped."""


class Sampling(Value):
    """How tokens are drawn."""

    max_tokens: int | None = None
    """None: until the model's context is full."""
    temperature: float = 1.0
    top_k: int = -1
    """-1: all of the vocabulary."""
    top_p: float = 1.0
    seed: int | None = None
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()
    """Decoded by the worker's tokenizer."""
    ignore_eos: bool = False
    """Whether also the tokens that end a text of the model's stop nothing."""


class Sequence(Value):
    """What was drawn after one prompt."""

    stop_reason: Literal["stop", "length"]
    tokens: Array
    """int32 [n], the token that stopped it included."""
    logprobs: Array
    """float32 [n]: of each token as the model has it, at temperature 1."""
    topk_tokens: Array | None = None
    """int32 [n, k]: the likeliest in the place of each token."""
    topk_logprobs: Array | None = None
    """float32 [n, k]."""


class Checkpoint(Value):
    """One that is kept."""

    name: str
    """`weights/<name>` or `sampler_weights/<name>`, within its model."""
    model: str
    kind: Literal["training", "sampler"]
    time: float
    """Seconds since the epoch."""
    size: int
    """Bytes."""
    expires: float | None = None
    """Seconds since the epoch; None: never."""
    public: bool = False
    user_metadata: dict[str, str] = {}


class Run(Value):
    """A model that is trained, or was."""

    model: str
    session: str
    base_model: str
    rank: int | None
    """None: all weights are trained."""
    last_request: float
    """Seconds since the epoch."""
    is_open: bool = True
    """Whether it can be trained now; otherwise it was unloaded."""
    corrupted: bool = False
    """Whether what a client last saw of it was lost with the workers."""
    user_metadata: dict[str, str] = {}
    last_checkpoint: Checkpoint | None = None
    last_sampler_checkpoint: Checkpoint | None = None


class Endpoint(Value):
    """An inference server that is sent weights."""

    host: str
    port: int
    world_size: int = 1
    """Ranks that receive: its tensor-parallel size."""
    pool: str = "default"


class Secret(Value):
    """What no log, error or answer may show."""

    text: str

    def __repr__(self) -> str:
        return "Secret(...)"


Quantization = dict[str, str | int | float | bool | tuple[int, ...]]
"""The form that weights are sent in, in the words of a checkpoint's `quantization_config`."""
