"""Which folders an export has, and what goes into each.

Without adapters there is `hf/`. With them there is `adapter/`, and `hf/` with the merged model if
that is wanted. A base model that started at random exists nowhere else, so it comes as `base/`.
"""

from contextlib import ExitStack
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from penstock.core.errors import ArtifactError
from penstock.core.files import read_json
from penstock.core.hub import local_folder
from penstock.core.stage import Facts
from penstock.engine.checkpoint_reader import CheckpointReader
from penstock.engine.hf_adapter import Adapters, adapters_in, write_adapter_folder
from penstock.engine.hf_config import read_hf_config
from penstock.engine.hf_folder import (
    DTYPES,
    Extras,
    bytes_in,
    declared_dtype,
    name_of,
    write_hf_folder,
)
from penstock.engine.hf_tokenizer import TokenizerFiles
from penstock.engine.hf_weights import HfWeights, from_seed, in_checkpoint, in_folder, is_fused
from penstock.engine.weights import SafetensorsFolder
from penstock.export.stage import Export
from penstock.models.registry import family_of
from penstock.models.weights import WeightMap

BASE_BESIDE = "../base"
"""What an adapter calls its base model when that lies beside it: relative to the adapter, so that
the two may be moved together."""


def write_folders(stage: Export, out: Path) -> Facts:
    """Write all folders of the export and return its facts."""
    reader = CheckpointReader(_checkpoint(stage))
    hf_config = read_hf_config(_config_path(stage), stage.foundation)
    family = family_of(hf_config)
    names = family.weight_map(family.read(hf_config), merge_qkv=is_fused(reader))
    adapters = adapters_in(reader, stage.lora_alpha)
    extras = Extras(
        hf_config, TokenizerFiles(stage.tokenizer_path, stage.tokenizer), _generation_config(stage)
    )
    with ExitStack() as opened:
        base = _base(stage, reader, names, opened)
        if adapters is None:
            found = {"hf": _model(stage, base, out / "hf", extras)}
        else:
            found = _with_adapters(stage, base, adapters, out, extras)
    return {
        "format": stage.settings.format,
        "folders": {name: name for name in found},
        "step": reader.state["step"],
        "dtype": name_of(_dtype(stage, hf_config)),
        "parameters": found.get("hf", found.get("adapter", {}))["parameters"],
        "shards": found.get("hf", {}).get("shards", 0),
        "bytes": sum(bytes_in(out / name) for name in found),
        **({"adapter": found["adapter"]} if "adapter" in found else {}),
    }


def _with_adapters(
    stage: Export, base: HfWeights, adapters: Adapters, out: Path, extras: Extras
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if stage.settings.merge_lora:
        found["hf"] = _model(stage, adapters.merged_into(base), out / "hf", extras)
    else:
        # Nothing else of the export carries the tokenizer and its chat template.
        extras.tokenizer.write(out / "adapter")
    written = stage.settings.dtype
    found["adapter"] = write_adapter_folder(
        adapters,
        out / "adapter",
        base_shapes=base.shapes.items(),
        base_model=stage.model_path or BASE_BESIDE,
        revision=stage.weights.pin.get("commit") if stage.weights else None,
        dtype=None if written == "auto" else DTYPES[written],
    )
    if stage.model_path is None:
        found["base"] = _model(stage, base, out / "base", extras)
    return found


def _model(stage: Export, weights: HfWeights, out: Path, extras: Extras) -> dict[str, Any]:
    return write_hf_folder(
        weights,
        out,
        extras,
        dtype=_dtype(stage, extras.hf_config),
        max_shard_size=stage.settings.max_shard_bytes,
    )


def _dtype(stage: Export, hf_config: Any) -> torch.dtype:
    written = stage.settings.dtype
    if written != "auto":
        return DTYPES[written]
    return declared_dtype(hf_config) if stage.model_path else torch.float32


def _checkpoint(stage: Export) -> Path:
    relative = PurePosixPath(stage.trained.facts["checkpoint"])
    if relative.is_absolute() or ".." in relative.parts:
        raise ArtifactError(
            f"The manifest in {stage.trained.path} names the checkpoint {relative}, which lies "
            "outside of it.\n  Run the train stage again."
        )
    return stage.trained.path / relative


def _base(
    stage: Export, reader: CheckpointReader, names: WeightMap, opened: ExitStack
) -> HfWeights:
    """The model without its adapters, which a checkpoint of adapters alone does not hold."""
    if not reader.state.get("adapter_only", False):
        return in_checkpoint(reader, names)
    if stage.model_path is None or stage.weights is None:
        return from_seed(names, stage.seed)
    folder = SafetensorsFolder(local_folder(stage.model_path, stage.weights))
    return in_folder(opened.enter_context(folder), names)


def _config_path(stage: Export) -> str:
    if stage.config.pin["kind"] == "builtin":
        return stage.config_path
    return str(local_folder(stage.config_path, stage.config))


def _generation_config(stage: Export) -> dict[str, Any] | None:
    """What the base model says of generating, if it says anything."""
    source, typed = stage.config, stage.config_path
    if stage.weights and stage.model_path:
        source, typed = stage.weights, stage.model_path
    if source.pin["kind"] == "builtin":
        return None
    file = local_folder(typed, source) / "generation_config.json"
    return read_json(file) if file.is_file() else None
