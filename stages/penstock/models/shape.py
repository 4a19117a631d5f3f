"""The numbers that fix a decoder: every tensor's shape and every constant of its mathematics."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

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
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] = field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10_000.0}
    )
    """As transformers 5 writes them: rope_type, rope_theta and what the type needs."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    """Whether the projections into attention have a bias."""
    o_bias: bool = False
    """Whether the projection out of attention has a bias."""
    mlp_bias: bool = False
    qk_norm: bool = False
    """Whether queries and keys are normalised head by head."""
    initializer_range: float = 0.02

    def __post_init__(self) -> None:
        """Refuse numbers that do not fit one another."""
        for name in COUNTS:
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"the model's {name} is {getattr(self, name)}; it is a count of 1 or more. "
                    "Correct the config.json that model.config_path names."
                )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"the model's num_attention_heads ({self.num_attention_heads}) is not a multiple "
                f"of its num_key_value_heads ({self.num_key_value_heads}). "
                "Correct the config.json that model.config_path names."
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"the model's head_dim is {self.head_dim}; rotary embedding turns features in "
                "pairs. Give an even head_dim in the config.json that model.config_path names."
            )

    @property
    def qkv_parts(self) -> Mapping[str, int]:
        """Output features of the three projections into attention, in the order they are fused."""
        return {
            "q_proj": self.num_attention_heads * self.head_dim,
            "k_proj": self.num_key_value_heads * self.head_dim,
            "v_proj": self.num_key_value_heads * self.head_dim,
        }
