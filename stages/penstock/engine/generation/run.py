"""A generation run: passes over running sequences, to which others can be added in between.

T tokens of a pass, S positions where a token is sampled or scored, C positions of a chunk, K top-k
entries, V vocabulary.
"""

import secrets
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch
from torch import nn

from penstock.core.errors import PenstockError
from penstock.engine.distributed.parallel_model import ParallelModel
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.distributed.tensor_sharding import shard_range
from penstock.engine.distributed.vocab_parallel import LogitsFn
from penstock.engine.generation.batching import (
    ForwardBatch,
    FullRecomputeDecode,
    Limits,
    PagedDecode,
    padding_pass,
)
from penstock.engine.generation.kv_cache import KVCache
from penstock.engine.generation.logprobs import PromptLogprobs, TopLogprobs, all_reduce_logprobs
from penstock.engine.generation.sampling import sample_token
from penstock.engine.generation.sequences import (
    Decode,
    DecodingSequence,
    GenerationOutput,
    Prompt,
)
from penstock_kernels.to_device import to_device

OnToken = Callable[[int, int], None]
"""Called on every rank with the prompt's index and each sampled token, as soon as it is known: for
streaming."""

WHY_NOT_FINITE = "the model's logits are not finite: its weights have diverged."


class NotFiniteError(PenstockError):
    """The model's logits are NaN or infinite."""


@dataclass(frozen=True)
class CacheMemory:
    """A KV cache, and what has room in it."""

    running: int
    """Sequences that are decoded together, at most."""
    cache: KVCache
    max_length: int
    """Tokens of a sequence that has the cache to itself."""


@dataclass(eq=False)
class GenerationRequest:
    """Prompts that were added together, and end together."""

    sequences: list[list[DecodingSequence]]
    """The completions of each prompt."""
    outputs: list[GenerationOutput]
    """Of each prompt, once all are finished."""
    error: NotFiniteError | None = None
    """Why there are none."""

    @property
    def is_finished(self) -> bool:
        return all(seq.finish_reason for group in self.sequences for seq in group)


class GenerationRun:
    """Every rank makes the same calls, and gets all outputs."""

    def __init__(
        self,
        layout: ParallelModel,
        ranks: ProcessInfo,
        logits: LogitsFn,
        memory: CacheMemory,
        limits: Limits,
        max_cached_length: float,
        decode: Decode | None,
        on_token: OnToken,
    ) -> None:
        """`max_cached_length`: see `Generator`."""
        self._layout, self._ranks, self._logits = layout, ranks, logits
        self._max_length, self._max_cached_length = memory.max_length, max_cached_length
        self._multiple = limits.pad_to_multiple_of
        self._decode, self._on_token = decode, on_token
        gather = layout.context.gather_tokens
        self._paged = PagedDecode(limits, memory.cache, ranks.device, gather)
        self._uncached = FullRecomputeDecode(limits)
        # Those that generate in turn, so that prompts which join one do not hold up the other.
        self._passes = deque((self._paged, self._uncached))
        self._requests: list[GenerationRequest] = []
        self._unfinished: list[DecodingSequence] = []
        self._num_prompts = 0
        # By index of the prompt.
        self._prompt_logprobs: dict[int, PromptLogprobs] = {}
        self._completion_logprobs = TopLogprobs()

    @property
    def is_finished(self) -> bool:
        """Whether there is nothing to compute until prompts are added."""
        return not self._requests

    def has_room(self, prompts: Sequence[Prompt]) -> bool:
        """Whether the KV cache, which does not grow, can hold each of the prompts."""
        lengths = [len(prompt.tokens) + self._max_new_tokens(prompt) for prompt in prompts]
        return all(not self._max_length < length <= self._max_cached_length for length in lengths)

    def add(self, prompts: Sequence[Prompt]) -> GenerationRequest:
        """Add prompts, which the generator must have accepted and for which there must be room.
        Collective."""
        sequences = self._start_sequences(prompts)
        request = GenerationRequest(sequences, [])
        self._requests.append(request)
        added = [seq for group in sequences for seq in group]
        self._assign_replicas(added)
        for index, seq in enumerate(added, len(self._unfinished)):
            seq.index = index
        self._unfinished += added
        own = self._layout.mesh.index("replicate", "shard")
        local_sequences = [seq for seq in added if seq.replica == own]
        limit = self._max_cached_length
        self._paged.add(seq for seq in local_sequences if seq.max_length <= limit)
        self._uncached.add(seq for seq in local_sequences if seq.max_length > limit)
        return request

    def step(self, *, has_arrivals: bool = False) -> tuple[list[GenerationRequest], bool]:
        """Run one pass. Returns the requests that are finished then, and whether any rank
        `has_arrivals`. Collective."""
        self._ranks.heartbeat.set_phase("generating")
        # Tokens and log-probs in one tensor, of which ranks take the maximum: fp64 holds any token
        # id. Rows: for each sequence the next token, its log-prob, and whether the logits are
        # non-finite; -inf if this pass or rank samples none. The last column is for arrivals.
        samples = torch.full(
            (3, len(self._unfinished) + 1),
            -torch.inf,
            dtype=torch.float64,
            device=self._ranks.device,
        )
        if has_arrivals:
            samples[0, -1] = 1
        self._passes.rotate()
        batches = (sequence_pass.next_batch() for sequence_pass in self._passes)
        batch = next((batch for batch in batches if batch), None)
        self._forward(batch or padding_pass(self._multiple), samples)
        has_arrivals = self._append_tokens(samples)
        self._unfinished = [seq for seq in self._unfinished if not seq.finish_reason]
        for index, seq in enumerate(self._unfinished):
            seq.index = index
        for sequence_pass in self._passes:
            sequence_pass.remove_finished()
        return self._pop_finished(), has_arrivals

    def _append_tokens(self, samples: torch.Tensor) -> bool:
        """Append what all ranks have sampled. Returns whether any has arrivals."""
        if self._ranks.world_size > 1:
            # The maximum merges replicas, and ranks of a replica agree.
            samples = self._ranks.all_reduce_max(samples)
        [*tokens, arrivals], [*log_probs, _], [*flaws, _] = samples.tolist()
        # Alike on every rank, because each appends the tokens of all.
        for seq, token, log_prob in zip(self._unfinished, tokens, log_probs, strict=True):
            if token >= 0:
                seq.append(int(token), log_prob, self._decode)
                self._on_token(seq.prompt_index, int(token))
        if max(flaws) > 0:
            self._fail({seq for seq, flaw in zip(self._unfinished, flaws, strict=True) if flaw > 0})
        return arrivals > 0

    def _start_sequences(self, prompts: Sequence[Prompt]) -> list[list[DecodingSequence]]:
        seeds = [secrets.randbits(63) for _ in prompts]
        if any(prompt.sampling.seed is None for prompt in prompts):
            # Rank 0's for all: the ranks of a replica must sample the same tokens.
            [seeds, *_] = self._ranks.all_gather(seeds)
        groups: list[list[DecodingSequence]] = []
        for number, (prompt, fresh) in enumerate(
            zip(prompts, seeds, strict=True), self._num_prompts
        ):
            most = self._max_new_tokens(prompt)
            seed = fresh if prompt.sampling.seed is None else prompt.sampling.seed
            skipped = self._layout.skipped_positions(prompt.images)
            groups.append(
                [
                    DecodingSequence(
                        0, number, prompt, sample, most, seed, skipped_positions=skipped
                    )
                    for sample in range(prompt.num_completions)
                ]
            )
            if prompt.needs_logprobs:
                self._prompt_logprobs[number] = PromptLogprobs(prompt, self._ranks.device)
        self._num_prompts += len(prompts)
        return groups

    def _max_new_tokens(self, prompt: Prompt) -> int:
        return prompt.max_new_tokens(self._layout.parts[0].config.max_position_embeddings)

    def _assign_replicas(self, sequences: Sequence[DecodingSequence]) -> None:
        replicas = self._layout.mesh.dims.num_replicas
        loads = [0] * replicas
        for seq in self._unfinished:
            loads[seq.replica] += 1
        # Consecutive shares, so that completions of one prompt stay together; of unequal ones the
        # last are the larger.
        for share, replica in enumerate(sorted(range(replicas), key=lambda own: -loads[own])):
            for number in shard_range(len(sequences), replicas, share):
                sequences[number].replica = replica

    def _fail(self, flawed: set[DecodingSequence]) -> None:
        for request in self._requests:
            sequences = [seq for group in request.sequences for seq in group]
            if not flawed.isdisjoint(sequences):
                request.error = NotFiniteError(WHY_NOT_FINITE)
                for seq in sequences:
                    seq.finish_reason = seq.finish_reason or "stop"

    def _pop_finished(self) -> list[GenerationRequest]:
        finished = [request for request in self._requests if request.is_finished]
        for request in finished:
            self._requests.remove(request)
            sequences = [seq for group in request.sequences for seq in group]
            top_k_logprobs = self._completion_logprobs.gather(sequences, self._ranks)
            read = {
                group[0]: self._prompt_logprobs.pop(group[0].prompt_index)
                for group in request.sequences
                if group[0].prompt.needs_logprobs
            }
            all_reduce_logprobs(list(read.values()), self._ranks)
            if request.error:
                continue
            for group in request.sequences:
                completions = [seq.to_completion(top_k_logprobs.get(seq)) for seq in group]
                logprobs = read[group[0]].result() if group[0] in read else (None, None)
                request.outputs.append(GenerationOutput(completions, *logprobs))
        return finished

    def _forward(self, batch: ForwardBatch, samples: torch.Tensor) -> None:
        # Computed on the host, to avoid a GPU synchronization.
        slots_T = self._layout.context.shard_tensor(batch.slots_T())
        places_S = (slots_T >= 0).nonzero().squeeze(1)
        after = [batch.after[slot] for slot in slots_T[places_S].tolist()]
        if not after:
            # A chunk of a prompt, or padding: the head's collectives need a row all the same.
            places_S, after = torch.zeros(1, dtype=torch.int64), [[]]
        reduce = partial(self._sample, batch, self._to_device(places_S), after, samples)
        call = self._layout.build_inputs(batch.batch, reduce, self._ranks.device)
        self._layout.forward_only(replace(call, segments=batch.segments(call.segments)))

    def _sample(
        self,
        batch: ForwardBatch,
        places_S: torch.Tensor,
        after_S: Sequence[Sequence[DecodingSequence]],
        samples: torch.Tensor,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> torch.Tensor:
        """Sample the next tokens at this rank's positions, and record requested prompt logprobs."""
        start = 0
        for chunk, logits_CV in self._logits(hidden, head, places_S):
            groups = after_S[start : start + len(chunk)]
            start += len(chunk)
            after = [seq for group in groups for seq in group]
            if not after:
                continue
            wide_CV = logits_CV.float()
            # The sequences of a prompt begin with the same logits, which are then computed once.
            if len(after) != len(groups):
                wide_CV = wide_CV[[row for row, group in enumerate(groups) for _ in group]]
            uniforms = [seq.uniform() for seq in after]
            tokens_S, log_probs_S = sample_token(
                wide_CV, [seq.prompt.sampling for seq in after], uniforms
            )
            sampled = torch.stack((tokens_S.double(), log_probs_S, ~log_probs_S.isfinite()))
            samples[:, [seq.index for seq in after]] = sampled
            self._completion_logprobs.record(after, wide_CV)
        if read := batch.read():
            self._score_prompts(batch, read, samples, hidden, head)
        return hidden.new_zeros((), dtype=torch.float32)

    def _score_prompts(
        self,
        batch: ForwardBatch,
        read: Sequence[tuple[int, DecodingSequence]],
        samples: torch.Tensor,
        hidden: torch.Tensor,
        head: nn.Module,
    ) -> None:
        # For each token of the pass: which of these prompts it belongs to, and the position of the
        # token after it, which is the one that is scored.
        prompts_T = torch.full((sum(batch.batch.lengths),), -1, dtype=torch.int64)
        positions_T = prompts_T.clone()
        for number, (start, seq) in enumerate(read):
            scored = slice(start, start + len(seq.prompt.tokens) - 1)
            prompts_T[scored] = number
            positions_T[scored] = torch.arange(1, len(seq.prompt.tokens))
        shard = self._layout.context.shard_tensor
        prompts_T, positions_T = shard(prompts_T), shard(positions_T)
        places_S = (prompts_T >= 0).nonzero().squeeze(1)
        prompts_S = prompts_T[places_S].tolist()
        positions_S = self._to_device(positions_T[places_S])
        next_S = self._to_device(shard(batch.batch.input_ids_T.roll(-1))[places_S])
        logprobs = [self._prompt_logprobs[seq.prompt_index] for _, seq in read]
        widest = max(prompt.top_k for prompt in logprobs)
        start = 0
        for chunk, logits_CV in self._logits(hidden, head, self._to_device(places_S)):
            rows = slice(start, start + len(chunk))
            start += len(chunk)
            log_probs_CV = logits_CV.float().log_softmax(-1)
            flawed_C = log_probs_CV.isnan().any(-1).tolist()
            log_probs_C = log_probs_CV.gather(1, next_S[rows, None]).squeeze(1)
            best_CK = log_probs_CV.topk(widest, dim=-1) if widest else None
            first = 0
            for number, own in groupby(prompts_S[rows]):
                part = slice(first, first + len(list(own)))
                first = part.stop
                if any(flawed_C[part]):
                    # All ranks must end the request: the others are in this pass too.
                    samples[2, read[number][1].index] = 1
                best = best_CK and (best_CK.values[part], best_CK.indices[part])
                logprobs[number].record(positions_S[rows][part], log_probs_C[part], best)

    def _to_device(self, values: torch.Tensor) -> torch.Tensor:
        return to_device(values, self._ranks.device)
