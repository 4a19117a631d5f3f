"""DeepSeek V3, V3.1 and R1, and models of the same code (Moonlight, Kimi K2): latent attention, and
sigmoid routing within groups of experts with a selection bias."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.latent.fields import (
    LORA_TARGETS,
    ROLES,
    experts,
    groups,
    latent_attention,
    layers_from,
    rotary_pairs,
    unsupported_attention,
    unsupported_routing,
)
from penstock.models.family import Family
from penstock.models.hf_config import HfConfig, config_get, decoder_config
from penstock.models.mtp_config import DEEPSEEK_MTP


def read(hf: HfConfig) -> DecoderConfig:
    """The DecoderConfig of a DeepSeek V3's config.json."""
    routing = unsupported_routing(hf, methods=("noaux_tc",), scoring="sigmoid")
    return decoder_config(
        hf,
        unsupported=(*unsupported_attention(hf), *routing),
        **latent_attention(hf, ranks=(1536, 512), head=(128, 64, 128)),
        **rotary_pairs(hf),
        experts=experts(
            hf,
            layers_from(hf, 3),
            count=256,
            chosen=8,
            width=2048,
            shared=1,
            scoring="sigmoid",
            normalized=bool(config_get(hf, "norm_topk_prob", True)),
            groups=groups(hf, 8, 4),
            scale=2.5,
        ),
    )


DEEPSEEK_V3 = Family(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    read,
    ROLES,
    lora_targets=LORA_TARGETS,
    mtp=DEEPSEEK_MTP,
)
