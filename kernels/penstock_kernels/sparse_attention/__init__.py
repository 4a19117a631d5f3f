"""DeepSeek Sparse Attention (DSA): a lightning indexer scores the earlier tokens of each document,
and a token attends to the top k of them (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1).
"""

from collections.abc import Mapping

import torch

from penstock_kernels.op import HAS_TRITON, KernelImpl, Op
from penstock_kernels.sparse_attention import chunked as _chunked
from penstock_kernels.sparse_attention.indexer_loss import ALONE, HeadSharing, indexer_loss
from penstock_kernels.sparse_attention.queries import PartialSegments
from penstock_kernels.sparse_attention.reference import index_scores, top_k_keys
from penstock_kernels.sparse_attention.reference import latent_sparse_attention as _of_latents
from penstock_kernels.sparse_attention.reference import sparse_attention as _reference


def _supports_all(*args: object, **kwargs: object) -> None:
    del args, kwargs


__all__ = [
    "ALONE",
    "HeadSharing",
    "PartialSegments",
    "index_scores",
    "indexer_loss",
    "latent_sparse_attention",
    "select_keys",
    "sparse_attention",
]

_SELECT: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
_LATENT: Mapping[str, KernelImpl[..., torch.Tensor]] = {}
if HAS_TRITON:
    from penstock_kernels.sparse_attention import latent as _latent
    from penstock_kernels.sparse_attention import triton_select as _triton_select

    _SELECT = {
        "triton": KernelImpl(
            _triton_select.select_keys, _triton_select.unsupported_reason, language="triton"
        )
    }
    _LATENT = {
        "triton": KernelImpl(
            _latent.latent_sparse_attention, _latent.unsupported_reason, language="triton"
        )
    }

select_keys: Op[..., torch.Tensor] = Op(
    "select_keys",
    top_k_keys,
    {**_SELECT, "chunked": KernelImpl(_chunked.select_keys, _supports_all)},
)

sparse_attention = Op(
    "sparse_attention",
    _reference,
    {"chunked": KernelImpl(_chunked.sparse_attention, _supports_all)},
)

latent_sparse_attention: Op[..., torch.Tensor] = Op("latent_sparse_attention", _of_latents, _LATENT)
