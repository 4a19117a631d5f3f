"""Granite: Llama with factors of the embeddings, the outputs of layers, attention and logits; also
with experts, with windows and with Mamba-2 layers. HyperCLOVA X is like it."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig, TensorNames
from penstock.models.families.layers import (
    NO_ROPE,
    layers_of_kind,
    read_experts,
    unsupported_activation,
)
from penstock.models.families.mamba import mamba_config
from penstock.models.family import FUSED_GATE_UP_PARTS, Family
from penstock.models.hf_config import (
    LINEAR,
    HfConfig,
    attention_bias,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    full_rope,
    mlp_bias,
    sliding,
)
from penstock.models.tp_roles import MAMBA_ROLES

EXPERT_NAMES = ExpertNames(
    block="block_sparse_moe",
    router="router.layer",
    gate_up_stack="input_linear.weight",
    down_stack="output_linear.weight",
)
HYBRID_NAMES = TensorNames(
    gate_up_proj="shared_mlp.input_linear", down_proj="shared_mlp.output_linear"
)
HYPERCLOVAX_NAMES = TensorNames(attention_output_norm="post_norm1", mlp_output_norm="post_norm2")


def granite_config(hf: HfConfig, **specific: Any) -> DecoderConfig:
    """The DecoderConfig of a Granite of any kind, with these values."""
    return decoder_config(
        hf,
        embedding_scale=config_get(hf, "embedding_multiplier", 1.0),
        residual_scale=config_get(hf, "residual_multiplier", 1.0),
        attention_scale=config_get(hf, "attention_multiplier", 1.0),
        # config.json has the divisor.
        logit_scale=1 / config_get(hf, "logits_scaling", 1.0),
        **attention_bias(hf),
        **specific,
    )


def granite_experts(
    hf: HfConfig, layers: Sequence[int], names: ExpertNames, **specific: Any
) -> ExpertsConfig | None:
    """The experts of these layers, which have the softmax top-k router of Mixtral."""
    counts, coefficient = ("num_local_experts",), aux_loss_coef(hf)
    kwargs = {"aux_loss_coef": coefficient, "names": names, **specific}
    return read_experts(hf, layers, counts, count=8, chosen=2, **kwargs)


def read_granite(hf: HfConfig) -> DecoderConfig:
    """Granite 3."""
    return granite_config(hf, **mlp_bias(hf))


def read_granitemoe(hf: HfConfig) -> DecoderConfig:
    """Granite MoE: experts in every layer, which checkpoints stack."""
    layers = range(config_require(hf, "num_hidden_layers"))
    return granite_config(hf, experts=granite_experts(hf, layers, EXPERT_NAMES))


def read_granite_swa(hf: HfConfig) -> DecoderConfig:
    """Granite with attention sinks, windows in three of four layers, and RoPE by layer."""
    layers = range(config_require(hf, "num_hidden_layers"))
    windows = sliding(hf, hf.get("sliding_window", 128), (layer for layer in layers if layer % 4))
    rope = full_rope(hf)
    thetas: Sequence[float] = config_get(hf, "layer_rope_theta", [rope["rope_theta"]] * len(layers))
    bases: dict[bool, set[float]] = {False: set(), True: set()}
    for index, theta in enumerate(thetas):
        if theta:
            bases[index in windows["sliding_layers"]].add(theta)
    reasons = []
    if max(map(len, bases.values())) > 1:
        reasons.append("layer_rope_theta has several bases for layers of one kind; one is computed")
    full, local = (
        {**rope, "rope_theta": min(bases[kind], default=rope["rope_theta"])} for kind in bases
    )
    return granite_config(
        hf,
        not_native=reasons,
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        num_key_value_heads=config_get(
            hf,
            "num_key_value_heads",
            # transformers reads null as the number of query heads, and takes 4 where it is absent.
            4 if "num_key_value_heads" not in hf else config_require(hf, "num_attention_heads"),
        ),
        rope_parameters=full,
        sliding_rope_parameters=local,
        no_rope_layers=tuple(index for index, theta in enumerate(thetas) if not theta),
        attention_sinks=True,
        **mlp_bias(hf),
        **windows,
    )


def read_granitemoehybrid(hf: HfConfig) -> DecoderConfig:
    """Granite 4: Mamba-2 layers, RoPE or none, and an MLP in every layer beside which there may be
    experts."""
    every = tuple(range(config_require(hf, "num_hidden_layers")))
    mamba = layers_of_kind(hf, LINEAR, hf.get("layers_block_type") or [LINEAR] * len(every))
    has_rope = config_get(hf, "position_embedding_type", None) == "rope"
    inner = config_get(hf, "shared_intermediate_size", 1024)
    experts = None
    if config_get(hf, "num_local_experts", 8):
        names = replace(EXPERT_NAMES, shared="shared_mlp", shared_is_beside=True)
        experts = granite_experts(hf, every, names, shared_intermediate_size=inner)
    return granite_config(
        hf,
        not_native=unsupported_activation(hf),
        intermediate_size=inner,
        mlp_bias=False,
        fused_gate_up=True,
        rope_parameters=full_rope(hf) if has_rope else NO_ROPE,
        no_rope_layers=() if has_rope else every,
        linear=mamba_config(hf) if mamba else None,
        linear_layers=mamba,
        experts=experts,
        names=HYBRID_NAMES,
    )


def read_hyperclovax(hf: HfConfig) -> DecoderConfig:
    """HyperCLOVA X: Granite with norms of the outputs of layers as well."""
    width = config_require(hf, "hidden_size") // config_require(hf, "num_attention_heads")
    head_dim = config_get(hf, "head_dim", width)
    return decoder_config(
        hf,
        output_norms=bool(config_get(hf, "use_post_norm", True)),
        embedding_scale=config_get(hf, "embedding_multiplier", 1.0),
        residual_scale=config_get(hf, "residual_multiplier", 1.0),
        attention_scale=config_get(hf, "attention_multiplier", head_dim**-0.5),
        # A factor, where Granite's field of this name is a divisor.
        logit_scale=config_get(hf, "logits_scaling", 1.0),
        names=HYPERCLOVAX_NAMES,
        **attention_bias(hf),
        **mlp_bias(hf),
    )


GRANITE = Family("granite", "GraniteForCausalLM", read_granite)
GRANITEMOE = Family(
    "granitemoe", "GraniteMoeForCausalLM", read_granitemoe, lora_targets=FUSED_GATE_UP_PARTS
)
GRANITE_SWA = Family("granite_swa", "GraniteSWAForCausalLM", read_granite_swa)
GRANITEMOEHYBRID = Family(
    "granitemoehybrid",
    "GraniteMoeHybridForCausalLM",
    read_granitemoehybrid,
    MAMBA_ROLES,
    (*FUSED_GATE_UP_PARTS, "in_proj", "out_proj"),
)
HYPERCLOVAX = Family("hyperclovax", "HyperCLOVAXForCausalLM", read_hyperclovax)
