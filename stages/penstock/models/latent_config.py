"""Hyperparameters of multi-head latent attention. No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.models.state_layer_config import config_error, require_sizes

# Names in config.json.
FIELDS: Mapping[str, str] = {
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope_dim": "qk_nope_head_dim",
    "rope_dim": "qk_rope_head_dim",
    "v_dim": "v_head_dim",
}

INDEXER_FIELDS: Mapping[str, str] = {
    "heads": "index_n_heads",
    "head_dim": "index_head_dim",
    "top_k": "index_topk",
}
"""Those of the indexer."""


@dataclass(frozen=True)
class IndexerConfig:
    """The lightning indexer of DeepSeek Sparse Attention (DeepSeek-AI 2025, "DeepSeek-V3.2",
    section 2.1), which selects the tokens that a token attends to."""

    heads: int
    """Heads, which share one key (index_n_heads)."""
    head_dim: int
    """Features of a head's query and of the key (index_head_dim). The first are those with RoPE."""
    top_k: int
    """Tokens that each token attends to, at most (index_topk)."""
    rope_pairs: Literal["halves", "neighbours"]
    """Which features RoPE rotates together; as in attention, or halves."""

    def __post_init__(self) -> None:
        require_sizes(self, INDEXER_FIELDS)


@dataclass(frozen=True)
class LatentAttentionConfig:
    """Multi-head latent attention (MLA; DeepSeek-AI 2024, "DeepSeek-V2", section 2.1): keys and
    values of all heads are projections of one small latent vector per token, and RoPE is applied
    to features of their own, whose key all heads share."""

    q_rank: int | None
    """Size of the latent vector of queries (q_lora_rank); None: queries are projected directly."""
    kv_rank: int
    """Size of the latent vector of keys and values (kv_lora_rank)."""
    nope_dim: int
    """Features of a head's queries and keys without RoPE (qk_nope_head_dim)."""
    rope_dim: int
    """Features with RoPE, after the others (qk_rope_head_dim)."""
    v_dim: int
    """Features of a head's values (v_head_dim)."""
    bias: bool = False
    """Whether q_a_proj, kv_a_proj_with_mqa and o_proj have biases."""
    norm_eps: float = 1e-6
    """Epsilon of the norms of latent vectors. Transformers has the same in all families, whatever
    rms_norm_eps is."""
    indexer: IndexerConfig | None = None
    """Sparse attention; None: tokens attend to all earlier ones."""

    def __post_init__(self) -> None:
        # Queries may have no latent vector.
        optional = {"q_rank"} if self.q_rank is None else set[str]()
        require_sizes(self, {name: FIELDS[name] for name in FIELDS if name not in optional})
        if self.rope_dim % 2:
            raise config_error(
                f"qk_rope_head_dim is {self.rope_dim}; RoPE rotates features in pairs, so their "
                "number must be even"
            )
        if self.indexer is None:
            return
        if self.q_rank is None:
            raise config_error(
                "q_lora_rank is null; the indexer's queries are projected from the latent vector "
                "of queries"
            )
        if self.indexer.head_dim < self.rope_dim:
            raise config_error(
                f"index_head_dim is {self.indexer.head_dim}, and RoPE rotates {self.rope_dim} of "
                "its features (qk_rope_head_dim)"
            )

    @property
    def qk_dim(self) -> int:
        """Features of a head's queries and keys."""
        return self.nope_dim + self.rope_dim

    @property
    def padded_dim(self) -> int:
        """Features of a head in attention, where queries, keys and values are equally wide."""
        return max(self.qk_dim, self.v_dim)

    @property
    def cached_dim(self) -> int:
        """Numbers that the KV cache has of a token, for all heads."""
        index_key = self.indexer.head_dim if self.indexer else 0
        return self.kv_rank + self.rope_dim + index_key

    def head_features(self, layer: str) -> int:
        """Features of one head in a linear layer that is split by heads, by the last part of its
        name: outputs, or inputs of o_proj."""
        features = {"kv_b_proj": self.nope_dim + self.v_dim, "o_proj": self.v_dim}
        return features.get(layer, self.qk_dim)

    def shapes(self, width: int, heads: int) -> Mapping[str, tuple[int, ...]]:
        """The shape of each parameter of a layer, in order, for a hidden size and a number of
        heads."""
        shapes: dict[str, tuple[int, ...]] = {}

        def linear(name: str, outputs: int, inputs: int, *, biased: bool = False) -> None:
            shapes[f"{name}.weight"] = (outputs, inputs)
            if biased:
                shapes[f"{name}.bias"] = (outputs,)

        if self.q_rank is None:
            linear("q_proj", heads * self.qk_dim, width)
        else:
            linear("q_a_proj", self.q_rank, width, biased=self.bias)
            shapes["q_a_layernorm.weight"] = (self.q_rank,)
            linear("q_b_proj", heads * self.qk_dim, self.q_rank)
        linear("kv_a_proj_with_mqa", self.kv_rank + self.rope_dim, width, biased=self.bias)
        shapes["kv_a_layernorm.weight"] = (self.kv_rank,)
        linear("kv_b_proj", heads * self.head_features("kv_b_proj"), self.kv_rank)
        linear("o_proj", width, heads * self.v_dim, biased=self.bias)
        if (indexer := self.indexer) and self.q_rank is not None:
            linear("indexer.wq_b", indexer.heads * indexer.head_dim, self.q_rank)
            linear("indexer.wk", indexer.head_dim, width)
            shapes["indexer.k_norm.weight"] = shapes["indexer.k_norm.bias"] = (indexer.head_dim,)
            linear("indexer.weights_proj", indexer.heads, width)
        return shapes
