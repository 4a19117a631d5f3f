"""Stateless dropout: masks do not depend on earlier random draws.

The mask is a function of the run's seed, the step, the site's name, the token and the feature. The
rate is a function of the step and the layer. So the parallel layout, the order of micro-batches and
activation recomputation do not change it, and a resumed run draws the same masks.

T tokens, F features.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from penstock.models.layers.call_hook import no_op
from penstock.models.layers.module_registry import OpModule, module_by_id
from penstock.models.layers.pass_state import PassState
from penstock_kernels.custom_op import operator
from penstock_kernels.dropout import dropout, on_host
from penstock_kernels.permute import Order


@dataclass(frozen=True)
class DropoutRNG:
    """The inputs of dropout masks in a forward pass."""

    seed: int
    step: int
    """Optimizer step, from 0."""
    token_indices_T: torch.Tensor  # noqa: N815 - T names the dimension
    """Index in the data of each token of the pass, int64."""
    any_rows: bool = False
    """Whether layers may have other inputs than the tokens of the pass, as in transformers' code,
    which calls layers with the tokens of an expert, or with patches of images."""

    def select(self, selection: torch.Tensor | slice) -> "DropoutRNG":
        return replace(self, token_indices_T=self.token_indices_T[selection])

    def indices(self, rows: int) -> torch.Tensor:
        # Indices of the tokens, or other ones if there are so many rows instead of tokens.
        tokens_T = self.token_indices_T
        if self.any_rows and rows != len(tokens_T):
            return tokens_T[0] + torch.arange(rows, device=tokens_T.device)
        return tokens_T

    def key(self, site: str) -> int:
        text = f"{self.seed}:{self.step}:{site}".encode()
        # Not hash(), which for text differs from process to process.
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


_RNG = PassState[DropoutRNG]("dropout_rng")
dropout_rng = _RNG.use
"""Context manager that sets the RNG of dropout; None disables dropout."""
current_dropout_rng = _RNG.get
preserve_dropout_rng = _RNG.preserve


@dataclass(frozen=True)
class DropoutRates:
    """The dropout rates of a model."""

    hidden: float = 0.0
    """Rate for the outputs of attention and feed-forward networks before the residual addition."""
    ffn: float = 0.0
    """Rate for the inputs of `down_proj` of a feed-forward network."""
    attention: float = 0.0
    """Rate for attention probabilities."""
    warmup_steps: int = 0
    """Linear warmup: the rate is 0 in the first step and reaches its full value after so many
    steps; 0: no warmup."""
    depth: Literal["alike", "rising"] = "alike"
    """`alike`: one rate for all layers; `rising`: layer l of L, from 0, has l / L of the
    rate."""

    def site(
        self, of: Literal["hidden", "ffn"], part: str, layer: int, num_layers: int
    ) -> "Dropout":
        """The dropout of layer `layer`, from 0, for the output of `part`."""
        rate = self.hidden if of == "hidden" else self.ffn
        return Dropout(
            rate, f"model.layers.{layer}.{part}", **self._rate_schedule(layer, num_layers)
        )

    def of_weights(self, layer: int, num_layers: int) -> "WeightDropout":
        """The dropout of layer `layer`, from 0, for attention probabilities."""
        site = f"model.layers.{layer}.self_attn.weights"
        return WeightDropout(self.attention, site, **self._rate_schedule(layer, num_layers))

    def _rate_schedule(self, layer: int, num_layers: int) -> dict[str, Any]:
        share = layer / num_layers if self.depth == "rising" else 1.0
        return {"share": share, "warmup_steps": self.warmup_steps}


NO_DROPOUT = DropoutRates()


class Dropout(OpModule):
    """Dropout at one site of a model, in training only.

    The site has the checkpoint name of the tensor's producer, so models that are sharded or fused
    differently draw the same masks. Under sequence parallelism the `local_token_indices` hook maps
    the token indices of the pass to those of the local tokens. Under tensor parallelism
    `first_feature` is the first local feature.
    """

    def __init__(
        self, rate: float, site: str, *, share: float = 1.0, warmup_steps: int = 0
    ) -> None:
        """The rate after `warmup_steps` is `share * rate`."""
        super().__init__()
        self.site = site
        self.is_enabled = rate > 0
        """Whether the rate is nonzero anywhere. Compiled code may depend on this but not on the
        rate, which differs by layer and step."""
        self._rate, self._warmup_steps = rate * share, warmup_steps
        self.first_feature = 0
        self.local_token_indices: Callable[[torch.Tensor], torch.Tensor] = no_op

    def forward(self, x_TF: torch.Tensor) -> torch.Tensor:
        """Apply dropout to [T, F]; what is kept is divided by the keep probability."""
        if not (self.training and self.is_enabled):
            return x_TF
        op_id = self.traced_op_id()
        if op_id is not None:
            # Detached: the operator has no gradient, and reads the number of rows alone.
            places_T, rate, key = _mask_inputs_op(x_TF.detach(), op_id)
            return dropout(x_TF, places_T, rate, key, self.first_feature)
        rng = current_dropout_rng()
        rate = self.rate_in(rng.step) if rng else 0.0
        if rng is None or not rate:
            return x_TF
        places_T = self.local_token_indices(rng.indices(len(x_TF)))
        return dropout(x_TF, places_T, rate, rng.key(self.site), self.first_feature)

    def rate_in(self, step: int) -> float:
        """The rate in this step, from 0."""
        warmup = self._warmup_steps
        return self._rate * step / warmup if step < warmup else self._rate

    def extra_repr(self) -> str:
        return f"{self._rate}, site={self.site}"


class WeightDropout(Dropout):
    """Dropout of attention probabilities. The mask depends on the query's token, the head and the
    key's position in its document. Heads may be sharded; tokens may not.

    N heads, L tokens of a document.
    """

    def drop_probs(self, weights_NLL: torch.Tensor, first: int) -> torch.Tensor:
        """Apply dropout to the probabilities [N, L, L] of the document that starts at token
        `first`."""
        rng = current_dropout_rng()
        rate = self.rate_in(rng.step) if rng and self.training else 0.0
        if rng is None or not rate:
            return weights_NLL
        heads, length = weights_NLL.shape[:2]
        places_L = rng.token_indices_T[first : first + length]
        # A feature is a (head, key) pair; features of earlier heads are on other ranks.
        weights_LF = weights_NLL.transpose(0, 1).flatten(1)
        key, first_feature = rng.key(self.site), self.first_feature * length
        kept_LF = dropout(weights_LF, places_L, rate, key, first_feature)
        return kept_LF.unflatten(1, (heads, length)).transpose(0, 1)


class RowDropout(Dropout):
    """Dropout of the rows that are sent to experts: every choice of a token has a mask of its own,
    wherever its expert is.

    R rows, K choices of a token.
    """

    def indices(self, order: Order) -> torch.Tensor | None:
        """An index of each row of `order`, int64 [R]; None without dropout."""
        rng, (num_tokens, num_choices) = current_dropout_rng(), order.row_of_copy.shape
        if rng is None or not self.training:
            return None
        token_indices_T = self.local_token_indices(rng.indices(num_tokens))
        token_R = order.copy_of_row // num_choices
        return token_indices_T[token_R] * num_choices + order.copy_of_row % num_choices

    def drop_rows(self, x_RF: torch.Tensor, part: str) -> torch.Tensor:
        """Apply dropout to the inputs of a part of the experts, within `rows_rng`."""
        rng = current_dropout_rng()
        if rng is None or not self.training:
            return x_RF
        key = rng.key(f"{self.site}.{part}")
        return dropout(x_RF, rng.token_indices_T, self.rate_in(rng.step), key)


def rows_rng(indices_R: torch.Tensor | None) -> AbstractContextManager[None]:
    """Context manager in which the tokens of the RNG are rows with these `RowDropout.indices`."""
    rng = current_dropout_rng()
    if rng is not None and indices_R is not None:
        rng = replace(rng, token_indices_T=indices_R)
    return dropout_rng(rng)


def _mask_inputs(
    x: torch.Tensor, op_id: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # Token indices, rate and key for the current step, for compiled code. Without an RNG the rate
    # is 0, which drops nothing.
    site, rng = module_by_id(op_id), current_dropout_rng()
    assert isinstance(site, Dropout)
    if rng is None:
        return x.new_zeros(len(x), dtype=torch.int64), *on_host(0.0, 0)
    # A copy, because compiled code may reuse the buffer of an operator's output.
    places_T = site.local_token_indices(rng.token_indices_T).clone()
    # As tensors: numbers would be constants of compiled code, and both differ by step.
    return places_T, *on_host(site.rate_in(rng.step), rng.key(site.site))


def _mask_inputs_fake(
    x: torch.Tensor, op_id: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del op_id
    positions = x.new_empty(x.shape[0], dtype=torch.int64)
    rate, key = (
        x.new_empty((), dtype=dtype, device="cpu") for dtype in (torch.float64, torch.int64)
    )
    return positions, rate, key


_mask_inputs_op = operator("dropout_draws", _mask_inputs, fake=_mask_inputs_fake)
