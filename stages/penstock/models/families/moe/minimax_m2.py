"""MiniMax M2: experts in every layer, sigmoid router with a selection bias, QK norm over whole
projections, partial RoPE."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    aux_loss_coef,
    config_get,
    config_require,
    decoder_config,
    rope_parameters,
)
from penstock.models.tp_roles import SPLIT_QK_NORM_ROLES

ROLES = SPLIT_QK_NORM_ROLES
NAMES = ExpertNames(
    block="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    selection_bias="e_score_correction_bias",
)


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a MiniMax-M2's config.json."""
    faults, reasons = [], []
    if noise := config_get(hf, "router_jitter_noise", 0.0):
        reasons.append(f"router_jitter_noise is {noise}; routing without noise is computed")
    if aux_loss_coef(hf):
        faults.append(
            "output_router_logits is true: transformers' load-balancing loss is of a softmax that "
            "this router does not compute; write false, and train.moe_aux_loss_coef for a loss of "
            "the sigmoid scores"
        )
    head_dim = config_get(hf, "head_dim", 128)
    # Published files have `rotary_dim` instead of `partial_rotary_factor`.
    share = config_get(hf, "rotary_dim", head_dim) / head_dim
    count = config_get(hf, "num_local_experts", config_get(hf, "num_experts", 256))
    return decoder_config(
        hf,
        unsupported=faults,
        not_native=reasons,
        num_key_value_heads=config_get(hf, "num_key_value_heads", 8),
        head_dim=head_dim,
        rope_parameters=rope_parameters(hf, theta=5e6, share=share),
        qk_norm=True,
        qk_norm_over="projection",
        experts=ExpertsConfig(
            layers=tuple(range(config_require(hf, "num_hidden_layers"))),
            num_experts=count,
            experts_per_token=config_get(hf, "num_experts_per_tok", 8),
            intermediate_size=config_require(hf, "intermediate_size"),
            scoring="sigmoid",
            selection_bias=(count,),
            names=NAMES,
        ),
    )


MINIMAX_M2 = Family("minimax_m2", "MiniMaxM2ForCausalLM", read, ROLES)
