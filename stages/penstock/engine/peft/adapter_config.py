"""PEFT adapter_config.json: read it, and reject what is not supported. No torch."""

from pathlib import Path
from typing import Any

from penstock.core.errors import CapabilityError
from penstock.core.files import read_json_object

CONFIG = "adapter_config.json"

# LoRA initializations that leave the base weights unchanged. Others (PiSSA and the like) subtract a
# part of them first, which no file contains.
STARTS_BESIDE_BASE = (True, False, None, "gaussian", "eva", "orthogonal")

UNSUPPORTED = {
    "layer_replication": "layers that are used more than once",
    "trainable_token_indices": "single rows of an embedding",
    "use_qalora": "QA-LoRA",
    "alora_invocation_tokens": "adapters that begin at a token (aLoRA)",
}


def read_peft_config(folder: Path) -> dict[str, Any]:
    """The content of `adapter_config.json`. Raises CapabilityError for a folder without one, or for
    unsupported settings."""
    if not (folder / CONFIG).is_file():
        raise CapabilityError(
            f"{folder} has no {CONFIG}.\n  Name the folder that holds the adapter."
        )
    config: dict[str, Any] = read_json_object(folder / CONFIG)
    if config.get("peft_type") != "LORA":
        raise CapabilityError(
            f"{folder} is an adapter of type {config.get('peft_type')}, and only LORA is read."
        )
    for key, feature in UNSUPPORTED.items():
        if config.get(key):
            raise CapabilityError(f"{folder} asks for {feature} ({key}), which is not computed.")
    start = config.get("init_lora_weights", True)
    if start not in STARTS_BESIDE_BASE:
        raise CapabilityError(
            f"{folder} started with init_lora_weights {start!r}, which changed the base weights "
            "too, and how is not in the folder.\n"
            "  Save it with path_initial_model_for_weight_conversion, as PEFT documents."
        )
    return config
