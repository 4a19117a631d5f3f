"""Families with multi-head latent attention (MLA): DeepSeek V2 to V3.2, GLM-4.7-Flash and GLM 5,
MiniCPM 3 and Youtu-LLM.

Transformers is followed where its code and DeepSeek's differ: norms of latent vectors have an
epsilon of 1e-6 whatever `rms_norm_eps` is, the factor of scores has YaRN's `mscale_all_dim` squared
(in `modeling_deepseek.py` too; the papers leave it out), and index scores are not quantized.
"""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any, Literal

from penstock.models.decoder_config import DecoderConfig, Scoring
from penstock.models.families.layers import (
    ROUTED,
    layers_from,
    per_layer,
    read_experts,
    read_routed_experts,
    sparse_layers,
)
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    config_get,
    config_require,
    decoder_config,
    full_rope,
    mlp_bias,
)
from penstock.models.latent_config import INDEXER_FIELDS, IndexerConfig, LatentAttentionConfig
from penstock.models.mtp_config import DEEPSEEK_MTP
from penstock.models.tp_roles import DECODER_ROLES, ParallelStyle

# Heads are split; latent vectors are computed on every rank.
ROLES = {
    **DECODER_ROLES,
    "model.layers.*.self_attn.q_a_proj": ParallelStyle.REPLICATED,
    "model.layers.*.self_attn.q_b_proj": ParallelStyle.COLWISE,
    "model.layers.*.self_attn.kv_a_proj_with_mqa": ParallelStyle.REPLICATED,
    "model.layers.*.self_attn.kv_b_proj": ParallelStyle.COLWISE,
}
# The selection is computed on every rank: its heads are not split.
SPARSE_ROLES = {
    **ROLES,
    "model.layers.*.self_attn.indexer.wq_b": ParallelStyle.REPLICATED,
    "model.layers.*.self_attn.indexer.wk": ParallelStyle.REPLICATED,
    "model.layers.*.self_attn.indexer.weights_proj": ParallelStyle.REPLICATED,
}

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

# Routing of DeepSeek V2.
GREEDY, GROUPED = "greedy", "group_limited_greedy"


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
        "rope_parameters": full_rope(hf),
    }


def rotary_pairs(hf: HfConfig) -> Literal["halves", "neighbours"]:
    """The RoPE convention of a family with `rope_interleave`."""
    return "neighbours" if config_get(hf, "rope_interleave", True) else "halves"


def _yarn_factor(hf: HfConfig) -> float:
    # YaRN's factor of queries and of keys besides that of RoPE, 1 without `mscale_all_dim`.
    rope = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    scale, factor = config_get(rope, "mscale_all_dim", 0), config_get(rope, "factor", 1.0)
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


def _unsupported(
    hf: HfConfig, *, methods: tuple[str, ...] = ("noaux_tc",), scoring: Scoring = "sigmoid"
) -> Iterator[str]:
    """Settings of attention and routing that are not computed. `methods` are the values of
    `topk_method` that are, the family's default first."""
    yield from unsupported_attention(hf)
    method = config_get(hf, "topk_method", methods[0])
    if method not in methods:
        yield f"topk_method is {method!r}; {' and '.join(methods)} are computed"
    if (function := config_get(hf, "scoring_func", scoring)) != scoring:
        yield f"scoring_func is {function!r}; {scoring} is computed"
    if (every := config_get(hf, "moe_layer_freq", 1)) != 1:
        yield f"moe_layer_freq is {every}; every layer from first_k_dense_replace on has experts"


def read_deepseek_v2(hf: HfConfig) -> DecoderConfig:
    """DeepSeek V2 and V2 Lite: RoPE in fp32; softmax routing, greedily or within groups of experts.

    The balance losses of its paper are config.json's `aux_loss_alpha`, which transformers does not
    compute; `train.moe_aux_loss_coef` is the load-balancing loss here.
    """
    faults = [*_unsupported(hf, methods=(GREEDY, GROUPED), scoring="softmax")]
    if config_get(hf, "norm_topk_prob", False):
        faults.append(
            "norm_topk_prob is true: the code that DeepSeek published divides the weights of a "
            "token's experts by their sum, and transformers' has the key without effect; write "
            "false here (model.foundation overrides it) to train what transformers computes"
        )
    layers, groups, chosen_groups = layers_from(hf, 0), 1, 1
    if config_get(hf, "topk_method", GREEDY) == GROUPED:  # the other one does not read them
        groups, chosen_groups = config_get(hf, "n_group", 1), config_get(hf, "topk_group", 1)
    width = config_get(hf, "moe_intermediate_size", 1407)
    experts = read_experts(
        hf,
        layers,
        ROUTED,
        count=64,
        chosen=config_require(hf, "num_experts_per_tok") if layers else 1,
        width=width,
        shared_intermediate_size=width * config_get(hf, "n_shared_experts", 2),
        norm_topk_prob=False,
        num_groups=groups,
        groups_per_token=chosen_groups,
        group_score="best",
        scale=config_get(hf, "routed_scaling_factor", 1.0),
    )
    return decoder_config(
        hf,
        unsupported=faults,
        **latent_attention(hf, ranks=(1536, 512), head=(128, 64, 128)),
        rope_pairs="neighbours",
        rope_fp32=True,
        experts=experts,
        **mlp_bias(hf),
    )


def read_deepseek_v3(hf: HfConfig) -> DecoderConfig:
    """DeepSeek V3, V3.1 and R1, and models of the same code (Moonlight, Kimi K2): sigmoid routing
    within groups of experts with a selection bias."""
    kwargs = {"count": 256, "chosen": 8, "width": 2048, "groups": (8, 4), "scale": 2.5}
    return decoder_config(
        hf,
        unsupported=_unsupported(hf),
        **latent_attention(hf, ranks=(1536, 512), head=(128, 64, 128)),
        rope_pairs=rotary_pairs(hf),
        experts=read_routed_experts(hf, layers_from(hf, 3), **kwargs),
    )


def read_glm4_moe_lite(hf: HfConfig) -> DecoderConfig:
    """GLM-4.7-Flash: the routing of GLM 4.5."""
    faults = [*_unsupported(hf)]
    first = config_get(hf, "first_k_dense_replace", 1)
    if first != 1 and hf.get("mlp_layer_types") is None:
        faults.append(f"first_k_dense_replace is {first}; mlp_layer_types says which are dense")
    kwargs = {"count": 64, "chosen": 4, "width": 1536, "scale": 1.8}
    return decoder_config(
        hf,
        unsupported=faults,
        defaults={"rms_norm_eps": 1e-5},
        **latent_attention(hf, ranks=(768, 512), head=(192, 64, 256)),
        rope_pairs=rotary_pairs(hf),
        experts=read_routed_experts(hf, sparse_layers(hf, 1), **kwargs),
    )


def read_deepseek_v32(hf: HfConfig) -> DecoderConfig:
    """DeepSeek V3.2: DeepSeek V3, whose tokens attend to those that an indexer selects (DeepSeek
    Sparse Attention)."""
    latent = latent_attention(
        hf, ranks=(1536, 512), head=(128, 64, 128), indexer=_indexer(hf, 64, "halves")
    )
    return _sparse_config(hf, groups=(8, 4), **latent)


def read_glm_moe_dsa(hf: HfConfig) -> DecoderConfig:
    """GLM 5: DeepSeek V3.2 with other sizes and interleaved RoPE in the indexer. Models whose
    layers share a selection (`indexer_types`) are trained through the transformers backend."""
    count = config_require(hf, "num_hidden_layers")
    every = max(1, config_get(hf, "index_topk_freq", 1))
    offset = config_get(hf, "index_skip_topk_offset", 2)
    expected = ["F" if max(index - offset + 1, 0) % every == 0 else "S" for index in range(count)]
    pattern = config_get(hf, "index_topk_pattern", expected)
    shared = sum(kind in ("shared", "S") for kind in per_layer(hf, "indexer_types", pattern))
    reasons = []
    if shared:
        reasons.append(
            f"{shared} layers take over the selection of an earlier layer (indexer_types)"
        )
    latent = latent_attention(
        hf, ranks=(2048, 512), head=(192, 64, 256), indexer=_indexer(hf, 32, "neighbours")
    )
    defaults = {"rms_norm_eps": 1e-5}
    return _sparse_config(hf, groups=(1, 1), not_native=reasons, defaults=defaults, **latent)


def _indexer(hf: HfConfig, heads: int, pairs: Literal["halves", "neighbours"]) -> IndexerConfig:
    defaults = {"heads": heads, "head_dim": 128, "top_k": 2048}
    sizes = {name: config_get(hf, INDEXER_FIELDS[name], size) for name, size in defaults.items()}
    return IndexerConfig(**sizes, rope_pairs=pairs)


def _sparse_config(hf: HfConfig, *, groups: tuple[int, int], **specific: Any) -> DecoderConfig:
    layers = sparse_layers(hf, config_get(hf, "first_k_dense_replace", 3))
    kwargs = {"count": 256, "chosen": 8, "width": 2048, "groups": groups, "scale": 2.5}
    return decoder_config(
        hf,
        layer_type="indexed_attention",
        unsupported=_unsupported(hf),
        rope_pairs="neighbours",
        experts=read_routed_experts(hf, layers, **kwargs),
        **specific,
    )


def read_minicpm3(hf: HfConfig) -> DecoderConfig:
    """MiniCPM 3: no experts; scaled embeddings, residuals and logits."""
    width, layers = (config_require(hf, name) for name in ("hidden_size", "num_hidden_layers"))
    # Null means no scaling; a field that is left out has its default.
    depth, base = hf.get("scale_depth", 1.4), hf.get("dim_model_base", 256)
    values = width // config_require(hf, "num_attention_heads")
    return decoder_config(
        hf,
        unsupported=unsupported_attention(hf),
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "initializer_range": 0.1},
        **latent_attention(hf, ranks=(768, 256), head=(64, 32, values)),
        embedding_scale=config_get(hf, "scale_emb", 12),
        rounds_embedding_scale=True,
        # Hu et al. 2024, "MiniCPM": outputs of layers shrink with the root of their number.
        residual_scale=1.0 if depth is None else depth / math.sqrt(layers),
        logit_scale=1.0 if base is None else base / width,
        **mlp_bias(hf),
    )


def read_youtu(hf: HfConfig) -> DecoderConfig:
    """Youtu-LLM: DeepSeek V3 without experts."""
    deviation = 2.0 / (5.0 * config_require(hf, "hidden_size")) ** 0.5
    return decoder_config(
        hf,
        unsupported=unsupported_attention(hf),
        defaults={"tie_word_embeddings": True, "initializer_range": deviation},
        **latent_attention(hf, ranks=(1536, 512), head=(128, 64, 128)),
        rope_pairs=rotary_pairs(hf),
    )


DEEPSEEK_V2 = Family("deepseek_v2", "DeepseekV2ForCausalLM", read_deepseek_v2, ROLES, LORA_TARGETS)
_with_mtp = partial(Family, lora_targets=LORA_TARGETS, mtp=DEEPSEEK_MTP)
DEEPSEEK_V3 = _with_mtp("deepseek_v3", "DeepseekV3ForCausalLM", read_deepseek_v3, ROLES)
GLM4_MOE_LITE = _with_mtp("glm4_moe_lite", "Glm4MoeLiteForCausalLM", read_glm4_moe_lite, ROLES)
DEEPSEEK_V32 = _with_mtp("deepseek_v32", "DeepseekV32ForCausalLM", read_deepseek_v32, SPARSE_ROLES)
GLM_MOE_DSA = _with_mtp("glm_moe_dsa", "GlmMoeDsaForCausalLM", read_glm_moe_dsa, SPARSE_ROLES)
MINICPM3 = Family("minicpm3", "MiniCPM3ForCausalLM", read_minicpm3, ROLES, LORA_TARGETS)
YOUTU = Family("youtu", "YoutuForCausalLM", read_youtu, ROLES, LORA_TARGETS)
