"""Decays within a chunk, and the products of queries or keys with keys that they weaken.

H heads, C tokens of a chunk, K channels of a key; R stacked sides, queries and keys. G is the sum
of log decays up to and including a token. No factor is above 1, so nothing overflows, however
strong a decay.
"""

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, eq=False)
class _Decays:
    sums: torch.Tensor
    """G, [H, C, K], or [H, C, 1] of one decay for all channels."""

    @cached_property
    def since_start(self) -> torch.Tensor:
        """From the chunk's beginning to a token, shaped as `sums`."""
        return self.sums.exp()

    @cached_property
    def until_end(self) -> torch.Tensor:
        """From a token to the chunk's end."""
        return (self.sums[:, -1:] - self.sums).exp()

    @property
    def total(self) -> torch.Tensor:
        """Over the whole chunk, [H, K, 1] or [H, 1, 1]."""
        return self.since_start[:, -1].unsqueeze(-1)


class HeadDecays(_Decays):
    """One decay for all channels."""

    @cached_property
    def _between(self) -> torch.Tensor:
        """From a column's token to a row's, 0 where the column is later, [H, 1, C, C]."""
        differences = self.sums - self.sums.mT
        # The upper triangle may overflow before it is dropped.
        return differences.clamp_(max=0).exp_().tril_().unsqueeze(1)

    def products(self, left_HRCK: torch.Tensor, right_HCK: torch.Tensor) -> torch.Tensor:
        """[H, R, C, C] of a row's product with each column no later than it, decayed between."""
        products = torch.bmm(left_HRCK.flatten(1, 2), right_HCK.mT)
        return products.view(*left_HRCK.shape[:3], -1).mul_(self._between)

    def add_gradients_(
        self,
        dproducts_HRCC: torch.Tensor,
        left_HRCK: torch.Tensor,
        right_HCK: torch.Tensor,
        dleft_HRCK: torch.Tensor,
        dright_HCK: torch.Tensor,
    ) -> None:
        """Add the gradients of both sides. `dproducts_HRCC` is overwritten."""
        slopes = dproducts_HRCC.mul_(self._between).flatten(1, 2)
        dleft_HRCK.flatten(1, 2).baddbmm_(slopes, right_HCK)
        dright_HCK.baddbmm_(slopes.mT, left_HRCK.flatten(1, 2))

    def gradient(self, dsums_HCK: torch.Tensor) -> torch.Tensor:
        """The gradient of log decays from those of G by channel."""
        # A log decay is in its own token's sum and in all later ones.
        return dsums_HCK.sum(-1).flip(-1).cumsum_(-1).flip(-1)


class ChannelDecays(_Decays):
    """A decay of each channel: products are made by halves.

    The later half of a block meets the earlier half at the border between them: rows are decayed
    from the border to them, and columns from them to the border. Halves are halved again.
    """

    @cached_property
    def _halves(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """By the size of a half: decays from the border to the later half's tokens, and from the
        earlier half's tokens to the border, each [H, blocks, half, K]."""
        halves, half = [], self.sums.shape[1] // 2
        while half:
            early, late = _early_and_late(self.sums, half)
            border = early[:, :, -1:]
            halves.append((half, (late - border).exp_(), (border - early).exp_()))
            half //= 2
        return halves

    def products(self, left_HRCK: torch.Tensor, right_HCK: torch.Tensor) -> torch.Tensor:
        """[H, R, C, C] of a row's product with each column no later than it, decayed between."""
        # A token is in no half that meets itself, and nothing decays between.
        products = torch.diag_embed((left_HRCK * right_HCK.unsqueeze(1)).sum(-1))
        for half, to_late, to_border in self._halves:
            early = _early_and_late(right_HCK, half)[0] * to_border
            for strip in range(left_HRCK.shape[1]):
                late = _early_and_late(left_HRCK[:, strip], half)[1] * to_late
                _below_border(products[:, strip], half).copy_(late @ early.mT)
        return products

    def add_gradients_(
        self,
        dproducts_HRCC: torch.Tensor,
        left_HRCK: torch.Tensor,
        right_HCK: torch.Tensor,
        dleft_HRCK: torch.Tensor,
        dright_HCK: torch.Tensor,
    ) -> None:
        """Add the gradients of both sides."""
        diagonal_HRC1 = dproducts_HRCC.diagonal(0, 2, 3).unsqueeze(-1)
        dleft_HRCK.addcmul_(diagonal_HRC1, right_HCK.unsqueeze(1))
        dright_HCK += (diagonal_HRC1 * left_HRCK).sum(1)
        for half, to_late, to_border in self._halves:
            early = _early_and_late(right_HCK, half)[0] * to_border
            dearly = _early_and_late(dright_HCK, half)[0]
            for strip in range(left_HRCK.shape[1]):
                slopes = _below_border(dproducts_HRCC[:, strip], half)
                late = _early_and_late(left_HRCK[:, strip], half)[1] * to_late
                dlate = _early_and_late(dleft_HRCK[:, strip], half)[1]
                dlate.addcmul_(slopes @ early, to_late)
                dearly.addcmul_(slopes.mT @ late, to_border)

    def gradient(self, dsums_HCK: torch.Tensor) -> torch.Tensor:
        """The gradient of log decays from that of G."""
        return dsums_HCK.flip(1).cumsum_(1).flip(1)


Decays = HeadDecays | ChannelDecays


def chunk_decays(log_decay: torch.Tensor) -> Decays:
    """Of chunks' log decays, [H, C] or [H, C, K]."""
    sums = log_decay.cumsum(1)
    return HeadDecays(sums.unsqueeze(-1)) if sums.ndim == 2 else ChannelDecays(sums)


def _early_and_late(x_HCK: torch.Tensor, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of blocks' earlier and later halves, each [H, blocks, half, K]."""
    early, late = x_HCK.unflatten(1, (-1, 2, half)).unbind(2)
    return early, late


def _below_border(x_HCC: torch.Tensor, half: int) -> torch.Tensor:
    """A view of the later halves' rows at the earlier halves' columns, [H, blocks, half, half]."""
    blocks = x_HCC.unflatten(2, (-1, 2 * half)).unflatten(1, (-1, 2 * half))
    return blocks.diagonal(0, 1, 3).movedim(-1, 1)[..., half:, :half]
