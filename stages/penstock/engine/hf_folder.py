"""Writing a folder that `transformers` loads: weights, configs, tokenizer.

Weights are written shard by shard, so that about one shard is in memory. Each file appears whole or
not at all, a shard that is there is not written again, and equal weights make equal bytes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import save_file

from penstock.core.files import PART, publishing, regular_files, write_json
from penstock.engine.hf_tokenizer import TokenizerFiles
from penstock.engine.hf_weights import HfWeights

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class Extras:
    """What a model folder holds besides weights."""

    hf_config: Mapping[str, Any]
    """The whole config.json; its dtype is set here."""
    tokenizer: TokenizerFiles
    generation_config: Mapping[str, Any] | None = None
    """None: the end, start and padding tokens of the tokenizer."""


def write_hf_folder(
    weights: HfWeights,
    out: Path,
    extras: Extras,
    *,
    dtype: torch.dtype,
    max_shard_size: int | str = "5GB",
) -> dict[str, Any]:
    """Fill `out`, which may hold an unfinished earlier attempt, and return facts of it.

    `max_shard_size` is in bytes, or as `5GB` (decimal). Facts: dtype, number of parameters, of
    weight files and of bytes in all files.
    """
    num_shards = write_weights(weights, out, dtype=dtype, max_shard_size=max_shard_size)
    config = {key: value for key, value in extras.hf_config.items() if key != "torch_dtype"}
    write_json(out / "config.json", {**config, "dtype": name_of(dtype)})
    extras.tokenizer.write(out)
    write_json(
        out / "generation_config.json",
        extras.tokenizer.generation_defaults()
        if extras.generation_config is None
        else extras.generation_config,
    )
    return {
        "dtype": name_of(dtype),
        "parameters": weights.num_parameters,
        "shards": num_shards,
        "bytes": bytes_in(out),
    }


def write_weights(
    weights: HfWeights, out: Path, *, dtype: torch.dtype, max_shard_size: int | str
) -> int:
    """Write the safetensors files, and their index where there are several; returns how many."""
    dtypes = dict.fromkeys(weights.shapes, dtype) | dict.fromkeys(weights.exact, torch.float32)
    planned = {
        name: torch.empty(shape, dtype=dtypes[name], device="meta")
        for name, shape in weights.shapes.items()
    }
    split = split_torch_state_dict_into_shards(
        planned, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    for file, names in split.filename_to_tensors.items():
        if (out / file).is_file():
            continue
        tensors = weights.read(names)
        save_tensors({name: tensors.pop(name).to(dtypes[name]) for name in names}, out / file)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        write_json(out / INDEX, index)
    return len(split.filename_to_tensors)


def save_tensors(tensors: Mapping[str, torch.Tensor], target: Path) -> None:
    """Publish one safetensors file."""
    with publishing(target) as part:
        own = {name: _own_memory(tensor) for name, tensor in tensors.items()}
        save_file(own, part, metadata={"format": "pt"})


def _own_memory(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy of it where it is a view of a larger one, which the format refuses."""
    is_whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if is_whole else tensor.contiguous().clone()


def name_of(dtype: torch.dtype) -> str:
    """`float32` and the like."""
    return str(dtype).removeprefix("torch.")


def declared_dtype(hf_config: Mapping[str, Any]) -> torch.dtype:
    """The dtype a config.json declares, float32 where it declares none that weights are kept in."""
    declared = hf_config.get("dtype") or hf_config.get("torch_dtype")
    return DTYPES.get(str(declared).removeprefix("torch."), torch.float32)


def bytes_in(folder: Path) -> int:
    """The size of all finished files below `folder`."""
    return sum(p.stat().st_size for p in regular_files(folder) if p.suffix != PART)
