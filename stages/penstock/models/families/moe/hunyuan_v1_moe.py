"""Hunyuan MoE: experts in every layer, fp32 softmax router, a shared expert; the rest as in the
dense model."""

from typing import Any

from penstock.models.decoder_config import DecoderConfig, ExpertNames, ExpertsConfig
from penstock.models.families.dense.hunyuan_v1_dense import hunyuan_config
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, config_require
from penstock.models.tp_roles import DECODER_ROLES

ROLES = DECODER_ROLES
NAMES = ExpertNames(router="gate.wg", shared="shared_mlp")


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a Hunyuan MoE's config.json."""
    width, reasons = config_require(hf, "intermediate_size"), []
    experts = ExpertsConfig(
        layers=tuple(range(config_require(hf, "num_hidden_layers"))),
        num_experts=_of_all_layers(hf, "num_experts", reasons),
        experts_per_token=_of_all_layers(hf, "moe_topk", reasons),
        intermediate_size=width,
        shared_intermediate_size=width,
        fp32_router=True,
        names=NAMES,
    )
    return hunyuan_config(hf, not_native=reasons, experts=experts)


def _of_all_layers(hf: HfConfig, name: str, reasons: list[str]) -> Any:
    """A number, 1 by default, that may be given for each layer."""
    value = config_get(hf, name, 1)
    if not isinstance(value, list):
        return value
    if len(set(value)) > 1:
        reasons.append(f"{name} differs between layers; one for all layers is computed")
    return value[0] if value else None


HUNYUAN_V1_MOE = Family("hunyuan_v1_moe", "HunYuanMoEV1ForCausalLM", read, ROLES)
