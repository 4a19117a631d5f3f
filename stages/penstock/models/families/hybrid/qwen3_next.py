"""Qwen3-Next: three layers of Gated DeltaNet, then one of gated attention; experts with a gated
shared expert."""

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.hybrid.fields import ROLES, gated_delta_layers, unsupported_activation
from penstock.models.families.moe.qwen3_moe import moe_layers
from penstock.models.family import LINEAR_PARTS, Family
from penstock.models.hf_config import HfConfig, aux_loss_coef, config_get, decoder_config
from penstock.models.mtp_config import QWEN3_NEXT_MTP

NAMES = ExpertNames(shared="shared_expert", known_to_peft=False)

LORA_TARGETS = (*LINEAR_PARTS, "in_proj_qkvz", "out_proj")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Qwen3-Next's config.json."""
    return decoder_config(
        hf,
        not_native=unsupported_activation(hf),
        intermediate_size=config_get(hf, "intermediate_size", 5632),
        experts=_experts(hf),
        **gated_delta_layers(hf, keys=2, fused=True),
    )


def _experts(hf: HfConfig) -> ExpertsConfig | None:
    count, layers = config_get(hf, "num_experts", 512), moe_layers(hf)
    if not count or not layers:
        return None
    return ExpertsConfig(
        layers=layers,
        num_experts=count,
        experts_per_token=config_get(hf, "num_experts_per_tok", 10),
        intermediate_size=config_get(hf, "moe_intermediate_size", 512),
        shared_intermediate_size=config_get(hf, "shared_expert_intermediate_size", 512),
        shared_gate=True,
        norm_topk_prob=bool(config_get(hf, "norm_topk_prob", True)),
        aux_loss_coef=aux_loss_coef(hf),
        names=NAMES,
    )


QWEN3_NEXT = Family(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    read,
    ROLES,
    lora_targets=LORA_TARGETS,
    mtp=QWEN3_NEXT_MTP,
)
