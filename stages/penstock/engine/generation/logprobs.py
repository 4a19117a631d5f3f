"""Top-k and prompt logprobs during generation, gathered from the ranks that compute them.

T tokens of a prompt, S positions at a time, K requested top-k, V vocabulary.
"""

from collections.abc import Sequence

import torch

from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.generation.sequences import DecodingSequence, Prompt, TopKLogprobs


class TopLogprobs:
    """Top-k logprobs of completions, recorded token by token on the rank that computes them."""

    def __init__(self) -> None:
        # For each sequence: the positions computed here, with top-k tokens and log-probs [K] of
        # each. Context-parallel ranks compute other positions.
        self._recorded: dict[DecodingSequence, list[tuple[int, torch.Tensor, torch.Tensor]]] = {}

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
            self._recorded.setdefault(seq, []).append(entries)

    def gather(
        self, sequences: Sequence[DecodingSequence], ranks: ProcessInfo
    ) -> dict[DecodingSequence, TopKLogprobs]:
        """Remove the requested top-k logprobs of finished sequences and gather them. Collective."""
        requesting = [seq for seq in sequences if seq.prompt.top_k]
        if not requesting:
            return {}
        sizes = [len(seq.tokens) * seq.prompt.top_k for seq in requesting]
        # Lower than any result, so that the maximum over ranks selects the one that was computed.
        tokens_A = torch.full((sum(sizes),), -1, dtype=torch.int32, device=ranks.device)
        log_probs_A = torch.full((sum(sizes),), -torch.inf, device=ranks.device)
        parts = tokens_A.split(sizes), log_probs_A.split(sizes)
        for seq, *into in zip(requesting, *parts, strict=True):
            if recorded := self._recorded.pop(seq, None):
                positions, *entries = zip(*recorded, strict=True)
                for part, values in zip(into, entries, strict=True):
                    part.view(len(seq.tokens), -1)[list(positions)] = torch.stack(values)
        if ranks.world_size > 1:
            ranks.all_reduce_max(tokens_A)
            ranks.all_reduce_max(log_probs_A)
        top_k_logprobs: dict[DecodingSequence, TopKLogprobs] = {}
        tables = tokens_A.cpu().split(sizes), log_probs_A.cpu().split(sizes)
        for seq, *entries in zip(requesting, *tables, strict=True):
            shape = len(seq.tokens), seq.prompt.top_k
            # A sequence without requested tokens has one, and no positions.
            tables_TK = (part.unflatten(0, shape)[: seq.max_tokens] for part in entries)
            top_k_logprobs[seq] = TopKLogprobs(*tables_TK)
        return top_k_logprobs


class PromptLogprobs:
    """Logprobs of a prompt's tokens, recorded on the rank that computes them."""

    def __init__(self, prompt: Prompt, device: torch.device) -> None:
        self._prompt = prompt
        length, self.top_k = len(prompt.tokens), prompt.prompt_top_k
        # Lower than any result, so that the maximum over ranks selects the one that was computed.
        self._log_probs_T = torch.full((length,), -torch.inf, device=device)
        self._top_k_tokens_TK = torch.full(
            (length, self.top_k), -1, dtype=torch.int32, device=device
        )
        self._top_k_log_probs_TK = torch.full((length, self.top_k), -torch.inf, device=device)

    def record(
        self,
        positions_S: torch.Tensor,
        log_probs_S: torch.Tensor,
        best_SK: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> None:
        """Record the log-probs of the tokens at these positions, and the `best_SK` log-probs and
        tokens there, of which K may be more than are requested."""
        self._log_probs_T[positions_S] = log_probs_S
        if self.top_k and best_SK is not None:
            log_probs_SK, tokens_SK = (x_SK[:, : self.top_k] for x_SK in best_SK)
            self._top_k_log_probs_TK[positions_S] = log_probs_SK
            self._top_k_tokens_TK[positions_S] = tokens_SK.int()

    @property
    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._log_probs_T, self._top_k_log_probs_TK, self._top_k_tokens_TK

    def result(self) -> tuple[torch.Tensor | None, TopKLogprobs | None]:
        """The log-probs of the prompt's tokens, fp32 [T] on the host, and the top-k at each
        position; None if not requested."""
        log_probs_T = top_k_logprobs = None
        if self._prompt.needs_prompt_logprobs:
            log_probs_T = self._log_probs_T.cpu()
            log_probs_T[0] = torch.nan
        if self.top_k:
            top_k_logprobs = TopKLogprobs(
                self._top_k_tokens_TK.cpu(), self._top_k_log_probs_TK.cpu()
            )
            top_k_logprobs.tokens_TK[0], top_k_logprobs.log_probs_TK[0] = -1, torch.nan
        return log_probs_T, top_k_logprobs


def all_reduce_logprobs(prompts: Sequence[PromptLogprobs], ranks: ProcessInfo) -> None:
    """All-reduce the logprobs of prompts, so that every rank has all of them. Collective."""
    if ranks.world_size == 1:
        return
    # Few collectives, however many prompts there are.
    for tables in zip(*(prompt.tables for prompt in prompts), strict=True):
        joined = torch.cat([table.flatten() for table in tables])
        if joined.numel():
            ranks.all_reduce_max(joined)
            for table, part in zip(tables, joined.split([t.numel() for t in tables]), strict=True):
                table.copy_(part.view_as(table))
