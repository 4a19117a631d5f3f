"""DeepSeek Sparse Attention (DSA): a lightning indexer scores the earlier tokens of each document,
and a token attends to the top k of them (DeepSeek-AI 2025, "DeepSeek-V3.2", section 2.1).
"""

import torch

from penstock_kernels.op import KernelImpl, Op, supports_all, triton_backend
from penstock_kernels.sparse_attention import chunked as _chunked
from penstock_kernels.sparse_attention.indexer_loss import ALONE, HeadSharing, indexer_loss
from penstock_kernels.sparse_attention.queries import PartialSegments
from penstock_kernels.sparse_attention.reference import index_scores, top_k_keys
from penstock_kernels.sparse_attention.reference import latent_sparse_attention as _of_latents
from penstock_kernels.sparse_attention.reference import sparse_attention as _reference

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

select_keys: Op[..., torch.Tensor] = Op(
    "select_keys",
    top_k_keys,
    {
        **triton_backend("sparse_attention.triton_select:select_keys", "unsupported_reason"),
        "chunked": KernelImpl(_chunked.select_keys, supports_all),
    },
)

sparse_attention = Op(
    "sparse_attention",
    _reference,
    {"chunked": KernelImpl(_chunked.sparse_attention, supports_all)},
)

latent_sparse_attention: Op[..., torch.Tensor] = Op(
    "latent_sparse_attention",
    _of_latents,
    triton_backend("sparse_attention.latent:latent_sparse_attention", "unsupported_reason"),
)
