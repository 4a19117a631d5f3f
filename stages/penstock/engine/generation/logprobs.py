"""What a model tells of prompts' own tokens while it answers them, wherever they are computed.

P tokens of all prompts of which something is told, W likeliest tokens that are told of all of them,
S places at a time, K likeliest tokens of the most that is asked for, V vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.sequences import DecodingSequence, Prompt, TopKLogprobs


class TopLogprobs:
    """Filled token by token, on the rank that computes it."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        """Of each answer, by its number: the places that were computed here, and the tokens and
        log-probabilities [K] of each. Ranks that share documents compute others."""

    def take(self, after: Sequence[DecodingSequence], logits_SV: torch.Tensor) -> None:
        """Of the logits, in fp32, that the next token of each of these is drawn from."""
        asked = [row for row, one in enumerate(after) if one.prompt.likeliest_drawn]
        if not asked:
            return
        width = max(after[row].prompt.likeliest_drawn for row in asked)
        best = logits_SV[asked].log_softmax(-1).topk(width, dim=-1)
        tokens_SK = best.indices.int()
        for place, row in enumerate(asked):
            one, wanted = after[row], slice(after[row].prompt.likeliest_drawn)
            told = len(one.tokens), tokens_SK[place, wanted], best.values[place, wanted]
            self._found.setdefault(one.number, []).append(told)

    def shared(
        self, growing: Sequence[DecodingSequence], ranks: ProcessInfo
    ) -> dict[int, TopKLogprobs]:
        """What was asked of answers that have ended, by their numbers. Every rank calls it."""
        asked = [one for one in growing if one.prompt.likeliest_drawn]
        if not asked:
            return {}
        sizes = [len(one.tokens) * one.prompt.likeliest_drawn for one in asked]
        # Less than anything that is found, so that of all ranks' the highest is what one found.
        tokens_A = torch.full((sum(sizes),), -1, dtype=torch.int32, device=ranks.device)
        log_probs_A = torch.full((sum(sizes),), -torch.inf, device=ranks.device)
        parts = tokens_A.split(sizes), log_probs_A.split(sizes)
        for one, *into in zip(asked, *parts, strict=True):
            if its := self._found.get(one.number):
                places, *told = zip(*its, strict=True)
                for part, some in zip(into, told, strict=True):
                    part.view(len(one.tokens), -1)[list(places)] = torch.stack(some)
        if ranks.world > 1:
            ranks.highest(tokens_A)
            ranks.highest(log_probs_A)
        return {
            one.number: TopKLogprobs(*(_table(part, one) for part in its))
            for one, *its in zip(
                asked, tokens_A.cpu().split(sizes), log_probs_A.cpu().split(sizes), strict=True
            )
        }


def _table(told: torch.Tensor, one: DecodingSequence) -> torch.Tensor:
    """[T, K] of an answer. Of one that wants no token there is no place."""
    return told.unflatten(0, (len(one.tokens), one.prompt.likeliest_drawn))[: one.most]


class PromptLogprobs:
    """Filled place by place, on the rank that computes it.

    What is asked of one prompt takes no memory for the others.
    """

    def __init__(self, prompts: Sequence[Prompt], device: torch.device) -> None:
        self._prompts = prompts
        read = [number for number, prompt in enumerate(prompts) if prompt.is_read]
        lengths = [len(prompts[number].tokens) for number in read]
        widths = [prompts[number].likeliest for number in read]
        ends = list(accumulate(lengths, initial=0))
        self._first = dict(zip(read, ends, strict=False))
        self._widest = max(widths, default=0)
        widths_P = torch.tensor(
            [width for width, length in zip(widths, lengths, strict=True) for _ in range(length)],
            dtype=torch.int64,
        )
        last_P = widths_P.cumsum(0)
        self._widths_P = widths_P.to(device)
        self._starts_P = (last_P - widths_P).to(device)
        """Where among the W those of a place begin."""
        # Less than anything that is found, so that of all ranks' the highest is what one found.
        self._log_probs_P = torch.full((ends[-1],), -torch.inf, device=device)
        told = int(widths_P.sum())
        self._likeliest_W = torch.full((told,), -1, dtype=torch.int32, device=device)
        self._likeliest_log_probs_W = torch.full((told,), -torch.inf, device=device)

    def places(self, prompt: int) -> range:
        """Where the tokens of a prompt are among the P, but the first, which nothing foretells."""
        first = self._first[prompt]
        return range(first + 1, first + len(self._prompts[prompt].tokens))

    def take(
        self, places_S: torch.Tensor, tokens_S: torch.Tensor, log_probs_SV: torch.Tensor
    ) -> None:
        """Of what foretells these places, in which these tokens are."""
        own_S = log_probs_SV.gather(1, tokens_S[:, None]).squeeze(1)
        self._log_probs_P[places_S] = own_S
        if not self._widest:
            return
        best = log_probs_SV.topk(self._widest, dim=-1)
        order_K = torch.arange(self._widest, device=places_S.device)
        asked_SK = order_K < self._widths_P[places_S][:, None]
        into = (self._starts_P[places_S][:, None] + order_K)[asked_SK]
        self._likeliest_W[into] = best.indices[asked_SK].int()
        self._likeliest_log_probs_W[into] = best.values[asked_SK]

    def share(self, ranks: ProcessInfo) -> None:
        """Let every rank have what any has. Every rank calls it."""
        for found in (self._log_probs_P, self._likeliest_W, self._likeliest_log_probs_W):
            if found.numel() and ranks.world > 1:
                ranks.highest(found)

    def of(self, number: int) -> tuple[torch.Tensor | None, TopKLogprobs | None]:
        """The log-probabilities of a prompt's tokens, fp32 [T] on the host, and the likeliest in
        each place; None for what was not asked."""
        prompt = self._prompts[number]
        if not prompt.is_read:
            return None, None
        first, length, width = self._first[number], len(prompt.tokens), prompt.likeliest
        log_probs_T = likeliest = None
        if prompt.scored:
            log_probs_T = self._log_probs_P[first : first + length].cpu()
            log_probs_T[0] = torch.nan
        if width:
            start = int(self._starts_P[first])
            some = slice(start, start + length * width)
            likeliest = TopKLogprobs(
                self._likeliest_W[some].cpu().unflatten(0, (length, width)),
                self._likeliest_log_probs_W[some].cpu().unflatten(0, (length, width)),
            )
            likeliest.tokens_TK[0], likeliest.log_probs_TK[0] = -1, torch.nan
        return log_probs_T, likeliest
