"""Top-k and prompt logprobs during generation, gathered from the ranks that compute them.

P tokens of all prompts with requested logprobs, W top-k entries of all their positions, S positions
at a time, K largest requested top-k, V vocabulary.
"""

from collections.abc import Sequence
from itertools import accumulate

import torch

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.sequences import DecodingSequence, Prompt, TopKLogprobs
from penstock_kernels.to_device import to_device


class TopLogprobs:
    """Top-k logprobs of completions, recorded token by token on the rank that computes them."""

    def __init__(self) -> None:
        # For each sequence, by index: the positions computed here, with top-k tokens and log-probs
        # [K] of each. Context-parallel ranks compute other positions.
        self._recorded: dict[int, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}

    def record(self, after: Sequence[DecodingSequence], logits_SV: torch.Tensor) -> None:
        """Record the top-k of fp32 logits from which the sequences' next tokens are sampled."""
        rows = [row for row, seq in enumerate(after) if seq.prompt.top_k]
        if not rows:
            return
        width = max(after[row].prompt.top_k for row in rows)
        best = logits_SV[rows].log_softmax(-1).topk(width, dim=-1)
        tokens_SK = best.indices.int()
        for index, row in enumerate(rows):
            seq, top = after[row], slice(after[row].prompt.top_k)
            entries = len(seq.tokens), tokens_SK[index, top], best.values[index, top]
            self._recorded.setdefault(seq.index, []).append(entries)

    def gather(
        self, sequences: Sequence[DecodingSequence], ranks: ProcessInfo
    ) -> dict[int, TopKLogprobs]:
        """Gather the requested top-k logprobs of finished sequences, by index. Collective."""
        requesting = [seq for seq in sequences if seq.prompt.top_k]
        if not requesting:
            return {}
        sizes = [len(seq.tokens) * seq.prompt.top_k for seq in requesting]
        # Lower than any result, so that the maximum over ranks selects the one that was computed.
        tokens_A = torch.full((sum(sizes),), -1, dtype=torch.int32, device=ranks.device)
        log_probs_A = torch.full((sum(sizes),), -torch.inf, device=ranks.device)
        parts = tokens_A.split(sizes), log_probs_A.split(sizes)
        for seq, *into in zip(requesting, *parts, strict=True):
            if recorded := self._recorded.get(seq.index):
                positions, *entries = zip(*recorded, strict=True)
                for part, values in zip(into, entries, strict=True):
                    part.view(len(seq.tokens), -1)[list(positions)] = torch.stack(values)
        if ranks.world_size > 1:
            ranks.all_reduce_max(tokens_A)
            ranks.all_reduce_max(log_probs_A)
        top_k_logprobs: dict[int, TopKLogprobs] = {}
        tables = tokens_A.cpu().split(sizes), log_probs_A.cpu().split(sizes)
        for seq, *entries in zip(requesting, *tables, strict=True):
            shape = len(seq.tokens), seq.prompt.top_k
            # A sequence without requested tokens has one, and no positions.
            tables_TK = (part.unflatten(0, shape)[: seq.max_tokens] for part in entries)
            top_k_logprobs[seq.index] = TopKLogprobs(*tables_TK)
        return top_k_logprobs


class PromptLogprobs:
    """Logprobs of prompt tokens, recorded on the rank that computes them. Prompts without requested
    logprobs take no memory."""

    def __init__(self, prompts: Sequence[Prompt], device: torch.device) -> None:
        self._prompts = prompts
        read = [number for number, prompt in enumerate(prompts) if prompt.needs_logprobs]
        lengths = [len(prompts[number].tokens) for number in read]
        widths = [prompts[number].prompt_top_k for number in read]
        ends = list(accumulate(lengths, initial=0))
        # `ends` has one more: the number of all tokens.
        self._first = dict(zip(read, ends, strict=False))
        self._widest = max(widths, default=0)
        widths_P = torch.tensor(
            [width for width, length in zip(widths, lengths, strict=True) for _ in range(length)],
            dtype=torch.int64,
        )
        last_P = widths_P.cumsum(0)
        self._widths_P = to_device(widths_P, device)
        # The start of each position's entries among the W.
        self._starts_P = to_device(last_P - widths_P, device)
        # Lower than any result, so that the maximum over ranks selects the one that was computed.
        self._log_probs_P = torch.full((ends[-1],), -torch.inf, device=device)
        entries = int(widths_P.sum())
        self._top_k_tokens_W = torch.full((entries,), -1, dtype=torch.int32, device=device)
        self._top_k_log_probs_W = torch.full((entries,), -torch.inf, device=device)

    def places(self, prompt: int) -> range:
        """The positions of a prompt's tokens among the P, except the first, which has none."""
        first = self._first[prompt]
        return range(first + 1, first + len(self._prompts[prompt].tokens))

    def record(
        self, places_S: torch.Tensor, tokens_S: torch.Tensor, log_probs_SV: torch.Tensor
    ) -> None:
        self._log_probs_P[places_S] = log_probs_SV.gather(1, tokens_S[:, None]).squeeze(1)
        if not self._widest:
            return
        # One topk for all positions; what was not requested is masked out.
        best = log_probs_SV.topk(self._widest, dim=-1)
        order_K = torch.arange(self._widest, device=places_S.device)
        asked_SK = order_K < self._widths_P[places_S][:, None]
        into = (self._starts_P[places_S][:, None] + order_K)[asked_SK]
        self._top_k_tokens_W[into] = best.indices[asked_SK].int()
        self._top_k_log_probs_W[into] = best.values[asked_SK]

    def all_reduce(self, ranks: ProcessInfo) -> None:
        """All-reduce the results, so that every rank has all of them. Collective."""
        for table in (self._log_probs_P, self._top_k_tokens_W, self._top_k_log_probs_W):
            if table.numel() and ranks.world_size > 1:
                ranks.all_reduce_max(table)

    def of(self, number: int) -> tuple[torch.Tensor | None, TopKLogprobs | None]:
        """The log-probs of a prompt's tokens, fp32 [T] on the host, and the top-k at each position;
        None if not requested."""
        prompt = self._prompts[number]
        if not prompt.needs_logprobs:
            return None, None
        first, length, width = self._first[number], len(prompt.tokens), prompt.prompt_top_k
        log_probs_T = top_k_logprobs = None
        if prompt.needs_prompt_logprobs:
            log_probs_T = self._log_probs_P[first : first + length].cpu()
            log_probs_T[0] = torch.nan
        if width:
            start = int(self._starts_P[first])
            entries = slice(start, start + length * width)
            tables = self._top_k_tokens_W, self._top_k_log_probs_W
            top_k_logprobs = TopKLogprobs(
                *(table[entries].cpu().unflatten(0, (length, width)) for table in tables)
            )
            top_k_logprobs.tokens_TK[0], top_k_logprobs.log_probs_TK[0] = -1, torch.nan
        return log_probs_T, top_k_logprobs
