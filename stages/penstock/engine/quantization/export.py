"""Quantize on export: choose the layers, and convert their weights.

Linear layers in transformer blocks are quantized: those of attention, feed-forward networks and
experts. Embeddings, the LM head, norms and routers are not.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from penstock.core.errors import CapabilityError
from penstock.engine.hf.safetensors_writer import Kind
from penstock.engine.hf.state_dict import HFStateDict
from penstock.engine.model_source import SchemeName
from penstock.engine.quantization import compressed_tensors
from penstock.engine.quantization.select_layers import matrices
from penstock.models.family import Family
from penstock.models.names import HEAD_WEIGHT
from penstock.models.weights import WeightMap
from penstock_kernels.quant import Format, largest, quantize

# Bytes of rows, in fp32, that are quantized at a time; it needs up to 14 times as much memory.
STRETCH = 4 << 20

# Adjacent layers that servers fuse into one matrix, so they share one global scale.
ONE_MATRIX = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "latent vectors"),
    **dict.fromkeys(("gate_proj", "up_proj", "w1", "w3"), "into"),
}


@dataclass(frozen=True)
class Quantizer:
    """How one model's tensors are stored."""

    scheme: SchemeName
    format: Format
    shapes: Mapping[str, tuple[int, ...]]
    untouched: tuple[str, ...]
    _largest: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])

    @property
    def config(self) -> dict[str, Any]:
        return compressed_tensors.quantization_config(self.scheme, self.format, self.untouched)

    def kinds(self, name: str) -> dict[str, Kind]:
        return compressed_tensors.stored_tensors(_layer(name), self.shapes[name], self.format)

    def pieces(
        self, name: str, weight: torch.Tensor, weights: HFStateDict
    ) -> Iterator[tuple[str, int, torch.Tensor]]:
        """The stored tensors of a weight in blocks: tensor name, first row, rows.

        Scales that cover several matrices are computed by reading these from `weights`. Raises
        CapabilityError for non-finite values.
        """
        shape, layer, tall = self.shapes[name], _layer(name), self.format.tile_rows
        # NVFP4: the scales of groups are relative to one of the whole matrix.
        is_shared = self.format.scales == "e4m3"
        amax = self._fused_amax(name, weight, weights) if is_shared else None
        # Whole tiles.
        rows = max(STRETCH // (4 * shape[1]) // tall, 1) * tall
        for first in range(0, shape[0], rows):
            try:
                quantized = quantize(weight[first : first + rows], self.format, amax)
            except ValueError as error:
                raise CapabilityError(
                    f"export.quantise: {name}: {error}.\n"
                    "  The run has diverged; export an earlier checkpoint."
                ) from error
            for leaf, rows_of_it in compressed_tensors.of_rows(layer, quantized).items():
                # A row of scales is for `tall` rows.
                yield leaf, first // tall if leaf.endswith("_scale") else first, rows_of_it
            if not first:
                for leaf, tensor in compressed_tensors.of_whole(layer, shape, quantized).items():
                    yield leaf, 0, tensor

    def leaving_out(self, names: Iterable[str]) -> "Quantizer":
        """The same beside these tensors, which are not quantized."""
        layers = {_layer(name) for name in names if name.endswith(".weight")}
        return replace(self, untouched=tuple(sorted({*self.untouched, *layers})))

    @cached_property
    def _siblings(self) -> dict[str, list[str]]:
        siblings: dict[str, list[str]] = {}
        for name in self.shapes:
            siblings.setdefault(_fused_name(name), []).append(name)
        return siblings

    def _fused_amax(self, name: str, weight: torch.Tensor, weights: HFStateDict) -> torch.Tensor:
        """The amax of the fused matrix that a server builds from this one and its siblings."""
        fused = _fused_name(name)
        if fused not in self._largest:
            amaxes = [
                largest(
                    weight if sibling == name else weights.read([sibling])[sibling], self.format
                )
                for sibling in self._siblings[fused]
            ]
            present = torch.stack([amax for amax in amaxes if amax is not None])
            self._largest[fused] = present.amax(0)
        return self._largest[fused]


def quantizer_for(scheme: SchemeName, family: Family, names: WeightMap) -> Quantizer:
    """The quantizer for export of the family's model. Raises CapabilityError if the format does not
    support it."""
    if names.multimodal:
        raise CapabilityError(
            f"export.quantise: {family.model_type} is multimodal, and only text models are "
            "quantized.\n  Leave export.quantise out; servers quantize such a model on loading."
        )
    if names.config.experts and names.config.experts.is_stacked:
        raise CapabilityError(
            f"export.quantise: {family.model_type} keeps all experts of a layer in one tensor, "
            "which the format does not know.\n"
            "  Leave export.quantise out; servers quantize such a model on loading."
        )
    hf_shapes = names.hf_shapes()
    chosen = {
        name: hf_shapes[name]
        for native, _ in matrices(names, family.roles)
        for name in names.hf_names(native)
    }
    stored = names.config.names
    untouched = {
        _layer(name)
        for name, shape in hf_shapes.items()
        if len(shape) == 2 and name not in {*chosen, stored.embedding, stored.positions}
    }
    format = compressed_tensors.format_for(scheme, chosen)
    # A tied head has no tensor, but is a linear layer.
    return Quantizer(scheme, format, chosen, tuple(sorted({*untouched, _layer(HEAD_WEIGHT)})))


def _layer(name: str) -> str:
    return name.removesuffix(".weight")


def _fused_name(name: str) -> str:
    above, _, last = _layer(name).rpartition(".")
    return f"{above}.{ONE_MATRIX.get(last, last)}"
