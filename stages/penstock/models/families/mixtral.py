"""Mixtral: experts in every layer, the best few by softmax, under names of their own."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.family import Family
from penstock.models.hf_config import (
    HfConfig,
    balance_of,
    decoder_config,
    given,
    of_whole_heads,
    required,
    rope_parameters,
    sliding_everywhere,
)
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = ExpertNames(block="block_sparse_moe", gate="w1", up="w3", down="w2")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Mixtral's config.json."""
    faults = []
    if noise := given(hf, "router_jitter_noise", 0.0):
        faults.append(f"router_jitter_noise is {noise}; routing without noise is computed")
    return decoder_config(
        hf,
        faults=faults,
        num_key_value_heads=given(hf, "num_key_value_heads", 8),
        rms_norm_eps=given(hf, "rms_norm_eps", 1e-5),
        rope_parameters=of_whole_heads(rope_parameters(hf, theta=1e6)),
        experts=ExpertsConfig(
            layers=tuple(range(required(hf, "num_hidden_layers"))),
            num_experts=given(hf, "num_local_experts", given(hf, "num_experts", 8)),
            experts_per_token=given(hf, "num_experts_per_tok", 2),
            width=required(hf, "intermediate_size"),
            balance=balance_of(hf),
            names=NAMES,
        ),
        **sliding_everywhere(hf, given(hf, "sliding_window", None)),
    )


MIXTRAL = Family("mixtral", "MixtralForCausalLM", read, ROLES)
