"""How the next token is drawn from a model's logits. What is drawn depends on the logits and on one
number alone, and that number on a seed and on which token it is for: not on what else is drawn.

S tokens to draw, R those that are not simply the likeliest, V vocabulary.
"""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from penstock.core.errors import ConfigError

ALL = -1
"""Of `top_k`: the whole vocabulary."""


@dataclass(frozen=True)
class Drawing:
    """What is asked of the tokens after one prompt."""

    max_tokens: int | None = None
    """None: until the model's context is full."""
    temperature: float = 1.0
    """0: the likeliest token, of equals the lowest."""
    top_k: int = ALL
    """Only this many of the likeliest are drawn, and those that equal the last of them."""
    top_p: float = 1.0
    """Only the likeliest that together are at least this likely are."""
    seed: int | None = None
    """None: another one each time."""
    stop_tokens: tuple[int, ...] = ()
    stop_texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse numbers that say nothing."""
        if self.max_tokens is not None and self.max_tokens < 0:
            raise ConfigError(f"max_tokens is {self.max_tokens}. Write 0 or more.")
        if not 0 <= self.temperature < float("inf"):
            raise ConfigError(
                f"temperature is {self.temperature}. Write 0 for the likeliest tokens, or more."
            )
        if self.top_k != ALL and self.top_k < 1:
            raise ConfigError(f"top_k is {self.top_k}. Write 1 or more, or {ALL} for all.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p is {self.top_p}. Write more than 0, and at most 1.")
        if "" in self.stop_texts:
            raise ConfigError("a stop text is empty, and would stop every answer at once.")


def uniform(seed: int, sample: int, place: int) -> float:
    """The number, at least 0 and below 1, by which token `place` of answer `sample` to a prompt is
    drawn."""
    told = struct.pack("<Qqq", seed % 2**64, sample, place)
    digest = hashlib.blake2b(told, digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def draw(
    logits_SV: torch.Tensor, how: Sequence[Drawing], uniforms: Sequence[float]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A token from each row of fp32 logits, int64 [S], and its log-probability as the model has it,
    at temperature 1 and nothing left out, fp32 [S]. Logits are all numbers, or -inf.

    A token is the first in the vocabulary up to which the summed probability exceeds the row's
    uniform number, so that nearly equal logits give the same one.
    """
    rows = [row for row, one in enumerate(how) if one.temperature > 0]
    others = [row for row, one in enumerate(how) if one.temperature == 0]
    tokens_S = torch.empty(len(how), dtype=torch.int64, device=logits_SV.device)
    if others:
        # Of equals the first: PyTorch says so.
        tokens_S[others] = (logits_SV[others] if rows else logits_SV).argmax(1)
    if rows:
        some_RV = logits_SV[rows] if others else logits_SV
        temperatures = _column([how[row].temperature for row in rows], some_RV)
        left_RV = _narrowed(some_RV / temperatures, [how[row] for row in rows])
        best_R1 = left_RV.amax(-1, keepdim=True)
        sums_RV = (left_RV - best_R1).exp_().cumsum(-1, dtype=torch.float64)
        total_R1 = sums_RV[:, -1:]
        aims_R1 = _column([uniforms[row] for row in rows], sums_RV) * total_R1
        # Rounded up to the total it would be past the last token.
        aims_R1 = torch.minimum(aims_R1, torch.nextafter(total_R1, torch.zeros_like(total_R1)))
        tokens_S[rows] = torch.searchsorted(sums_RV, aims_R1, right=True).squeeze(1)
    log_probs_S = logits_SV.gather(1, tokens_S[:, None]).squeeze(1) - logits_SV.logsumexp(-1)
    return tokens_S, log_probs_S


def _narrowed(logits_RV: torch.Tensor, how: Sequence[Drawing]) -> torch.Tensor:
    """Logits of what may be drawn, first by number and then by probability, and -inf."""
    vocabulary = logits_RV.shape[1]
    tops = {row: one.top_k for row, one in enumerate(how) if 0 < one.top_k < vocabulary}
    if tops:
        rows = [*tops]
        some = logits_RV[rows]
        best = some.topk(max(tops.values()), dim=-1).values
        last = torch.tensor([[top - 1] for top in tops.values()], device=some.device)
        logits_RV = logits_RV.clone()
        logits_RV[rows] = some.masked_fill(some < best.gather(1, last), float("-inf"))
    rows = [row for row, one in enumerate(how) if one.top_p < 1]
    if rows:
        some = logits_RV[rows]
        ordered = some.sort(dim=-1, descending=True).values
        shares = ordered.double().softmax(-1)
        # A token stays if those before it do not reach the sum.
        stays = shares.cumsum(-1) - shares < _column([how[row].top_p for row in rows], shares)
        lowest = ordered.masked_fill(~stays, float("inf")).amin(-1, keepdim=True)
        logits_RV = logits_RV.clone()
        logits_RV[rows] = some.masked_fill(some < lowest, float("-inf"))
    return logits_RV


def _column(values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
