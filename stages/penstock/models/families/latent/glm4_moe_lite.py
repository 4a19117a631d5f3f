"""GLM-4.7-Flash: latent attention with the routing of GLM 4.5."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.latent.fields import (
    LORA_TARGETS,
    ROLES,
    experts,
    groups,
    latent_attention,
    rotary_pairs,
    sparse_layers,
    unsupported_attention,
    unsupported_routing,
)
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config
from penstock.models.mtp_config import DEEPSEEK_MTP


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a GLM-4-MoE-Lite's config.json."""
    return decoder_config(
        hf,
        unsupported=(*unsupported_attention(hf), *_unsupported_routing(hf)),
        rms_norm_eps=config_get(hf, "rms_norm_eps", 1e-5),
        **latent_attention(hf, ranks=(768, 512), head=(192, 64, 256)),
        **rotary_pairs(hf),
        experts=experts(
            hf,
            sparse_layers(hf, 1),
            count=64,
            chosen=4,
            width=1536,
            shared=1,
            scoring="sigmoid",
            normalized=bool(config_get(hf, "norm_topk_prob", True)),
            groups=groups(hf, 1, 1),
            scale=1.8,
        ),
    )


def _unsupported_routing(hf: HfConfig) -> tuple[str, ...]:
    reasons = unsupported_routing(hf, methods=("noaux_tc",), scoring="sigmoid")
    first = config_get(hf, "first_k_dense_replace", 1)
    if first != 1 and hf.get("mlp_layer_types") is None:
        return (*reasons, f"first_k_dense_replace is {first}; mlp_layer_types says which are dense")
    return tuple(reasons)


GLM4_MOE_LITE = Family(
    "glm4_moe_lite",
    "Glm4MoeLiteForCausalLM",
    read,
    ROLES,
    lora_targets=LORA_TARGETS,
    mtp=DEEPSEEK_MTP,
)
