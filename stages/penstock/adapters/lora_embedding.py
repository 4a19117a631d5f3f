"""LoRA on an embedding.

T tokens, V vocabulary, D model width. A is [r, V] and B [D, r], as in PEFT: a token's embedding is
its row of the table plus its column of s B A. With DoRA the columns of the sum are rescaled to
trained magnitudes.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from penstock.adapters.dora import Normed, SumSquares, column_norms, dora_scale, no_reduce
from penstock.adapters.lora import empty_lora_params
from penstock.adapters.weight_delta import LoraDelta

LookUp = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""Maps token ids [T] and a table [V, F] to rows [T, F]."""

PART = "embed_tokens"


class LoraEmbedding(nn.Embedding):
    """An embedding with a frozen table and one pair of LoRA matrices.

    It takes over the base layer's Parameter under the same name. Three hooks serve
    vocabulary-parallel embeddings: `lookup`, `reduce_output` (applied to the output) and
    `sum_squares`.
    """

    def __init__(
        self, base: nn.Embedding, *, rank: int, scale: float, normed: Normed = "plain"
    ) -> None:
        super().__init__(base.num_embeddings, base.embedding_dim, device="meta")
        self.weight = base.weight
        self.requires_grad_(False)
        self.scale = scale
        self.lookup: LookUp = F.embedding
        self.reduce_output: Callable[[torch.Tensor], torch.Tensor] = no_reduce
        self.sum_squares: SumSquares = no_reduce
        device = base.weight.device
        self.lora_A = empty_lora_params({PART: (rank, base.num_embeddings)}, device)
        self.lora_B = empty_lora_params({PART: (base.embedding_dim, rank)}, device)
        norms = {PART: (base.embedding_dim,)} if normed == "dora" else {}
        self.lora_magnitude = empty_lora_params(norms, device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        x_TD = self.lookup(input, self.weight)
        more_TD = F.linear(self.lookup(input, self.lora_A[PART].T), self.lora_B[PART]) * self.scale
        if PART in self.lora_magnitude:
            by_D = dora_scale(self.lora_magnitude[PART], self._norms())
            return self.reduce_output((by_D * (x_TD + more_TD)).to(x_TD.dtype))
        return self.reduce_output(x_TD + more_TD.to(x_TD.dtype))

    @torch.no_grad()
    def init_magnitudes(self) -> None:
        for magnitude in self.lora_magnitude.values():
            magnitude.copy_(self._norms())

    def _norms(self) -> torch.Tensor:
        a, b = (factors[PART].detach().float() for factors in (self.lora_A, self.lora_B))
        return column_norms(self.weight, LoraDelta(a.T, b.T, self.scale), self.sum_squares)
