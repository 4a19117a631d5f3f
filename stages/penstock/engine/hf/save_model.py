"""Save a model folder that `transformers` loads: weights, configs, tokenizer.

Weights are written tensor by tensor, so that about one tensor is in memory. Each file appears
complete or not at all, existing shards are not written again, and equal weights give equal bytes.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import SafetensorError
from safetensors.torch import save_file

from penstock.core.cache.attempt_files import finished_write, take_over
from penstock.core.files import PART, atomic_write, regular_files, write_json
from penstock.engine.hf.safetensors_writer import Kind, aligned, file_layout, put, tensor_num_bytes
from penstock.engine.hf.state_dict import HFStateDict
from penstock.engine.hf.tokenizer_files import TokenizerFiles
from penstock.engine.quantization.export import Quantizer
from penstock.models.automodel.build import absent_rope
from penstock.models.automodel.remote_code import CODE, code_files
from penstock.models.multimodal import TEXT_CONFIG

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

# Bytes of rows, as written, that are converted at a time.
STRETCH = 32 << 20

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class HFFolderMeta:
    """The content of a model folder besides weights."""

    hf_config: Mapping[str, Any]
    tokenizer: TokenizerFiles
    generation_config: Mapping[str, Any] | None = None
    """None: the special tokens of the tokenizer."""


def write_hf_folder(
    weights: HFStateDict,
    out: Path,
    extras: HFFolderMeta,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = "5GB",
    quantizer: Quantizer | None = None,
) -> dict[str, Any]:
    """Fill `out`, which may hold an unfinished attempt, and return facts.

    `max_shard_size` is in bytes, or as `5GB` (decimal). `dtype` is that of all tensors that
    `quantizer` does not quantize. Facts: dtype, number of parameters, of weight files and of bytes
    in all files.
    """
    num_shards = write_weights(
        weights, out, dtype=dtype, max_shard_size=max_shard_size, quantizer=quantizer
    )
    # The export is not quantized in the base model's format.
    replaced = {"quantization_config", CODE}
    config = {key: value for key, value in extras.hf_config.items() if key not in replaced}
    config |= absent_rope(config)
    if quantizer:
        config["quantization_config"] = quantizer.config
    write_json(out / "config.json", _with_dtype(config, dtype_name(dtype)))
    if code := extras.hf_config.get(CODE):
        for file in code_files(Path(code["folder"])):
            shutil.copyfile(file, out / file.name)
    extras.tokenizer.write(out)
    generation_config = extras.generation_config
    if generation_config is None:
        generation_config = extras.tokenizer.generation_defaults()
    write_json(out / "generation_config.json", extras.tokenizer.with_end_of_turn(generation_config))
    return {
        "dtype": dtype_name(dtype),
        "parameters": weights.num_parameters,
        "shards": num_shards,
        "bytes": bytes_in(out),
    }


def _with_dtype(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    # transformers 4 wrote, and reads, `torch_dtype`.
    keys = ("dtype", *({"torch_dtype"} & config.keys()))
    changed = {**config, **dict.fromkeys(keys, name)}
    text = config.get(TEXT_CONFIG)
    if isinstance(text, Mapping) and (declared := {"dtype", "torch_dtype"} & set(text)):
        changed[TEXT_CONFIG] = {**text, **dict.fromkeys(declared, name)}
    return changed


def write_weights(
    weights: HFStateDict,
    out: Path,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str,
    quantizer: Quantizer | None = None,
) -> int:
    """Write the safetensors files, and an index if there are several; returns their number."""
    kinds: dict[str, dict[str, Kind]] = {}
    for name, shape in weights.shapes.items():
        is_quantized = quantizer and name in quantizer.shapes
        plain = {name: (shape, weights.dtypes.get(name, dtype))}
        kinds[name] = quantizer.kinds(name) if quantizer and is_quantized else plain
    # All tensors stored for one weight stay in one file.
    sizes = {name: sum(map(tensor_num_bytes, stored.values())) for name, stored in kinds.items()}
    # On the meta device: the hub's function reads sizes alone, and takes none for shared memory.
    planned = {
        name: torch.empty(size, dtype=torch.uint8, device="meta") for name, size in sizes.items()
    }
    split = split_torch_state_dict_into_shards(
        planned, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        if not take_over(out / file):
            _write_file(weights, out / file, {name: kinds[name] for name in names}, quantizer)
    if split.is_sharded:
        files = split.tensor_to_filename
        weight_map = {leaf: files[name] for name in kinds for leaf in kinds[name]}
        write_json(out / INDEX, {"metadata": split.metadata, "weight_map": weight_map})
    return len(split.filename_to_tensors)


def _write_file(
    weights: HFStateDict,
    target: Path,
    kinds: Mapping[str, Mapping[str, Kind]],
    quantizer: Quantizer | None,
) -> None:
    layout = file_layout(
        aligned({leaf: kind for own in kinds.values() for leaf, kind in own.items()})
    )
    with finished_write(target) as part, part.open("wb") as file:
        file.write(layout.header)
        file.flush()  # The tensors are written by offset, past this buffer.
        for name, tensor in _read_batched(weights, kinds):
            if quantizer and name in quantizer.shapes:
                pieces = quantizer.pieces(name, tensor, weights)
            else:
                pieces = _pieces(name, tensor, kinds[name][name][1])
            for leaf, row, rows in pieces:
                stored = layout.tensors[leaf]
                row_bytes = tensor_num_bytes((stored.shape[1:], stored.dtype))
                put(file.fileno(), rows, stored.start + row * row_bytes)
        # An empty last tensor writes nothing, and the file must still have its size.
        file.truncate(layout.size)


def _read_batched(weights: HFStateDict, names: Iterable[str]) -> Iterator[tuple[str, torch.Tensor]]:
    # Small tensors are read together, because each read has overhead.
    batches: list[list[str]] = []
    budget = 0
    for name in names:
        size = tensor_num_bytes((weights.shapes[name], torch.float32))
        if size > budget:
            batches.append([])
            budget = STRETCH
        batches[-1].append(name)
        budget -= size
    for batch in batches:
        tensors = weights.read(batch)
        for name in batch:
            yield name, tensors.pop(name)


def _pieces(
    name: str, tensor: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[str, int, torch.Tensor]]:
    """Blocks of a tensor: its name, the first row, and the rows in the requested dtype."""
    tensor = tensor if tensor.dim() else tensor.reshape(1)
    row_bytes = tensor_num_bytes((tuple(tensor.shape[1:]), dtype))
    rows = max(STRETCH // max(row_bytes, 1), 1)
    for first in range(0, len(tensor), rows):
        yield name, first, tensor[first : first + rows].to(dtype)


def save_tensors(tensors: Mapping[str, torch.Tensor], target: Path) -> None:
    """Write one safetensors file atomically. Raises OSError if it cannot be written."""
    with atomic_write(target) as part:
        own: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
            # The format rejects views of larger tensors.
            own[name] = tensor if is_whole else tensor.contiguous().clone()
        try:
            save_file(own, part, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{target.name}: {error}") from error


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype, such as `float32`."""
    return str(dtype).removeprefix("torch.")


def declared_dtype(hf_config: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype that a config.json declares; bfloat16 for a quantized model, else None, if it
    declares none or an unsupported one."""
    text = hf_config.get(TEXT_CONFIG)
    configs = [hf_config, text] if isinstance(text, Mapping) else [hf_config]
    dtypes = (section.get("dtype") or section.get("torch_dtype") for section in configs)
    declared = next(filter(None, dtypes), None)
    default = torch.bfloat16 if hf_config.get("quantization_config") else None
    return DTYPES.get(str(declared).removeprefix("torch."), default)


def bytes_in(folder: Path) -> int:
    """The size of all finished files below `folder`."""
    return sum(p.stat().st_size for p in regular_files(folder) if p.suffix != PART)
