"""OLMo, dense, with experts and with Gated DeltaNet layers. From OLMo 2 on: norms of the outputs of
layers, not of their inputs, and QK norm over whole projections."""

from dataclasses import replace
from typing import Any

from penstock.models.decoder_config import DecoderConfig, TensorNames
from penstock.models.families.layers import layers_of_kind, read_experts, unsupported_activation
from penstock.models.family import LINEAR_PARTS, Family
from penstock.models.hf_config import (
    FULL,
    LINEAR,
    HfConfig,
    attention_bias,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    full_rope,
    rope_by_layer,
    sliding_but_every,
)
from penstock.models.linear_config import GatedDeltaConfig
from penstock.models.state_layer_config import InitialValues, config_error
from penstock.models.tp_roles import LINEAR_ATTENTION_ROLES, SPLIT_QK_NORM_ROLES

OLMO3_THETA = 500_000.0
NAMES = TensorNames(
    attention_output_norm="post_attention_layernorm",
    mlp_output_norm="post_feedforward_layernorm",
)
# The same name is of the input norm of an MLP in one kind of layers, and of the output norm of
# attention in the other.
HYBRID_NAMES = replace(
    NAMES,
    earlier=(
        ("attention_layer_norm", "input_layernorm"),
        ("feedforward_layer_norm", "post_attention_layernorm"),
    ),
)


def read_olmo(hf: HfConfig) -> DecoderConfig:
    """OLMo: LayerNorm without weights and biases."""
    return decoder_config(
        hf,
        not_native=_unsupported_limits(hf),
        norm="layer_plain",
        # Of OlmoLayerNorm in transformers; config.json has no field for it.
        rms_norm_eps=1e-5,
        # transformers' OLMo leaves cosines in fp32 (5.23), where Llama casts them.
        rope_fp32=True,
        **attention_bias(hf),
    )


def _unsupported_limits(hf: HfConfig) -> list[str]:
    if (limit := hf.get("clip_qkv")) is None:
        return []
    return [f"clip_qkv is {limit}; queries, keys and values without limits are computed"]


def olmo_config(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of an OLMo from version 2 on, with these values."""
    return decoder_config(
        hf,
        input_norms=False,
        output_norms=True,
        qk_norm=True,
        qk_norm_over="projection",
        rope_fp32=True,
        **attention_bias(hf),
        **{"names": NAMES, "defaults": {"rms_norm_eps": 1e-5}, **specific},
    )


def read_olmo3(hf: HfConfig) -> DecoderConfig:
    """OLMo 3: sliding-window attention, with its own RoPE, in three of four layers."""
    ropes = rope_by_layer(hf, theta=OLMO3_THETA, sliding_theta=OLMO3_THETA)
    return olmo_config(hf, **ropes, **sliding_but_every(hf, 4))


def read_olmoe(hf: HfConfig) -> DecoderConfig:
    """OLMoE: norms of the inputs of layers; experts in every layer, softmax top-k router."""
    layers = range(config_require(hf, "num_hidden_layers"))
    return decoder_config(
        hf,
        not_native=_unsupported_limits(hf),
        defaults={"rms_norm_eps": 1e-5},
        qk_norm=True,
        qk_norm_over="projection",
        experts=read_experts(
            hf,
            layers,
            ("num_experts", "num_local_experts"),
            count=64,
            chosen=8,
            normalized=False,
            aux_loss_coef=aux_loss_coef(hf, 0.01),
        ),
        **attention_bias(hf),
    )


def read_flex_olmo(hf: HfConfig) -> DecoderConfig:
    """FlexOlmo: OLMo 2 with experts in every layer as in OLMoE."""
    layers, coefficient = range(config_require(hf, "num_hidden_layers")), aux_loss_coef(hf, 0.01)
    return olmo_config(
        hf,
        defaults={"rms_norm_eps": 1e-6},
        rope_parameters=full_rope(hf, theta=OLMO3_THETA),
        experts=read_experts(
            hf, layers, count=7, chosen=5, normalized=False, aux_loss_coef=coefficient
        ),
    )


def read_olmo_hybrid(hf: HfConfig) -> DecoderConfig:
    """OLMo Hybrid: three layers of Gated DeltaNet with norms of their inputs, then one of attention
    with norms of its outputs, as in OLMo 2."""
    layers = range(config_require(hf, "num_hidden_layers"))
    types = [FULL if index % 4 == 3 else LINEAR for index in layers]
    # As OlmoHybridConfig: some layer has full attention, however few there are.
    types = types if FULL in types else [*types[:-1], FULL]
    # A theta of null, which a file must say, is for no RoPE in any layer.
    parameters = hf.get("rope_scaling") or hf.get("rope_parameters") or {}
    is_rotary = parameters.get("rope_theta", hf.get("rope_theta", 10_000.0)) is not None
    rope = hf if is_rotary else {**hf, "rope_scaling": None, "rope_parameters": None}
    return olmo_config(
        hf,
        not_native=unsupported_activation(hf),
        defaults={"rms_norm_eps": 1e-6},
        rope_parameters=full_rope(rope),
        no_rope_layers=() if is_rotary else tuple(layers),
        linear=_gated_delta(hf),
        linear_layers=layers_of_kind(hf, LINEAR, types),
        linear_input_norms=True,
        names=HYBRID_NAMES,
    )


def _gated_delta(hf: HfConfig) -> GatedDeltaConfig:
    heads = config_require(hf, "num_attention_heads")
    key_heads = config_get(hf, "linear_num_key_heads", heads)
    key_dim = config_get(
        hf, "linear_key_head_dim", int(0.75 * config_require(hf, "hidden_size") / key_heads)
    )
    rates = _range(hf, "linear_a_log", 0.0, 16.0)
    steps = _range(hf, "linear_dt", 1e-3, 0.1)
    floor = config_get(hf, "linear_dt_init_floor", 1e-4)
    return GatedDeltaConfig(
        key_heads=key_heads,
        value_heads=config_get(hf, "linear_num_value_heads", heads),
        key_dim=key_dim,
        value_dim=config_get(hf, "linear_value_head_dim", 2 * key_dim),
        kernel=config_get(hf, "linear_conv_kernel_dim", 4),
        separate=True,
        doubles_rates=bool(hf.get("linear_allow_neg_eigval", True)),
        norm_eps=1e-5,  # whatever rms_norm_eps is
        initial={
            "A_log": InitialValues("log_uniform", *rates),
            "dt_bias": InitialValues("softplus_log_uniform", *steps, floor),
        },
    )


def _range(hf: HfConfig, name: str, low: float, high: float) -> tuple[float, float]:
    low, high = config_get(hf, f"{name}_min", low), config_get(hf, f"{name}_max", high)
    if not 0 <= low < high:
        raise config_error(f"{name}_min is {low}; it must be less than {name}_max ({high})")
    return low, high


OLMO = Family("olmo", "OlmoForCausalLM", read_olmo)
OLMO2 = Family("olmo2", "Olmo2ForCausalLM", olmo_config, SPLIT_QK_NORM_ROLES)
OLMO3 = Family("olmo3", "Olmo3ForCausalLM", read_olmo3, SPLIT_QK_NORM_ROLES)
OLMOE = Family("olmoe", "OlmoeForCausalLM", read_olmoe, SPLIT_QK_NORM_ROLES)
FLEX_OLMO = Family("flex_olmo", "FlexOlmoForCausalLM", read_flex_olmo, SPLIT_QK_NORM_ROLES)
OLMO_HYBRID = Family(
    "olmo_hybrid",
    "OlmoHybridForCausalLM",
    read_olmo_hybrid,
    {**SPLIT_QK_NORM_ROLES, **LINEAR_ATTENTION_ROLES},
    (*LINEAR_PARTS, "g_proj"),
)
