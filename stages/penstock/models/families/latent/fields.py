"""Reads what the families with multi-head latent attention (MLA) share in config.json.

Transformers is followed where its code and DeepSeek's differ: norms of latent vectors have an
epsilon of 1e-6 whatever `rms_norm_eps` is, and the factor of scores has YaRN's `mscale_all_dim`
squared (in `modeling_deepseek.py` too; the papers leave it out).
"""

import math
from collections.abc import Iterator
from typing import Any

from penstock.core.errors import ConfigError
from penstock.models.decoder_config import ExpertsConfig, GroupScore, Scoring
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    require_full_rotary,
    rope_parameters,
)
from penstock.models.latent_config import IndexerConfig, LatentAttentionConfig
from penstock.models.tp_roles import DECODER_ROLES, ParallelStyle

ROLES = {
    **DECODER_ROLES,
    "model.layers.*.self_attn.q_a_proj": ParallelStyle.REPLICATED,
    "model.layers.*.self_attn.q_b_proj": ParallelStyle.COLWISE,
    "model.layers.*.self_attn.kv_a_proj_with_mqa": ParallelStyle.REPLICATED,
    "model.layers.*.self_attn.kv_b_proj": ParallelStyle.COLWISE,
}
"""Heads are split; latent vectors are computed on every rank."""

SPARSE = "sparse"
"""A layer with experts, in mlp_layer_types."""

LORA_TARGETS = (
    "q_*proj",
    "kv_a_proj_with_mqa",
    "kv_b_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
)
"""Default LoRA targets: q_proj, or q_a_proj and q_b_proj where queries have a latent vector."""


def latent_attention(
    hf: HfConfig,
    *,
    ranks: tuple[int | None, int],
    head: tuple[int, int, int],
    indexer: IndexerConfig | None = None,
) -> dict[str, Any]:
    """The attention fields of a DecoderConfig. `ranks` are the family's defaults of q_lora_rank and
    kv_lora_rank, `head` those of qk_nope_head_dim, qk_rope_head_dim and v_head_dim."""
    nope, rotated, values = head
    latent = LatentAttentionConfig(
        q_rank=hf.get("q_lora_rank", ranks[0]),
        kv_rank=config_get(hf, "kv_lora_rank", ranks[1]),
        nope_dim=config_get(hf, "qk_nope_head_dim", nope),
        rope_dim=config_get(hf, "qk_rope_head_dim", rotated),
        v_dim=config_get(hf, "v_head_dim", values),
        bias=bool(config_get(hf, "attention_bias", False)),
        indexer=indexer,
    )
    return {
        "num_key_value_heads": config_require(hf, "num_attention_heads"),
        "head_dim": latent.qk_dim,
        "latent": latent,
        "attention_scale": latent.qk_dim**-0.5 * _yarn_factor(hf) ** 2,
        "rope_parameters": require_full_rotary(rope_parameters(hf)),
    }


def rotary_pairs(hf: HfConfig) -> dict[str, Any]:
    """The RoPE convention of a family with `rope_interleave`."""
    interleaved = config_get(hf, "rope_interleave", True)
    return {"rope_pairs": "neighbours" if interleaved else "halves"}


def _yarn_factor(hf: HfConfig) -> float:
    """YaRN's factor of queries and of keys besides that of RoPE, 1 without `mscale_all_dim`."""
    rope_entries = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = rope_entries.get("rope_type", rope_entries.get("type", "default"))
    scale, factor = (
        config_get(rope_entries, "mscale_all_dim", 0),
        config_get(rope_entries, "factor", 1.0),
    )
    if kind == "default" or not scale or factor <= 1:
        return 1.0
    # The attention temperature of Peng et al. 2023, "YaRN", a factor of queries and of keys.
    return 0.1 * scale * math.log(factor) + 1.0


def unsupported_attention(hf: HfConfig) -> Iterator[str]:
    """Settings of config.json that are not computed, in all of these families."""
    heads = config_require(hf, "num_attention_heads")
    keys = config_get(hf, "num_key_value_heads", heads)
    if keys != heads:
        yield (
            f"num_key_value_heads is {keys}; with latent attention it is num_attention_heads "
            f"({heads})"
        )
    head_dim, rotated = hf.get("head_dim"), hf.get("qk_rope_head_dim")
    if head_dim is not None and rotated is not None and head_dim != rotated:
        yield f"head_dim is {head_dim}; with latent attention it is qk_rope_head_dim ({rotated})"


def unsupported_routing(
    hf: HfConfig, *, methods: tuple[str, ...], scoring: Scoring
) -> Iterator[str]:
    """Settings of routing that are not computed. `methods` are the values of `topk_method` that
    are, the family's default first."""
    method = config_get(hf, "topk_method", methods[0])
    if method not in methods:
        yield f"topk_method is {method!r}; {' and '.join(methods)} are computed"
    if (function := config_get(hf, "scoring_func", scoring)) != scoring:
        yield f"scoring_func is {function!r}; {scoring} is computed"
    if (every := config_get(hf, "moe_layer_freq", 1)) != 1:
        yield f"moe_layer_freq is {every}; every layer from first_k_dense_replace on has experts"


def experts(
    hf: HfConfig,
    layers: tuple[int, ...],
    *,
    count: int,
    chosen: int,
    width: int,
    shared: int,
    scoring: Scoring,
    normalized: bool,
    groups: tuple[int, int],
    scale: float,
    group_score: GroupScore = "best_two",
    selection_bias: bool = True,
) -> ExpertsConfig | None:
    """The experts of these layers, and their routing; `count`, `chosen`, `width`, `shared` and
    `scale` are the family's defaults."""
    if not layers:
        return None
    count = config_get(hf, "n_routed_experts", config_get(hf, "num_local_experts", count))
    width = config_get(hf, "moe_intermediate_size", width)
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", chosen),
        intermediate_size=width,
        shared_intermediate_size=width * config_get(hf, "n_shared_experts", shared),
        scoring=scoring,
        norm_topk_prob=normalized,
        num_groups=groups[0],
        groups_per_token=groups[1],
        group_score=group_score,
        scale=config_get(hf, "routed_scaling_factor", scale),
        selection_bias=(count,) if selection_bias else (),
    )


def groups(hf: HfConfig, count: int, chosen: int) -> tuple[int, int]:
    """Groups of experts, and how many of them a token chooses from; the numbers are defaults."""
    return config_get(hf, "n_group", count), config_get(hf, "topk_group", chosen)


def layers_from(hf: HfConfig, first: int) -> tuple[int, ...]:
    """The layers with experts; `first` is the family's default of first_k_dense_replace."""
    first = config_get(hf, "first_k_dense_replace", first)
    return tuple(range(first, config_require(hf, "num_hidden_layers")))


def sparse_layers(hf: HfConfig, first: int) -> tuple[int, ...]:
    """The layers with experts by `mlp_layer_types`; without it, those from `first` on."""
    count = config_require(hf, "num_hidden_layers")
    types = config_get(hf, "mlp_layer_types", ["dense"] * first + [SPARSE] * max(0, count - first))
    if len(types) < count:
        raise ConfigError(
            f"the model's mlp_layer_types (config.json) has {len(types)} entries, and "
            f"num_hidden_layers is {count}. Correct the config.json that model.config_path names."
        )
    return tuple(index for index, kind in enumerate(types[:count]) if kind == SPARSE)
