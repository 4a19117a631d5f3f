"""Our attention over packed documents, for transformers models that select attention by name.

B sequences of L tokens (one packed sequence in training), N query heads, K key heads, H head
dimension.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.layers.attention import AttentionFn
from penstock.models.layers.autocast import as_autocast
from penstock.models.layers.pass_state import PassState
from penstock_kernels.attention import VarlenMetadata, attention
from penstock_kernels.attention.reference import eager
from penstock_kernels.op import UnsupportedError

NAME = "penstock_varlen"

_DOCUMENTS = PassState[tuple[VarlenMetadata, AttentionFn]]("documents")
keep_documents = _DOCUMENTS.preserve


def register() -> None:
    """Register the attention under `NAME`. It has no mask function, so models build no masks."""
    from transformers import AttentionInterface  # noqa: PLC0415 - half a second

    AttentionInterface.register(NAME, varlen_attention)


def attention_over(
    segments: VarlenMetadata, attend: AttentionFn = attention
) -> AbstractContextManager[None]:
    """Context manager: the documents of the tokens that the model is called with."""
    return _DOCUMENTS.use((segments, attend))


def varlen_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each document, with transformers' interface.

    `query` [B, N, L, H], `key` and `value` [B, K, L, H] in, [B, L, N, H] out. Values may be
    narrower or wider than keys.

    Raises UnsupportedError for attention that is not causal, or with a mask or a score function
    of the model's own; the model is then run with transformers' attention.
    """
    if attention_mask is not None:
        raise UnsupportedError("attention with a mask of the model's own")
    if kwargs.get("is_causal") is False or not getattr(module, "is_causal", True):
        raise UnsupportedError("attention that is not causal")
    if unknown := [
        name for name in ("position_bias", "indexer_mask") if kwargs.get(name) is not None
    ]:
        raise UnsupportedError(f"attention with {unknown[0]}")
    current = _DOCUMENTS.get()
    batch, _, length, width = query.shape
    if key.shape[2] != length:
        raise UnsupportedError("keys of other tokens than the queries'")
    # The documents of one packed sequence, or each sequence of a batch.
    segments, attend = current or (None, attention)
    if segments is None or batch > 1:
        segments = VarlenMetadata.of([length] * batch, query.device)
    scale = width**-0.5 if scaling is None else scaling
    # Norms and rotary embeddings of some models return fp32, as autocast expects of them.
    value = as_autocast(value)
    query, key = query.to(value.dtype), key.to(value.dtype)
    q_TNH, k_TKH, v_TKH = (x.transpose(1, 2).flatten(0, 1) for x in (query, key, value))
    value_width = v_TKH.shape[-1]
    # Kernels take queries, keys and values of one width; zeros change neither scores nor outputs.
    if value_width != width:
        widest = max(width, value_width)
        q_TNH, k_TKH, v_TKH = (F.pad(x, (0, widest - x.shape[-1])) for x in (q_TNH, k_TKH, v_TKH))
    args = (q_TNH, k_TKH, v_TKH, segments, scale, sliding_window, s_aux)
    if dropout:
        drop = partial(F.dropout, p=dropout)
        y_TNH = eager(*args, softcap, drop=lambda weights, _first: drop(weights))
    else:
        y_TNH = attend(*args, softcap)
    y_TNH = y_TNH[..., :value_width]
    return y_TNH.unflatten(0, (batch, length)), None
