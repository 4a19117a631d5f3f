"""RoPE angles. They are applied by `penstock_kernels.rope`.

RoPE scaling uses transformers' formulas (`modeling_rope_utils`), so a checkpoint gets the
frequencies that it was trained with.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from penstock.models.decoder_config import LENGTH_DEPENDENT_ROPE, QueryScale, RotaryPairs
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.to_device import to_device


class Rotary:
    """RoPE angles of one model. Not a module and without buffers, so it is neither cast to another
    dtype nor left uninitialized after `to_empty`."""

    def __init__(
        self,
        parameters: Mapping[str, Any],
        *,
        head_dim: int,
        max_position_embeddings: int,
        pairs: RotaryPairs = "halves",
        fp32: bool = False,
        axes: Sequence[int] | None = None,
    ) -> None:
        """`fp32`: angles are not rounded to the dtype of the residual stream. `axes`: the axis of
        positions [T, 3] of each pair of rotated features."""
        model = _RopeFormula(parameters, head_dim, max_position_embeddings)
        # On the CPU even if the model is built on the meta device: the values are needed now.
        with torch.device("cpu"):
            inverse_frequencies, self.attention_factor = model.frequencies()
        self.pairs, self.fp32 = pairs, fp32
        self.inverse_frequencies: list[float] = inverse_frequencies.float().tolist()
        self.model = model if parameters["rope_type"] in LENGTH_DEPENDENT_ROPE else None
        self.axes = axes
        self._copies: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}

    def _on(
        self, device: torch.device, values: Sequence[float], dtype: torch.dtype
    ) -> torch.Tensor:
        # Copied once: a copy in each forward pass would be a host sync in each.
        if (device, dtype) not in self._copies:
            host = torch.tensor(values, dtype=dtype, device="cpu")
            self._copies[device, dtype] = to_device(host, device)
        return self._copies[device, dtype]

    def angles(
        self,
        position_ids_T: torch.Tensor,
        dtype: torch.dtype,
        segments: VarlenMetadata | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of the rotated features, [T, H], on the positions' device; positions
        are [T], or [T, 3] with `axes`.

        Computed in fp32 and, unless the model has its RoPE in fp32, cast to `dtype`. `segments` are
        the documents of all positions, for RoPE types that depend on document lengths.
        """
        device = position_ids_T.device
        if self.model is None:
            inverse = self._on(device, self.inverse_frequencies, torch.float32)
        else:
            assert segments is not None
            lengths_D = segments.cu_seqlens.diff()
            # Without output_size repeat_interleave would read the sum of lengths from the GPU.
            inverse = self.model.frequencies_of(lengths_D).repeat_interleave(
                lengths_D, dim=0, output_size=position_ids_T.shape[0]
            )
        if position_ids_T.ndim == 1:
            positions = position_ids_T[:, None]
        else:
            assert self.axes is not None
            axes = self._on(device, self.axes, torch.int64)
            positions = position_ids_T.index_select(1, axes)  # of each pair, [T, R/2]
        # In 16 bits neighboring positions would become one: bf16 has no odd integers above 256.
        angle = positions.float() * inverse
        factor = self.attention_factor
        if self.pairs == "neighbours":
            both_TH = angle.repeat_interleave(2, dim=-1)
        else:
            both_TH = torch.cat((angle, angle), dim=-1)
        cos_TH, sin_TH = both_TH.cos() * factor, both_TH.sin() * factor
        return (cos_TH, sin_TH) if self.fp32 else (cos_TH.to(dtype), sin_TH.to(dtype))


def query_scale(
    scale: QueryScale, position_ids_T: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """The factor of each token's queries, [T]."""
    # Llama 4's temperature: get_llama_4_attn_scale of transformers' Ministral3, attn_scales of its
    # Llama4TextAttention, which adds 1 to positions.
    steps_T = torch.floor((position_ids_T + scale.first) / scale.length)
    return (1 + scale.beta * torch.log(1 + steps_T)).to(dtype)


@dataclass(frozen=True)
class _RopeFormula:
    """The model parameters in RoPE formulas. R rotated features of a head, D documents."""

    parameters: Mapping[str, Any]
    head_dim: int
    max_position_embeddings: int

    def frequencies(self, length: int | torch.Tensor | None = None) -> tuple[torch.Tensor, float]:
        """Inverse frequencies [R/2] and the attention factor. `length` is the document length;
        None: the length that the model was trained for. For `dynamic` it may be [D, 1], which
        returns [D, R/2]."""
        kind = self.parameters["rope_type"]
        if kind == "default":
            rotary_dim = int(self.head_dim * self.parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float) / rotary_dim
            return 1.0 / (self.parameters["rope_theta"] ** exponents), 1.0
        # A stand-in for a transformers config with the fields that the formulas read. hidden_size
        # and num_attention_heads are there because some formulas compute a default head_dim before
        # they read ours.
        config = SimpleNamespace(
            rope_parameters=dict(self.parameters),
            head_dim=self.head_dim,
            hidden_size=self.head_dim,
            num_attention_heads=1,
            max_position_embeddings=self.max_position_embeddings,
            standardize_rope_params=lambda: None,
        )
        device = length.device if isinstance(length, torch.Tensor) else torch.device("cpu")
        # The import takes half a second, which models without RoPE scaling avoid.
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS  # noqa: PLC0415

        return ROPE_INIT_FUNCTIONS[kind](config, device, seq_len=length)

    def frequencies_of(self, lengths_D: torch.Tensor) -> torch.Tensor:
        lengths_D1 = lengths_D[:, None].float()
        if self.parameters["rope_type"] == "dynamic":
            return self.frequencies(lengths_D1)[0]
        trained = self.parameters["original_max_position_embeddings"]
        # longrope has two tables of frequencies, for lengths up to that of training and beyond.
        short, long = (
            self.frequencies(length)[0].to(lengths_D.device) for length in (trained, trained + 1)
        )
        return torch.where(lengths_D1 > trained, long, short)
