"""Configs of hybrids by model type, for what is planned without the registry of all families."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.families.hybrid.bamba import BAMBA
from penstock.models.families.hybrid.granitemoehybrid import GRANITEMOEHYBRID
from penstock.models.families.hybrid.kimi_linear import KIMI_LINEAR
from penstock.models.families.hybrid.lfm2 import LFM2, LFM2_MOE
from penstock.models.families.hybrid.nemotron_h import NEMOTRON_H
from penstock.models.families.hybrid.olmo_hybrid import OLMO_HYBRID
from penstock.models.families.hybrid.qwen3_5 import QWEN3_5, QWEN3_5_MOE
from penstock.models.families.hybrid.qwen3_next import QWEN3_NEXT
from penstock.models.hf_config import HfConfig, NotNativeError

FAMILIES = {
    family.model_type: family
    for family in (
        QWEN3_NEXT,
        QWEN3_5,
        QWEN3_5_MOE,
        LFM2,
        LFM2_MOE,
        OLMO_HYBRID,
        KIMI_LINEAR,
        GRANITEMOEHYBRID,
        BAMBA,
        NEMOTRON_H,
    )
}


def hybrid_config(hf: HfConfig) -> DecoderConfig | None:
    """The DecoderConfig of a hybrid; None where it has no layers with a state, or is computed by
    transformers."""
    try:
        config = FAMILIES[hf["model_type"]].read(hf)
    except NotNativeError:
        return None
    return config if config.linear_layers else None
