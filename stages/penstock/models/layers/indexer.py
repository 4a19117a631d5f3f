"""The lightning indexer of DeepSeek Sparse Attention.

T tokens, D model width, Q size of the latent vector of queries, P features with RoPE; J heads, I
their width; S selected tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import nn

from penstock.models.decoder_config import DecoderConfig
from penstock.models.latent_config import IndexerConfig
from penstock.models.layers.layer_ops import DEFAULT_LAYER_OPS, LayerOps
from penstock.models.layers.norm import LayerNorm
from penstock.models.layers.pass_state import PassState
from penstock.models.layers.router import AddAuxLoss
from penstock_kernels.attention import VarlenMetadata
from penstock_kernels.sparse_attention import ALONE, index_scores, indexer_loss, select_keys
from penstock_kernels.sparse_attention.reference import highest

R = TypeVar("R")

# Epsilon of the norm of keys, as in transformers.
NORM_EPS = 1e-6


_IS_FIRST = PassState[bool]("is_first")


def defer_losses(run: Callable[..., R]) -> Callable[..., R]:
    """Wrap `run`, which is called a second time in the backward pass: only then are losses of
    indexers computed."""
    is_first = True

    def run_deferring(*args: Any) -> R:
        nonlocal is_first
        deferred, is_first = is_first, False
        with _IS_FIRST.use(deferred):
            return run(*args)

    return run_deferring


Index = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries [T, J, I] and keys [T, I] with RoPE, and the weights of heads, scaled, fp32 [T, J]."""

LOSS = "indexer loss"
"""Its key in the memo of documents."""


@dataclass(frozen=True)
class IndexerLoss:
    """The loss of the indexers in the passes of one micro-batch. It is `LOSS` of the memo of
    its documents, so that a recomputed layer finds it."""

    scale: float
    """Factor of the sum over tokens."""
    num_tokens: int
    """Tokens before padding."""
    sums: dict[nn.Module, torch.Tensor] = field(default_factory=dict)
    """The sum over tokens for each indexer, unscaled."""


class AllKeys(Protocol):
    """What context parallelism replaces: where the keys of all tokens come from."""

    def segments(self, segments: VarlenMetadata) -> VarlenMetadata:
        """The documents of all tokens, of which some are the queries."""
        ...

    def gather(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Features [T, ...] of all tokens, in the order of the documents. Gradients of all ranks
        are added."""
        ...


class _KeysHere:
    """All tokens are on this rank."""

    def segments(self, segments: VarlenMetadata) -> VarlenMetadata:
        return segments

    def gather(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return parts


class Indexer(nn.Module):
    """Scores of earlier tokens, `sum_j weight_j * relu(q_j . k)`, of which the top k are attended
    to.

    The selection has no gradient, so its parameters are frozen, as in transformers, or trained by a
    loss of their own, which changes no others: its gradient enters in the layer's backward pass,
    as that of a router's auxiliary loss does. In the dense warm-up nothing is selected.

    The published inference code computes scores in FP8 after a Hadamard transform, which does not
    change them otherwise; here they are in fp32, as in transformers.
    """

    def __init__(self, config: DecoderConfig, *, operations: LayerOps = DEFAULT_LAYER_OPS) -> None:
        super().__init__()
        latent = config.latent
        assert latent is not None
        assert latent.indexer is not None
        assert latent.q_rank is not None
        self.sizes: IndexerConfig = latent.indexer
        self.rope_dim, self.rope = latent.rope_dim, operations.rope
        self.repairs = config.rope_pairs == "neighbours" and self.sizes.rope_pairs == "halves"
        heads, width = self.sizes.heads, self.sizes.head_dim
        self.wq_b = nn.Linear(latent.q_rank, heads * width, bias=False)
        self.wk = nn.Linear(config.hidden_size, width, bias=False)
        self.k_norm = LayerNorm(width, NORM_EPS)
        self.weights_proj = nn.Linear(config.hidden_size, heads, bias=False)
        self.requires_grad_(False)
        self.is_warmup = False
        self.keys: AllKeys = _KeysHere()
        """A hook for context parallelism: each rank has some of the tokens."""
        self.sharing = ALONE
        """A hook for tensor parallelism: attention has some of the heads on each rank."""

    @staticmethod
    def current_loss(segments: VarlenMetadata) -> IndexerLoss | None:
        return segments.memo.get(LOSS) if torch.is_grad_enabled() else None

    def selects(self, segments: VarlenMetadata) -> bool:
        """Whether a token of these documents has more earlier ones than it attends to."""
        key_segments = self.keys.segments(segments)
        return key_segments.max_length > self.sizes.top_k and not self.is_warmup

    def forward(
        self,
        x_TD: torch.Tensor,
        q_latent_TQ: torch.Tensor,
        cos_TP: torch.Tensor,
        sin_TP: torch.Tensor,
    ) -> Index:
        """What tokens are selected by. Its inputs get no gradient."""
        x_TD, q_latent_TQ = x_TD.detach(), q_latent_TQ.detach()
        heads, width = self.sizes.heads, self.sizes.head_dim
        q_TJI = self.wq_b(q_latent_TQ).unflatten(-1, (heads, width))
        k_T1I = self.k_norm(self.wk(x_TD)).unsqueeze(1)
        split = (self.rope_dim, width - self.rope_dim)
        (q_TJP, q_TJR), (k_T1P, k_T1R) = (x.split(split, dim=-1) for x in (q_TJI, k_T1I))
        if self.repairs:
            # Of each pair's angle, which is there twice, the other order.
            cos_TP, sin_TP = (x_TP[:, ::2].repeat(1, 2) for x_TP in (cos_TP, sin_TP))
        q_TJP, k_T1P = self.rope(q_TJP, k_T1P, cos_TP, sin_TP, self.sizes.rope_pairs)
        q_TJI, k_T1I = torch.cat((q_TJP, q_TJR), -1), torch.cat((k_T1P, k_T1R), -1)
        wide = torch.promote_types(x_TD.dtype, torch.float32)
        # transformers 5.23 keeps this matrix in fp32 (`_keep_in_fp32_modules`); autocast would
        # round it.
        with torch.autocast(x_TD.device.type, enabled=False):
            # A layer with an adapter, or quantized, has no single matrix to cast.
            if type(self.weights_proj) is nn.Linear:
                weight_TJ = F.linear(x_TD.to(wide), self.weights_proj.weight.to(wide))
            else:
                weight_TJ = self.weights_proj(x_TD).to(wide)
        # Both scales of transformers at once: a positive factor of a score passes through its relu.
        return q_TJI, k_T1I.squeeze(1), weight_TJ * (heads * width) ** -0.5

    def select(self, index: Index, segments: VarlenMetadata) -> torch.Tensor:
        """The tokens that each token attends to, int32 [T, S]; see `select_keys`."""
        return select_keys(*index, segments, self.sizes.top_k)

    def add_loss(
        self,
        loss: IndexerLoss,
        y_TNH: torch.Tensor,
        index: Index,
        q_TNH: torch.Tensor,
        k_TNH: torch.Tensor,
        selected_TS: torch.Tensor | None,
        segments: VarlenMetadata,
        scale: float,
    ) -> torch.Tensor:
        """The output of attention unchanged, with the gradient of the loss; see `indexer_loss`."""
        args = selected_TS, segments, scale, loss.num_tokens, self.sharing
        deferred = bool(_IS_FIRST.get())
        total = indexer_loss(index, q_TNH, k_TNH, *args, deferred=deferred)
        if not deferred:
            loss.sums[self] = total.detach()
        return AddAuxLoss.apply(y_TNH, total * loss.scale)

    @torch.no_grad()
    def cached_mask(
        self,
        q_BJI: torch.Tensor,
        k_BCI: torch.Tensor,
        weight_BJ: torch.Tensor,
        visible_BC: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """Which cached tokens each sequence's newest token attends to, bool [B, C]; None: all.
        `visible_BC` are its own."""
        if self.is_warmup or k_BCI.shape[1] <= self.sizes.top_k:
            return visible_BC
        scores_BC = torch.stack(
            [
                index_scores(q_JI[None], k_CI, weight_J[None])[0]
                for q_JI, k_CI, weight_J in zip(q_BJI, k_BCI, weight_BJ, strict=True)
            ]
        )
        if visible_BC is not None:
            scores_BC = scores_BC.masked_fill(~visible_BC, float("-inf"))
        chosen_BS = highest(scores_BC, self.sizes.top_k)
        mask_BC = torch.zeros_like(scores_BC, dtype=torch.bool).scatter_(1, chosen_BS, True)
        # Top-k of a sequence with fewer tokens than k also chooses keys that are not its own.
        return mask_BC if visible_BC is None else mask_BC & visible_BC
