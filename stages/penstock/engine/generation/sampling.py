"""Token sampling: temperature, top-k, top-p, with a seed per request.

A sample depends only on the logits and one uniform number, which depends on the seed and the
token's index: not on other samples in the batch.

S tokens to sample, R those with temperature above 0, V vocabulary, in B blocks of W entries.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from penstock.core.errors import ConfigError
from penstock_kernels.to_device import to_device

# `top_k` of the whole vocabulary (disabled).
NO_TOP_K = -1

# Clamps of the temperature: beyond them it changes nothing, and division would overflow fp32.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-30, 1e30

# Vocabulary entries per block of the two-level cumulative sum.
BLOCK = 256


@dataclass(frozen=True)
class SamplingParams:
    """The sampling parameters of one prompt."""

    max_tokens: int | None = None
    """None: until the model's context is full."""
    temperature: float = 1.0
    """0: greedy decoding; the lowest token id wins ties."""
    top_k: int = NO_TOP_K
    """Sample only from the k most likely tokens, and ties with the last of them."""
    top_p: float = 1.0
    """Sample only from the smallest set of most likely tokens with at least this probability."""
    seed: int | None = None
    """None: a new random seed each time."""
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ConfigError(f"max_tokens is {self.max_tokens}. Write 0 or more.")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}. Write 0 for greedy decoding, or more."
            )
        if self.top_k != NO_TOP_K and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}. Write 1 or more, or {NO_TOP_K} for all.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}. Write more than 0, and at most 1.")
        if "" in self.stop_texts:
            raise ConfigError("a stop text is empty, and would stop every answer at once.")


def uniform(seed: int, sample: int, index: int) -> float:
    """The uniform number in [0, 1) that samples token `index` of completion `sample`."""
    packed = struct.pack("<Qqq", seed % 2**64, sample, index)
    digest = hashlib.blake2b(packed, digest_size=8).digest()
    # 53 bits, which a double holds exactly: the result is never rounded to 1.
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample_token(
    logits_SV: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample a token from each row of fp32 logits.

    Returns int64 [S] and the log-probs under the model at temperature 1, without truncation, fp32
    [S]. Logits are finite or -inf. For a row with other values the log-prob is not finite, and the
    token is arbitrary.

    A token is the first in the vocabulary whose cumulative probability exceeds the row's uniform
    number, so nearly equal logits give the same token.
    """
    # The maximum is 0 at any temperature.
    shifted_SV = logits_SV - logits_SV.amax(-1, keepdim=True)
    weights_SV = shifted_SV.exp()
    log_sums_S = weights_SV.sum(-1).log_()
    rows = [row for row, own in enumerate(params) if own.temperature > 0]
    if len(rows) == len(params):
        tokens_S = _sample(shifted_SV, weights_SV, params, uniforms)
    else:
        # argmax returns the first of equal values in PyTorch.
        tokens_S = shifted_SV.argmax(1)
        if rows:
            chosen = [params[row] for row in rows], [uniforms[row] for row in rows]
            tokens_S[rows] = _sample(shifted_SV[rows], weights_SV[rows], *chosen)
    return tokens_S, shifted_SV.gather(1, tokens_S[:, None]).squeeze(1) - log_sums_S


def _sample(
    shifted_RV: torch.Tensor,
    weights_RV: torch.Tensor,
    params: Sequence[SamplingParams],
    uniforms: Sequence[float],
) -> torch.Tensor:
    """Sample from logits of at most 0 and their exponentials, which may be overwritten."""
    if any(r.temperature != 1 for r in params):
        temperatures = [min(max(r.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE) for r in params]
        weights_RV = (shifted_RV / _column(temperatures, shifted_RV)).exp_()
    return _search_cumulative(uniforms, _apply_top_k_top_p(weights_RV, params))


def _search_cumulative(shares: Sequence[float], weights_RV: torch.Tensor) -> torch.Tensor:
    """int64 [R]: each row's first entry whose cumulative sum exceeds this share of the total."""
    # Blocks are summed first, and then the entries of one block, so that few sums need fp64.
    size = weights_RV.shape[1]
    runs_RB = weights_RV[:, : size // BLOCK * BLOCK].unflatten(1, (-1, BLOCK)).sum(-1)
    if size % BLOCK:
        rest_R1 = weights_RV[:, size // BLOCK * BLOCK :].sum(-1, keepdim=True)
        runs_RB = torch.cat((runs_RB, rest_R1), dim=1)
    sums_RB = runs_RB.double().cumsum(-1)
    aims_R1 = _below(_column(shares, sums_RB) * sums_RB[:, -1:], sums_RB[:, -1:])
    # `right`: the first sum above the aim, so no entry of weight 0 is sampled.
    # With non-finite sums the token is arbitrary.
    run_R1 = torch.searchsorted(sums_RB, aims_R1, right=True).clamp_(max=runs_RB.shape[1] - 1)
    aims_R1 = aims_R1 - F.pad(sums_RB, (1, 0)).gather(1, run_R1)
    within_RW = run_R1 * BLOCK + torch.arange(BLOCK, device=weights_RV.device)
    own_RW = weights_RV.gather(1, within_RW.clamp(max=size - 1)).double()
    sums_RW = own_RW.masked_fill_(within_RW >= size, 0).cumsum_(-1)
    aims_R1 = _below(aims_R1, sums_RW[:, -1:])
    found_R1 = run_R1 * BLOCK + torch.searchsorted(sums_RW, aims_R1, right=True)
    return found_R1.squeeze(1).clamp_(max=size - 1)


def _below(aims_R1: torch.Tensor, sums_R1: torch.Tensor) -> torch.Tensor:
    # Below the total: rounded up to it, no entry would exceed it.
    return torch.minimum(aims_R1, torch.nextafter(sums_R1, torch.zeros_like(sums_R1)))


def _apply_top_k_top_p(weights_RV: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """Apply top-k, then top-p: set the other weights to 0, in place."""
    vocabulary = weights_RV.shape[1]
    tops = {row: own.top_k for row, own in enumerate(params) if 0 < own.top_k < vocabulary}
    if tops:
        rows = [*tops]
        limited_RV = weights_RV[rows]
        best = limited_RV.topk(max(tops.values()), dim=-1).values
        last = to_device(torch.tensor([[top - 1] for top in tops.values()]), limited_RV.device)
        weights_RV[rows] = limited_RV.masked_fill(limited_RV < best.gather(1, last), 0)
    rows = [row for row, own in enumerate(params) if own.top_p < 1]
    if rows:
        limited_RV = weights_RV[rows]
        ordered = limited_RV.sort(dim=-1, descending=True).values
        # fp64: sums in fp32 would leave out weights of less than 2^-24 of them.
        sums = ordered.cumsum(-1, dtype=torch.float64)
        # A token is kept if those before it do not reach top_p.
        reached = _column([params[row].top_p for row in rows], sums) * sums[:, -1:]
        stays = sums - ordered < reached
        lowest = ordered.masked_fill(~stays, float("inf")).amin(-1, keepdim=True)
        weights_RV[rows] = limited_RV.masked_fill(limited_RV < lowest, 0)
    return weights_RV


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return to_device(torch.tensor(values, dtype=like.dtype), like.device)[:, None]
