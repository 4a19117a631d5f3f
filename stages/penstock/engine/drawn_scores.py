"""The likeliest tokens in the places in which others may have been drawn, wherever they are
computed.

S places of a pass, A those of all answers, each as often as tokens are told of it, K likeliest
tokens, V vocabulary.
"""

from collections.abc import Sequence

import torch

from penstock.engine.ranks import Ranks
from penstock.engine.sequences import Growing, Likeliest


class DrawnScores:
    """Filled token by token, on the rank that computes it."""

    def __init__(self) -> None:
        self._found: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}
        """Of each answer, by its number: the places that were computed here, and the tokens and
        log-probabilities [K] of each. Ranks that share documents compute others."""

    def take(self, after: Sequence[Growing], logits_SV: torch.Tensor) -> None:
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

    def shared(self, growing: Sequence[Growing], ranks: Ranks) -> dict[int, Likeliest]:
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
            one.number: Likeliest(*(_table(part, one) for part in its))
            for one, *its in zip(
                asked, tokens_A.cpu().split(sizes), log_probs_A.cpu().split(sizes), strict=True
            )
        }


def _table(told: torch.Tensor, one: Growing) -> torch.Tensor:
    """[T, K] of an answer. Of one that wants no token there is no place."""
    return told.unflatten(0, (len(one.tokens), one.prompt.likeliest_drawn))[: one.most]
