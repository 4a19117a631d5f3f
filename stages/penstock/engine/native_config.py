"""The config of a model as its native family reads it, without building the model. No torch."""

from penstock.models.decoder_config import DecoderConfig
from penstock.models.hf_config import HfConfig, NotNativeError, native_type
from penstock.models.multimodal import language_config


def native_config(hf: HfConfig) -> DecoderConfig | None:
    """The config of a model that its native family computes; None for others."""
    # Imported here: a finished run needs no families.
    from penstock.models.registry import LANGUAGE_MODELS, find_family  # noqa: PLC0415

    hf = language_config(hf)
    model_type = native_type(hf) or ""
    family = find_family(model_type) or LANGUAGE_MODELS.get(model_type)
    try:
        return family.read(hf) if family else None
    except NotNativeError:
        return None
