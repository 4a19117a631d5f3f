"""Decoders whose MLPs have no gate: Arcee, Jais 2, Nemotron and OPT."""

from collections.abc import Iterator
from typing import Any

from penstock.models.decoder_config import DecoderConfig, LearnedPositions, TensorNames
from penstock.models.family import UNGATED_PARTS, Family
from penstock.models.hf_config import (
    HfConfig,
    attention_bias,
    config_get,
    config_require,
    decoder_config,
    mlp_bias,
    rope_parameters,
)

OPT_NAMES = TensorNames(
    backbone="model.decoder",
    norm="final_layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o_proj="self_attn.out_proj",
    up_proj="fc1",
    down_proj="fc2",
)
OPT_LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")
# First used row of OPT's position table; rows before it are for padding.
FIRST_ROW = 2


def ungated_config(hf: HfConfig, *, biased: bool = False, **specific: Any) -> DecoderConfig:
    """`decoder_config` of a family with squared ReLU by default. `biased` is the default of
    `attention_bias` and `mlp_bias`."""
    return decoder_config(
        hf,
        hidden_act="relu2",
        gated=False,
        **attention_bias(hf, default=biased),
        **mlp_bias(hf, default=biased),
        **specific,
    )


def read_arcee(hf: HfConfig) -> DecoderConfig:
    """Arcee: Llama but for the MLPs."""
    return ungated_config(hf, defaults={"rms_norm_eps": 1e-5})


def read_jais2(hf: HfConfig) -> DecoderConfig:
    """Jais 2: LayerNorm, full RoPE, biases by default."""
    eps = config_get(hf, "layer_norm_eps", 1e-5)
    return ungated_config(hf, biased=True, norm="layer", rms_norm_eps=eps)


def read_nemotron(hf: HfConfig) -> DecoderConfig:
    """Nemotron: LayerNorm with 1 + weight, partial RoPE."""
    return ungated_config(
        hf,
        defaults={"initializer_range": 0.0134},
        norm="layer_1p",
        rms_norm_eps=config_get(hf, "norm_eps", 1e-5),
        rope_parameters=rope_parameters(hf, share=0.5),
    )


def read_opt(hf: HfConfig) -> DecoderConfig:
    """OPT: pre-LayerNorm, learned position embeddings, biases on all linear layers or none.

    Megatron's first models have the same architecture with GELU; OPT itself has ReLU.
    """
    bias = bool(config_get(hf, "enable_bias", True))
    heads, hidden = config_require(hf, "num_attention_heads"), config_require(hf, "hidden_size")
    rows = config_require(hf, "max_position_embeddings") + FIRST_ROW
    return decoder_config(
        hf,
        defaults={"tie_word_embeddings": True},
        unsupported=_unsupported(hf, hidden, heads),
        not_native=_not_native(hf, hidden),
        hidden_act="relu",
        named={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        norm="layer",
        # That of nn.LayerNorm: OPT's config.json has no field for it.
        rms_norm_eps=1e-5,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        learned_positions=LearnedPositions(rows, FIRST_ROW),
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=config_get(hf, "init_std", 0.02),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        names=OPT_NAMES,
    )


def _unsupported(hf: HfConfig, hidden: int, heads: int) -> Iterator[str]:
    if hidden % heads:
        yield f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})"
    if rate := config_get(hf, "layerdrop", 0.0):
        yield f"layerdrop is {rate}; whole layers are not dropped"
    if rate := config_get(hf, "dropout", 0.0):
        yield (
            f"dropout is {rate}; write 0 here (model.foundation overrides it), and"
            f" train.dropout.hidden: {rate} if hidden states are to be dropped"
        )


def _not_native(hf: HfConfig, hidden: int) -> Iterator[str]:
    if config_get(hf, "word_embed_proj_dim", hidden) != hidden:
        yield (
            "word_embed_proj_dim differs from hidden_size; only embeddings of the model's "
            "width are supported"
        )
    if not config_get(hf, "do_layer_norm_before", True) or config_get(
        hf, "_remove_final_layer_norm", False
    ):
        yield "norms come after layers, or the last is left out; norms before all are computed"
    if not config_get(hf, "layer_norm_elementwise_affine", True):
        yield "layer_norm_elementwise_affine is false; norms with weights are computed"


ARCEE = Family("arcee", "ArceeForCausalLM", read_arcee, lora_targets=UNGATED_PARTS)
JAIS2 = Family("jais2", "Jais2ForCausalLM", read_jais2, lora_targets=UNGATED_PARTS)
NEMOTRON = Family("nemotron", "NemotronForCausalLM", read_nemotron, lora_targets=UNGATED_PARTS)
OPT = Family("opt", "OPTForCausalLM", read_opt, lora_targets=OPT_LINEAR_LAYERS)
