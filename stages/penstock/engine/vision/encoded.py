"""Training on stored image features (`data.encode_images`): which are stored, and what of the
vision part they leave."""

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch

from penstock.adapters.match_targets import names_vision
from penstock.config.schema.run import RunConfig, trains_projector
from penstock.core.errors import ConfigError
from penstock.engine.device import rank_device
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.vision.stored_names import checkpoint_names
from penstock.models.multimodal import BACKBONE
from penstock.models.vision.features import drop_encoder, require_projector
from penstock.models.vision.tower import VisionTower
from penstock.models.vision.types import VisionConfig, read_vision

# Entries of config.json that the features do not depend on.
IGNORED = frozenset(
    {"text_config", "architectures", "dtype", "torch_dtype", "transformers_version", "use_cache"}
)


def require_encodable(run: RunConfig, vision: VisionConfig) -> None:
    """Raise ConfigError or CapabilityError if features of images cannot be stored before this
    run."""
    if not run.data.encode_images:
        return
    written = run.lora.lora_target_modules or ()
    targets = [written] if isinstance(written, str) else written
    named = [target for target in targets if names_vision(target)]
    if run.lora.enable_lora and named:
        raise ConfigError(
            f"lora.lora_target_modules names layers of the vision part ({named[0]}), and"
            " data.encode_images stores what it computes without adapters.\n"
            f"  Leave {named[0]} out, or write encode_images: false."
        )
    if trains_projector(run):
        require_projector(vision)


def build_tower(run: RunConfig, vision: VisionConfig) -> VisionTower:
    """The vision part of a run's model: without what stored features make unnecessary."""
    tower = VisionTower(vision)
    if run.data.encode_images:
        drop_encoder(tower, projected=not trains_projector(run))
    return tower


def load_tower(hf_config: Mapping[str, Any], folder: Path) -> VisionTower:
    """The vision part with its weights in fp32, on this machine's first GPU or the CPU. Raises
    CapabilityError if the folder lacks some."""
    tower = VisionTower(read_vision(hf_config))
    device = rank_device(0)
    with SafetensorsFolder(folder) as stored:
        names = {name: source for source, name in checkpoint_names(stored.names(), tower).items()}
        weights = {name: names.get(BACKBONE + name, name) for name, _ in tower.named_parameters()}
        stored.require(weights.values())
        tower.to_empty(device=device)
        with torch.no_grad():
            for name, parameter in tower.named_parameters():
                parameter.copy_(stored[weights[name]])
    return tower.requires_grad_(False).eval()


def tower_digest(tower: VisionTower, *, projected: bool) -> str:
    """SHA-256 of what the stored features depend on: the weights, without those of a projector
    whose inputs are stored, and the config of all but the language model."""
    hf_config = {
        name: value for name, value in tower.config.hf_config.items() if name not in IGNORED
    }
    # Sorted: no feature depends on the order of config.json's entries.
    digest = sha256(json.dumps(hf_config, sort_keys=True, default=str).encode())
    for name, parameter in sorted(tower.named_parameters()):
        if projected or not tower.config.is_projector(name):
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            # `load_tower` has them in fp32: NumPy has no bfloat16.
            digest.update(parameter.detach().cpu().contiguous().numpy().data)
    return digest.hexdigest()
