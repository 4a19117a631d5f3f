"""Whether a config.json has the types and sizes of a model's, before anything is derived from it.
No torch."""

from collections.abc import Mapping
from typing import Any

from penstock.core.errors import CapabilityError, ConfigError
from penstock.models.foundation import PARSE_ERRORS
from penstock.models.multimodal import language_config
from penstock.models.registry import native_family
from penstock.models.size_limits import validate_sizes

SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def validate_config(config: Any, source: str) -> dict[str, Any]:
    """The content of a config.json. Raises ConfigError, which names `source`, if it is no mapping,
    or has a value from which no model can be built."""
    if isinstance(config, Mapping):
        validate_sizes(config, source)
    if fault := _find_fault(config):
        raise ConfigError(f"{source}: {fault}.\n  Correct it, or name the folder of another model.")
    return dict(config)


def _find_fault(config: Any) -> str | None:
    if not isinstance(config, Mapping):
        kind = "a list" if isinstance(config, list) else f"{config!r}"
        return f"it is {kind}, and a model's config is a mapping"
    model_type = config.get("model_type")
    if not isinstance(model_type, str | int | None):
        return f"model_type is {model_type!r}, which is not text"
    try:
        family = native_family(config)
        text = language_config(config) if family else {}
        # Before the family reads them, which may divide by a size or build a tuple of all layers.
        for name in SIZES:
            size = text.get(name)
            if size is not None and (type(size) is not int or size < 1):
                return f"{name} is {size!r}; it must be an integer of 1 or more"
        if family:
            family.read(config)
    except (ConfigError, CapabilityError):
        return None  # raised again where the model is checked
    except PARSE_ERRORS as error:
        return f"it cannot be read as a model of type {model_type} ({error})"
    return None
