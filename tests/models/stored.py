"""Native tensors as a checkpoint stores them, and back: whole, and in one process."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.models.weights import WeightMap


def to_hf(names: WeightMap, native: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint whose rows, one after another, are the native one's."""
    shapes = {name: names.hf_shapes()[name] for name in names.hf_names(native)}
    rest = next(iter(shapes.values()))[1:]
    rows = tensor.reshape(-1, *rest).split([shape[0] for shape in shapes.values()])
    return dict(zip(shapes, rows, strict=True))


def from_hf(names: WeightMap, native: str, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
    """The native tensor, of checkpoint tensors that `read` fetches by name."""
    parts = [read(name) for name in names.hf_names(native)]
    return torch.cat(parts).view(names.native_shape(native))


def is_published_otherwise(model: PreTrainedModel) -> bool:
    """Whether published files have other names than those that transformers writes."""
    return model.config.model_type in ("olmo_hybrid", "kimi_linear")


def of_ernie_vl(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of an ERNIE-4.5-VL with one for each expert, numbered over both modalities, and
    the rest as its modules have them."""
    found: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        block, _, matrix = name.partition("_moe.experts.")
        if not matrix:
            found[name] = tensor
            continue
        mlp, _, modality = block.rpartition(".")
        first = len(tensor) if modality == "vision" else 0
        parts = ("gate_proj", "up_proj") if matrix == "gate_up_proj" else ("down_proj",)
        for number, expert in enumerate(tensor, first):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                found[f"{mlp}.experts.{number}.{part}.weight"] = rows
    return found


def published(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Transformers' tensors under the names and in the shapes of published checkpoints. Its own
    conversion gives some names to layers of all kinds, and cuts convolutions into equal parts."""
    found = revert_weight_conversion(model, tensors)
    config = model.config
    if config.model_type == "olmo_hybrid":
        keys = config.linear_num_key_heads * config.linear_key_head_dim
        for name, tensor in tensors.items():
            layer, is_filter, _ = name.partition("conv1d.weight")
            for part, rows in zip("qkv", tensor.tensor_split((keys, 2 * keys)), strict=True):
                found |= {f"{layer}{part}_conv1d.weight": rows} if is_filter else {}
        norms = ("attention_layer_norm", "input"), ("feedforward_layer_norm", "post_attention")
        for before, after in norms:
            found = {name.replace(before, f"{after}_layernorm"): found[name] for name in found}
    elif config.model_type == "kimi_linear":
        dense = {at for at, kind in enumerate(config.mlp_layer_types) if kind == "dense"}
        for at in dense:
            block, mlp = f"layers.{at}.block_sparse_moe", f"layers.{at}.mlp"
            found = {name.replace(block, mlp): found[name] for name in found}
    return found


def write_published(model: PreTrainedModel, folder: Path) -> None:
    """Write the weights in this folder as published files have them, where that differs."""
    if is_published_otherwise(model):
        tensors = published(model, model.state_dict())
        tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
