"""The numbers that fix a decoder: every tensor's shape and every constant of its mathematics."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from penstock.core.errors import ConfigError

COUNTS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
EXPERT_COUNTS = ("num_experts", "experts_per_token", "width", "num_groups", "groups_per_token")

BY_DOCUMENT = ("dynamic", "longrope")
"""Kinds of rotary embedding whose frequencies follow from the length of a document: of its own, so
that it is computed among others as alone."""

Scoring = Literal["softmax", "sigmoid"]
RotaryPairs = Literal["halves", "neighbours"]
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]
"""`relu2` is the square of ReLU. Networks without a gate alone have the last two."""
Norm = Literal["rms", "layer", "layer_1p"]
"""RMSNorm; LayerNorm, with a bias; LayerNorm that multiplies by 1 + its weight."""


@dataclass(frozen=True)
class ExpertNames:
    """What a checkpoint calls the parts of a layer with experts, below the layer's own name."""

    block: str = "mlp"
    """The module with the router and the experts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    """The three matrices of an expert, within `experts.<number>`."""
    selection_bias: str = "gate.e_score_correction_bias"
    router: str = "gate"
    """What scores the experts."""


@dataclass(frozen=True)
class TensorNames:
    """What a checkpoint calls the parts of a decoder without experts."""

    trunk: str = "model"
    norm: str = "norm"
    """The last one."""
    attention_norm: str = "input_layernorm"
    network_norm: str = "post_attention_layernorm"
    o_proj: str = "self_attn.o_proj"
    up_proj: str = "mlp.up_proj"
    down_proj: str = "mlp.down_proj"

    @property
    def embedding(self) -> str:
        """The table of tokens."""
        return f"{self.trunk}.embed_tokens.weight"

    @property
    def positions(self) -> str:
        """The table of positions, where one is learned."""
        return f"{self.trunk}.embed_positions.weight"


@dataclass(frozen=True)
class LearnedPositions:
    """A table that is added to embeddings; queries and keys are then not turned."""

    rows: int
    first: int
    """The row of a document's first token."""


@dataclass(frozen=True)
class ClampedGate:
    """Experts as gpt-oss has them: `clamp(gate) * sigmoid(alpha * clamp(gate)) * (clamp(up) + 1)`
    for the activation, biases on all their matrices, and these in tensors of all experts together,
    [inputs, outputs] each, the features of gate and up by turns."""

    alpha: float
    limit: float
    """Gates are at most this, and what they gate is between it and its negative."""

    def __post_init__(self) -> None:
        """Refuse what is no number."""
        _require_numbers(self)


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of a decoder's sparse layers, and how each token chooses among them."""

    layers: tuple[int, ...]
    """The numbers of the layers that have experts; the others have one feed-forward network."""
    num_experts: int
    experts_per_token: int
    width: int
    """Features of each expert."""
    shared_width: int = 0
    """Features of the experts that every token goes to, which are one network; 0: none."""
    scoring: Scoring = "softmax"
    """`softmax` over all experts, or each expert's own `sigmoid`."""
    normalised: bool = True
    """Whether the weights of a token's experts are divided by their sum."""
    num_groups: int = 1
    groups_per_token: int = 1
    """Experts lie in `num_groups` runs of equal length, and a token chooses among the experts of
    its best `groups_per_token`, judged by each group's two best experts."""
    scale: float = 1.0
    """What the weights are multiplied by at last."""
    router_bias: bool = False
    """Whether experts' scores have a bias, which counts for choosing and for the weights."""
    selection_bias: tuple[int, ...] = ()
    """Shape of what is added to the scores for choosing, and not to the weights; none if empty."""
    exact_router: bool = False
    """Whether checkpoints keep the router's weights in fp32, whatever the others are in."""
    balance: float = 0.0
    """What the load-balancing loss is multiplied by where no setting says it."""
    clamped: ClampedGate | None = None
    """None: `silu(gate) * up`, without biases, in a tensor for each matrix of each expert."""
    names: ExpertNames = field(default_factory=ExpertNames)

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit one another."""
        _require_numbers(self)
        for name in EXPERT_COUNTS:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise _misfit(f"{name} is {getattr(self, name)!r}; it is a count of 1 or more")
        if self.num_experts % self.num_groups:
            raise _misfit(
                f"{self.num_experts} experts are not a multiple of their groups ({self.num_groups})"
            )
        if self.groups_per_token > self.num_groups:
            raise _misfit(
                f"a token chooses {self.groups_per_token} of {self.num_groups} groups of experts"
            )
        among = self.num_experts // self.num_groups * self.groups_per_token
        if self.experts_per_token > among:
            raise _misfit(f"a token chooses {self.experts_per_token} of {among} experts")
        if self.num_groups > 1 and self.num_experts // self.num_groups < 2:
            raise _misfit(
                f"{self.num_groups} groups of {self.num_experts} experts have one each, and groups "
                "are judged by their two best"
            )


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder-only transformer. Names are those of Hugging Face's config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    norm: Norm = "rms"
    """Of the residual stream; queries and keys have RMSNorm."""
    rms_norm_eps: float = 1e-6
    """What is added to the variance, or to the mean square, in either kind of norm."""
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0}
    )
    """As transformers 5 writes them: rope_type, rope_theta and what the type needs."""
    learned_positions: LearnedPositions | None = None
    """None: positions are rotary."""
    rope_pairs: RotaryPairs = "halves"
    """Which features are turned together: each with the one half a head further on, or each two
    neighbours. Neighbours are turned in fp32, as the one family that has them was trained."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    """Whether the projections into attention have a bias."""
    o_bias: bool = False
    """Whether the projection out of attention has a bias."""
    mlp_bias: bool = False
    gated: bool = True
    """Whether feed-forward networks are `down(act(gate(x)) * up(x))`, else `down(act(up(x)))`."""
    activation: Activation = "silu"
    """Of a feed-forward network: GELU exactly, or by its tanh approximation."""
    qk_norm: bool = False
    """Whether queries and keys are normalised head by head."""
    attention_sinks: bool = False
    """Whether each query head has a learned score of its own beside those of the keys."""
    sliding_window: int | None = None
    """Of `sliding_layers`: how many tokens one sees, itself and those just before it."""
    sliding_layers: tuple[int, ...] = ()
    """The numbers of the layers whose attention sees a window; the others' sees all of the past."""
    initializer_range: float = 0.02
    experts: ExpertsConfig | None = None
    names: TensorNames = field(default_factory=TensorNames)

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit one another."""
        _require_numbers(self)
        for name in COUNTS:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise _misfit(f"{name} is {getattr(self, name)!r}; it is a count of 1 or more")
        if self.num_attention_heads % self.num_key_value_heads:
            raise _misfit(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of its "
                f"num_key_value_heads ({self.num_key_value_heads})"
            )
        if self.rotary_dim % 2 or not self.rotary_dim:
            share = "" if self.rotary_dim == self.head_dim else f", of which {self.rotary_dim} turn"
            raise _misfit(
                f"head_dim is {self.head_dim}{share}; rotary embedding turns features in pairs, "
                "which wants an even number of them"
            )
        for factors in ("short_factor", "long_factor"):
            count = len(self.rope_parameters.get(factors) or ())
            if self.rope_parameters["rope_type"] == "longrope" and count != self.rotary_dim // 2:
                raise _misfit(
                    f"{factors} (rope_parameters) has {count} numbers, and {self.rotary_dim // 2} "
                    "pairs of features turn"
                )
        if self.sliding_layers and (self.sliding_window is None or self.sliding_window < 1):
            raise _misfit(
                f"sliding_window is {self.sliding_window}, and {len(self.sliding_layers)} layers "
                "slide it; it is a count of tokens, 1 or more"
            )

    @property
    def rotary_dim(self) -> int:
        """Features of each head, from the first on, that rotary embedding turns."""
        return int(self.head_dim * self.rope_parameters.get("partial_rotary_factor", 1.0))

    @property
    def rope_invariant_up_to(self) -> float:
        """Tokens of a document up to which its length has no say in how its positions are turned;
        infinite where it never has."""
        if self.rope_parameters["rope_type"] == "dynamic":
            return self.max_position_embeddings
        if self.rope_parameters["rope_type"] == "longrope":
            return self.rope_parameters["original_max_position_embeddings"]
        return math.inf

    @property
    def qkv_parts(self) -> Mapping[str, int]:
        """Output features of the three projections into attention, in the order they are fused."""
        return {
            "q_proj": self.num_attention_heads * self.head_dim,
            "k_proj": self.num_key_value_heads * self.head_dim,
            "v_proj": self.num_key_value_heads * self.head_dim,
        }

    def layer_window(self, layer: int) -> int | None:
        """How many tokens one sees in the layer with this number; None where it sees all."""
        return self.sliding_window if layer in self.sliding_layers else None

    def experts_of(self, layer: int) -> ExpertsConfig | None:
        """The experts of the layer with this number; None where it has one network."""
        return self.experts if self.experts and layer in self.experts.layers else None


def _require_numbers(config: Any) -> None:
    """Raise ConfigError for fields that are to be numbers, and are not."""
    for one in fields(config):
        value = getattr(config, one.name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if one.type is float and not is_number:
            raise _misfit(f"{one.name} is {value!r}, which is no number")


def _misfit(fault: str) -> ConfigError:
    return ConfigError(
        f"the model's {fault}. Correct the config.json that model.config_path names."
    )
