"""The arguments with which transformers models are called. T packed tokens."""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock_kernels.attention import VarlenMetadata


def packed_inputs(position_ids_T: torch.Tensor, segments: VarlenMetadata) -> dict[str, Any]:
    """What tells a model the documents of one packed sequence."""
    return {
        # No attention_mask: with one, or with a cache, transformers (5.23, masking_utils) does not
        # look for documents in position_ids, and they would see one another without an error.
        "position_ids": position_ids_T[None],
        "cu_seq_lens_q": segments.cu_seqlens,
        "cu_seq_lens_k": segments.cu_seqlens,
        "max_length_q": segments.max_length,
        "max_length_k": segments.max_length,
    }


def accepted(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the inputs that the model's forward takes."""
    params = inspect.signature(model.forward).parameters
    takes_any = any(param.kind is param.VAR_KEYWORD for param in params.values())
    return {name: value for name, value in inputs.items() if takes_any or name in params}
