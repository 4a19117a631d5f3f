"""What a model tells of prompts' own tokens while it answers them, wherever they are computed.

P tokens of all prompts of which something is told, K tokens told for each place, S places at a
time, V vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from penstock.engine.ranks import Ranks
from penstock.engine.sequences import Prompt


class PromptScores:
    """Filled place by place, on the rank that computes it."""

    def __init__(self, prompts: Sequence[Prompt], device: torch.device) -> None:
        read = [number for number, prompt in enumerate(prompts) if prompt.is_read]
        ends = list(accumulate((len(prompts[number].tokens) for number in read), initial=0))
        self._prompts = prompts
        self._first = dict(zip(read, ends, strict=False))
        width = max((prompt.likeliest for prompt in prompts), default=0)
        # Less than anything that is found, so that of all ranks' the highest is what one found.
        self._log_probs_P = torch.full((ends[-1],), -torch.inf, device=device)
        self._likeliest_PK = torch.full((ends[-1], width), -1, device=device)
        self._likeliest_log_probs_PK = torch.full((ends[-1], width), -torch.inf, device=device)

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
        width = self._likeliest_PK.shape[1]
        best = log_probs_SV.topk(width, dim=-1)
        self._likeliest_PK[places_S] = best.indices
        self._likeliest_log_probs_PK[places_S] = best.values

    def share(self, ranks: Ranks) -> None:
        """Let every rank have what any has. Every rank calls it."""
        if not self._first:
            return
        for found in (self._log_probs_P, self._likeliest_PK, self._likeliest_log_probs_PK):
            if found.numel():
                ranks.highest(found)

    def of(
        self, number: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """The log-probabilities of a prompt's tokens [T], the likeliest in each place [T, K], and
        theirs, on the host; None for what was not asked."""
        prompt = self._prompts[number]
        if not prompt.is_read:
            return None, None, None
        start = self._first[number]
        some = slice(start, start + len(prompt.tokens))
        log_probs_T = self._log_probs_P[some].cpu()
        log_probs_T[0] = torch.nan
        if not prompt.likeliest:
            return log_probs_T, None, None
        likeliest_TK = self._likeliest_PK[some, : prompt.likeliest].int().cpu()
        theirs_TK = self._likeliest_log_probs_PK[some, : prompt.likeliest].cpu()
        likeliest_TK[0], theirs_TK[0] = -1, torch.nan
        return (log_probs_T if prompt.scored else None), likeliest_TK, theirs_TK
