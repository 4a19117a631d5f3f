"""Live state dict: a model in training under Hugging Face names, without a checkpoint."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from penstock.adapters.names import MAGNITUDE, LoraParamName, parse_lora_name
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.expert_forms import in_files_form, parts_in
from penstock.engine.hf.export_adapter import adapters_in
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.state_dict import HFStateDict, Tensors, in_checkpoint
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
        """The source named in errors."""
        return self.tensors.folder

    def shapes(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Name -> (shape, dtype) of every parameter."""
        shapes_by_name: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        for name, (shape, dtype) in self.tensors.shapes().items():
            if factor := _ranked(name):
                dim = rank_dim(factor, len(shape))
                shape = (*shape[:dim], self.rank, *shape[dim + 1 :])
            shapes_by_name[name] = shape, dtype
        return shapes_by_name

    def read(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """Read exactly these full parameters."""
        read = self.tensors.read(names)
        return {name: self._shard(name, tensor) for name, tensor in read.items()}

    def _shard(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        factor = _ranked(name)
        if factor is None:
            return tensor
        # Contiguous, so that merging gives bitwise the same result as from an exported adapter.
        return tensor.narrow(rank_dim(factor, tensor.dim()), 0, self.rank).contiguous()


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
    own = {stored_name(name, backbone): name for name in formed.shapes}

    def read(requested: Sequence[str]) -> dict[str, torch.Tensor]:
        tensors = formed.read([own[name] for name in requested])
        return {name: tensors[own[name]] for name in requested}

    return HFStateDict(
        {name: formed.shapes[native] for name, native in own.items()},
        read,
        {name: formed.dtypes[native] for name, native in own.items() if native in formed.dtypes},
    )


def _ranked(name: str) -> LoraParamName | None:
    """The factor, if the adapter's rank is one of its dimensions; DoRA magnitudes have none."""
    factor = parse_lora_name(name)
    return None if factor is None or factor.side == MAGNITUDE else factor
