"""Live state dict: a model in training under Hugging Face names, without a checkpoint."""

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from penstock.adapters.names import MAGNITUDE, LoraParamName, parse_lora_name
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.export_adapter import adapters_in
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.state_dict import HFStateDict, Tensors, in_checkpoint
from penstock.engine.hf.stored_forms import in_files_form, parts_in
from penstock.engine.model_source import LoraArgs
from penstock.engine.multi_lora.rank_padding import rank_dim
from penstock.engine.quantization.select_layers import Formats
from penstock.models.multimodal import stored_backbone, stored_name
from penstock.models.weights import WeightMap


@dataclass(frozen=True)
class RankTrimmedTensors:
    """Tensors whose LoRA factors are trimmed to a lower rank than the allocated one."""

    tensors: Tensors
    rank: int

    @property
    def folder(self) -> object:
        return self.tensors.folder

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        shapes_by_name: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in self.tensors.shapes().items():
            if factor := _ranked(name):
                dim = rank_dim(factor, len(shape))
                shape = (*shape[:dim], self.rank, *shape[dim + 1 :])
            shapes_by_name[name] = shape, dtype
        return shapes_by_name

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        tensors = self.tensors.read(names)
        for name, tensor in tensors.items():
            if factor := _ranked(name):
                trimmed = tensor.narrow(rank_dim(factor, tensor.dim()), 0, self.rank)
                # Merging then gives bitwise the same result as from an exported adapter.
                tensors[name] = trimmed.contiguous()
        return tensors


def live_weights(
    tensors: Tensors,
    names: WeightMap,
    *,
    adapting: LoraArgs | None = None,
    formats: Formats | None = None,
) -> HFStateDict:
    """All tensors of the model, with adapters merged and matrices in `formats` dequantized."""
    base = in_checkpoint(tensors, names, formats)
    adapters = adapters_in(tensors, names, adapting)
    return adapters.merged_into(base) if adapters else base


def language_in_files(weights: HFStateDict, base: BaseModelWeights) -> HFStateDict:
    """The tensors of a multimodal model's language model under the names, and in the form, of the
    files of its base model."""
    assert base.folder is not None
    with SafetensorsFolder(base.folder) as folder:
        local_base = base.here(folder)
        formed = in_files_form(weights, local_base, parts_in(base.names, local_base))
        backbone = stored_backbone(folder.names())
    return formed.renamed({stored_name(name, backbone): name for name in formed.shapes})


def _ranked(name: str) -> LoraParamName | None:
    factor = parse_lora_name(name)
    # The rank is no dimension of a magnitude.
    return None if factor is None or factor.side == MAGNITUDE else factor
