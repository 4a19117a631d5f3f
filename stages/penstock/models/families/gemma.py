"""Gemma: RMSNorm with 1 + weight, scaled embeddings, GeGLU. From Gemma 2 on there are norms of the
outputs of layers as well, and layers with sliding-window attention."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.models.decoder_config import DecoderConfig, HeadSizes, TensorNames
from penstock.models.family import Family
from penstock.models.hf_config import (
    FULL,
    SLIDING,
    HfConfig,
    attention_bias,
    config_get,
    config_require,
    decoder_config,
    rope_by_layer,
    sliding,
    sliding_but_every,
)

GELU = "gelu_pytorch_tanh"
NAMES = TensorNames(
    mlp_norm="pre_feedforward_layernorm",
    attention_output_norm="post_attention_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
# RoPE of a config.json without `rope_parameters`.
GEMMA4_ROPE = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
}


def gemma_config(
    hf: HfConfig,
    *,
    hidden_act: str = "hidden_activation",
    key_heads: int = 4,
    not_native: Iterable[str] = (),
    **specific: Any,
) -> DecoderConfig:
    """The DecoderConfig of a Gemma of any version, with these values. `hidden_act` is the name of
    that field in its files."""
    reasons = [*not_native]
    if (kind := config_get(hf, "use_bidirectional_attention", False)) not in (False, "vision"):
        reasons.append(f"use_bidirectional_attention is {kind!r}; causal attention is computed")
    return decoder_config(
        hf,
        defaults={"num_key_value_heads": key_heads, "head_dim": 256, "tie_word_embeddings": True},
        not_native=reasons,
        hidden_act=GELU,
        named={"hidden_act": hidden_act},
        embedding_scale=config_require(hf, "hidden_size") ** 0.5,
        rounds_embedding_scale=True,
        **attention_bias(hf),
        **{"norm": "rms_1p", **specific},
    )


def read_gemma(hf: HfConfig) -> DecoderConfig:
    """Gemma, the first version."""
    # Old files say `gelu` and mean its approximation.
    exact = config_get(hf, "hidden_act", GELU) == "gelu"
    activation = {"activation": "gelu_tanh"} if exact else {}
    return gemma_config(hf, hidden_act="hidden_act", key_heads=16, **activation)


def read_gemma2(hf: HfConfig, *, output_norms: bool = True) -> DecoderConfig:
    """Gemma 2: a window in every second layer, and soft caps of attention scores and logits."""
    num_layers = config_require(hf, "num_hidden_layers")
    return gemma_config(
        hf,
        output_norms=output_norms,
        # Not of head_dim: some sizes have other heads than this scalar says.
        attention_scale=config_get(hf, "query_pre_attn_scalar", 256) ** -0.5,
        attention_soft_cap=hf.get("attn_logit_softcapping", 50.0),
        logit_soft_cap=hf.get("final_logit_softcapping", 30.0),
        names=NAMES,
        **sliding(hf, hf.get("sliding_window", 4096), range(0, num_layers, 2)),
    )


def read_vaultgemma(hf: HfConfig) -> DecoderConfig:
    """VaultGemma: Gemma 2 without norms of the outputs of layers."""
    return read_gemma2(hf, output_norms=False)


def read_gemma3(hf: HfConfig) -> DecoderConfig:
    """Gemma 3, text: Gemma 2 with QK norm instead of soft caps, and full attention in every sixth
    layer, which has its own RoPE."""
    reasons = []
    if (cap := config_get(hf, "attn_logit_softcapping", None)) is not None:
        reasons.append(f"attn_logit_softcapping is {cap}; scores without a cap are computed")
    return gemma_config(
        hf,
        not_native=reasons,
        output_norms=True,
        qk_norm=True,
        attention_scale=config_get(hf, "query_pre_attn_scalar", 256) ** -0.5,
        logit_soft_cap=config_get(hf, "final_logit_softcapping", None),
        names=NAMES,
        **rope_by_layer(hf, theta=1e6, sliding_theta=1e4, sliding_field="rope_local_base_freq"),
        **sliding_but_every(hf, config_get(hf, "sliding_window_pattern", 6)),
    )


def read_gemma4(hf: HfConfig) -> DecoderConfig:
    """Gemma 4, text: Gemma 3 with plain RMSNorm, normed values and a factor of each layer's output;
    layers with full attention have heads of another size, and keys that are values too.

    Models with inputs of each layer, experts, or keys and values that layers share are not native.
    """
    # By default five of six layers have a window, and never the last one.
    last = config_require(hf, "num_hidden_layers") - 1
    pattern = [SLIDING if (index + 1) % 6 else FULL for index in range(last)]
    kinds: Sequence[str] = config_get(hf, "layer_types", pattern)[:last]
    layers = tuple(index for index, kind in enumerate(kinds) if kind == SLIDING)
    rope = hf if hf.get("rope_parameters") else {**hf, "rope_parameters": GEMMA4_ROPE}
    return gemma_config(
        hf,
        not_native=_not_native(hf, layers),
        norm="rms",
        output_norms=True,
        qk_norm=True,
        value_norm=True,
        layer_scalars=True,
        # As transformers' Gemma4TextAttention, whatever the head size.
        attention_scale=1.0,
        logit_soft_cap=config_get(hf, "final_logit_softcapping", None),
        full_attention_heads=full_attention_heads(hf),
        sliding_window=config_get(hf, "sliding_window", 512) if layers else None,
        sliding_layers=layers,
        names=NAMES,
        **rope_by_layer(rope, theta=1e6, sliding_theta=1e4),
    )


def full_attention_heads(hf: HfConfig) -> HeadSizes:
    """The head sizes of a Gemma 4's layers without a window. Published files name them, those that
    transformers writes have them by layer (`per_layer_config`)."""
    shared = bool(config_get(hf, "attention_k_eq_v", False))
    keys = config_get(hf, "num_key_value_heads", 4)
    own: dict[str, Any] = {"head_dim": config_get(hf, "global_head_dim", 512)}
    if shared:
        own["num_key_value_heads"] = config_get(hf, "num_global_key_value_heads", keys)
    if by_layer := hf.get("per_layer_config"):
        own = next(iter(by_layer.values()))
    return HeadSizes(
        own.get("head_dim", config_get(hf, "head_dim", 256)),
        own.get("num_key_value_heads", keys),
        keys_are_values=shared,
    )


def _not_native(hf: HfConfig, layers: Sequence[int]) -> Iterator[str]:
    if size := config_get(hf, "hidden_size_per_layer_input", 256):
        yield f"hidden_size_per_layer_input is {size}; layers have no inputs of their own here"
    if count := config_get(hf, "num_kv_shared_layers", 0):
        yield f"num_kv_shared_layers is {count}; every layer has its own keys and values here"
    if config_get(hf, "enable_moe_block", False):
        yield "enable_moe_block is true; layers have no experts here"
    by_layer = config_get(hf, "per_layer_config", {})
    full = {*range(config_require(hf, "num_hidden_layers"))} - {*layers}
    if by_layer and (
        {int(layer) for layer in by_layer} != full
        or len({tuple(sorted(own.items())) for own in by_layer.values()}) > 1
        or {name for own in by_layer.values() for name in own} - {"head_dim", "num_key_value_heads"}
    ):
        yield (
            "per_layer_config differs otherwise than by head_dim and num_key_value_heads of layers "
            "with full attention"
        )


GEMMA = Family("gemma", "GemmaForCausalLM", read_gemma)
GEMMA2 = Family("gemma2", "Gemma2ForCausalLM", read_gemma2)
VAULTGEMMA = Family("vaultgemma", "VaultGemmaForCausalLM", read_vaultgemma)
GEMMA3 = Family("gemma3_text", "Gemma3ForCausalLM", read_gemma3)
GEMMA4 = Family("gemma4_text", "Gemma4ForCausalLM", read_gemma4)
