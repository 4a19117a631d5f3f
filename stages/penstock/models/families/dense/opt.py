"""OPT: pre-LayerNorm, learned position embeddings, MLPs without a gate, biases on all linear layers
or none.

Megatron's first models have the same architecture with GELU; OPT itself has ReLU.
"""

from collections.abc import Iterator

from penstock.models.decoder_config import DecoderConfig, LearnedPositions, TensorNames
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require, decoder_config
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES

FIRST_ROW = 2
"""First used row of the position table; rows before it are for padding."""

NAMES = TensorNames(
    backbone="model.decoder",
    norm="final_layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    o_proj="self_attn.out_proj",
    up_proj="fc1",
    down_proj="fc2",
)
LINEAR_LAYERS = ("q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of an OPT's config.json."""
    bias = bool(config_get(hf, "enable_bias", True))
    heads, hidden = config_require(hf, "num_attention_heads"), config_require(hf, "hidden_size")
    return decoder_config(
        hf,
        unsupported=_faults(hf, hidden, heads),
        not_native=_reasons(hf, hidden),
        hidden_act="relu",
        named={"intermediate_size": "ffn_dim", "hidden_act": "activation_function"},
        norm="layer",
        rms_norm_eps=1e-5,
        num_key_value_heads=heads,
        head_dim=hidden // heads,
        learned_positions=LearnedPositions(
            config_require(hf, "max_position_embeddings") + FIRST_ROW, FIRST_ROW
        ),
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        initializer_range=config_get(hf, "init_std", 0.02),
        gated=False,
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tie_word_embeddings=bool(config_get(hf, "tie_word_embeddings", True)),
        names=NAMES,
    )


def _faults(hf: HfConfig, hidden: int, heads: int) -> Iterator[str]:
    """Settings that transformers computes differently, or that are unsupported here."""
    if hidden % heads:
        yield f"hidden_size ({hidden}) is not a multiple of num_attention_heads ({heads})"
    if rate := config_get(hf, "layerdrop", 0.0):
        yield f"layerdrop is {rate}; whole layers are not dropped"
    if rate := config_get(hf, "dropout", 0.0):
        yield (
            f"dropout is {rate}; write 0 here (model.foundation overrides it), and"
            f" train.dropout.hidden: {rate} if hidden states are to be dropped"
        )


def _reasons(hf: HfConfig, hidden: int) -> Iterator[str]:
    """Settings that only transformers computes."""
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


OPT = Family("opt", "OPTForCausalLM", read, ROLES, lora_targets=LINEAR_LAYERS)
