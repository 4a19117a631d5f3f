"""Merge a LoRA adapter into a base model, file by file: `penstock merge`.

Tensors without an adapter are copied from file to file. Tensors with an adapter are merged in
blocks of rows, so memory use does not grow with the model. The shard layout of the base model is
kept.
"""

import errno
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from penstock.core.errors import CapabilityError, ConfigError, StageError
from penstock.core.files import PART, fsync, read_json_object, remove, write_json
from penstock.core.replace_folder import rename_folder
from penstock.core.sources.pin import TOKENIZER_FILES
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.save_model import INDEX
from penstock.engine.hf.verify_folder import noting_unverified, verify_model
from penstock.engine.peft.merge_adapter import AdapterMerge
from penstock.engine.peft.read_adapter import PeftFolder
from penstock.engine.peft.transformers_names import TransformersNames
from penstock.engine.vision.build import build_outline
from penstock.engine.vision.stored_names import checkpoint_names
from penstock.export.card import write_merged_card
from penstock.export.license import CARD
from penstock.export.merge_file import write_file
from penstock.models.multimodal import (
    MULTIMODAL,
    TEXT_CONFIG,
    TIED,
    is_language,
    stored_backbone,
    stored_name,
    text_name,
)
from penstock.models.registry import native_family
from penstock.models.vision.types import VISION_TYPES

CONFIG = "config.json"
WEIGHT_FORMATS = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"}
# Files that describe only the base model.
NOT_COPIED = {INDEX, CARD, "adapter_config.json", "training_args.bin"}


def merge_folders(base: Path, adapter: Path, out: Path) -> dict[str, Any]:
    """Write to `out` the model in the folder `base` with the PEFT adapter in `adapter` merged.

    `out` is created atomically. Returns facts. Raises ConfigError if `out` is not empty,
    CapabilityError for folders that cannot be merged, StageError for a full disk.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already.\n  Name another folder with -o.")
    hf_config = _read_config(base)
    partial = out.with_name(out.name + PART)
    remove(partial)
    partial.mkdir(parents=True)
    try:
        with ExitStack() as opened:
            weights = opened.enter_context(SafetensorsFolder(base))
            names = TransformersNames(hf_config, weights.names())
            rename = _rename(hf_config, weights, names)
            # No native family has such layers, and transformers' model takes a second to build.
            is_conv1d = (lambda _: False) if native_family(hf_config) else names.is_conv1d
            folder = opened.enter_context(PeftFolder(adapter, rename, is_conv1d))
            changes = AdapterMerge(
                folder, weights, hf_config.get("hidden_size"), lambda: names.embeddings
            )
            files = changes.by_file()
            for file, tensors in files.items():
                write_file(weights, changes, tensors, file, partial / file.name)
            facts = {
                "folder": str(out),
                "tensors": sum(map(len, files.values())),
                "changed": len(changes.targets()),
                "shards": len(files),
            }
            _write_config(partial, hf_config, weights, changes)
        _copy_other_files(base, adapter, partial)
        write_merged_card(partial, base, adapter, folder.config, facts)
        with noting_unverified(partial):
            verify_model(partial, base)
    except OSError as error:
        remove(partial)
        if error.errno == errno.ENOSPC:
            raise StageError(
                f"the disk of {out} is full; the partial result was removed.\n"
                "  Free space for a copy of the base model, or name another disk's folder with -o."
            ) from error
        raise
    except BaseException:
        remove(partial)
        raise
    rename_folder(partial, out)
    return facts


def _rename(
    hf_config: Mapping[str, Any], weights: SafetensorsFolder, names: TransformersNames
) -> Callable[[str], str]:
    """The names in the base model's files of PEFT's modules: others, where it is multimodal, or
    where transformers calls the backbone otherwise."""
    if hf_config.get("model_type") not in MULTIMODAL:
        family = native_family(hf_config)
        with suppress(ConfigError, CapabilityError):
            if family:
                return family.weight_map(family.read(hf_config)).hf_name
        stored_names = {*weights.names(), *(name.rpartition(".")[0] for name in weights.names())}
        return lambda name: name if name in stored_names else names.stored(name)
    backbone = stored_backbone(weights.names())
    # Adapters of the vision part are rare, and its names cost seconds.
    of_vision = cache(partial(_vision_modules, hf_config, weights))

    def rename(name: str) -> str:
        if is_language(f"{name}."):
            return stored_name(text_name(name), backbone)
        return of_vision().get(name, name)

    return rename


def _vision_modules(hf_config: Mapping[str, Any], weights: SafetensorsFolder) -> dict[str, str]:
    if hf_config.get("model_type") not in VISION_TYPES:
        return {}
    names = checkpoint_names(weights.names(), build_outline(hf_config))
    stored_by_name = {name: stored for stored, name in names.items()}
    return stored_by_name | {
        h.rpartition(".")[0]: s.rpartition(".")[0] for h, s in stored_by_name.items()
    }


def _read_config(base: Path) -> dict[str, Any]:
    if not (base / CONFIG).is_file():
        raise CapabilityError(f"{base} has no {CONFIG}.\n  Name the folder of a model.")
    config = read_json_object(base / CONFIG)
    if "quantization_config" in config:
        raise CapabilityError(
            f"{base} is quantized; quantizing the merged weights again would lose the adapter.\n"
            "  Name the model that it was quantized from."
        )
    return config


def _write_config(
    out: Path, hf_config: dict[str, Any], weights: SafetensorsFolder, changes: AdapterMerge
) -> None:
    embeddings, values = changes.embeddings, dict[str, Any]()
    if changes.unties:
        values[TIED] = False
    if embeddings and (name := embeddings.embedding) and name in changes.targets():
        rows = changes.shape(name)[0]
        if rows != weights.stored(changes.source(name)).shape[0]:
            # Tokens were added when the adapter was trained.
            values["vocab_size"] = rows
    write_json(out / CONFIG, _with_values(hf_config, values))
    files = changes.by_file()
    if len(files) > 1:
        total = sum(
            math.prod(changes.shape(name)) * weights.stored(changes.source(name)).dtype.itemsize
            for names in files.values()
            for name in names
        )
        weight_map = {name: file.name for file, names in files.items() for name in names}
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def _with_values(hf_config: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    # transformers reads whether weights are tied at the top level too.
    text = hf_config.get(TEXT_CONFIG)
    if not values or not text:
        return {**hf_config, **values}
    top = {key: value for key, value in values.items() if key in hf_config or key == TIED}
    return {**hf_config, **top, TEXT_CONFIG: {**text, **values}}


def _copy_other_files(base: Path, adapter: Path, out: Path) -> None:
    # The adapter's tokenizer comes first, because the adapter was trained with it.
    own_tokenizer = any(
        (adapter / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")
    )
    tokenizer = {path.name for pattern in TOKENIZER_FILES for path in base.glob(pattern)}
    for path in sorted(base.iterdir()):
        is_weights = path.suffix in WEIGHT_FORMATS or path.name in NOT_COPIED
        if is_weights or not path.is_file() or (own_tokenizer and path.name in tokenizer):
            continue
        if not (out / path.name).exists():
            _copy_file(path, out / path.name)
    if own_tokenizer:
        for pattern in TOKENIZER_FILES:
            for path in sorted(adapter.glob(pattern)):
                if path.is_file():
                    (out / path.relative_to(adapter)).parent.mkdir(exist_ok=True)
                    _copy_file(path, out / path.relative_to(adapter))


def _copy_file(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())
    # The folder gets its name once all is on the disk.
    fsync(target)
