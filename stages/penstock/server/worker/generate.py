"""Text generation from the base model or a saved checkpoint.

The sampled weights replace the active model in the base model's storage; the active model is
restored before its next computation. Recently used adapters are cached.
"""

import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from msgspec import structs

from penstock.adapters.names import parse_lora_name
from penstock.adapters.scaling import lora_scaling
from penstock.core.errors import ArtifactError
from penstock.engine.distributed.param_shards import local
from penstock.engine.generation.run import GenerationRequest, GenerationRun
from penstock.engine.generation.sampling import SamplingParams
from penstock.engine.generation.sequences import (
    Completion,
    Decode,
    GenerationOutput,
    Prompt,
    TopKLogprobs,
)
from penstock.engine.hf.load_weights import copy_shard
from penstock.engine.multi_lora.model_pool import ModelPool
from penstock.engine.multi_lora.model_store import require_whole_sampler, sampler_in
from penstock.engine.multi_lora.rank_padding import padded, rank_dim
from penstock.engine.peft.init_from_adapter import AdapterStart
from penstock.server.protocol.requests import Sample
from penstock.server.protocol.results import SampleResult
from penstock.server.protocol.types import Array, SampledSequence
from penstock.server.protocol.worker_commands import GenerateCommand, GenerateResult
from penstock.server.worker.datums import build_image

LOG = logging.getLogger(__name__)

MAX_CACHED_ADAPTERS = 4


@dataclass(frozen=True)
class LoadedAdapter:
    """A loaded adapter."""

    weights: Sequence[torch.Tensor]  # This rank's shards of the base model's trainable tensors
    scale: float


@dataclass
class GenerationHandler:
    """Runs generation on these ranks. Every rank makes the same calls."""

    models: ModelPool
    decode: Decode
    stop_token_ids: tuple[int, ...] = ()  # End-of-sequence tokens
    cached_adapters: OrderedDict[tuple[str, int], LoadedAdapter] = field(
        default_factory=OrderedDict[tuple[str, int], LoadedAdapter]
    )
    """LRU cache by folder and modification time."""

    @contextmanager
    def running(self, command: GenerateCommand) -> "Iterator[RunningGeneration]":
        """A run with the weights of a command and memory for its prompts, which are not added yet.
        Raises ArtifactError for a folder without weights to sample from, ConfigError for an invalid
        prompt."""
        prompts = list(map(self.build_prompt, command.samples))
        version = self._activate_weights(Path(command.adapter) if command.adapter else None)
        generator = self.models.substrate.built.generator
        with generator.run(prompts, self.decode, weights_version=version) as run:
            yield RunningGeneration(self, run, command.adapter)

    def release_cache(self) -> None:
        """Free the KV cache, whose prefixes are kept between commands, for other work."""
        self.models.substrate.built.generator.release_cache()

    def build_prompt(self, sample: Sample) -> Prompt:
        sampling = structs.asdict(sample.sampling)
        if not sampling.pop("ignore_eos"):
            sampling["stop_tokens"] += self.stop_token_ids
        return Prompt(
            sample.prompt.numpy().tolist(),
            SamplingParams(**sampling),
            num_completions=sample.count,
            needs_prompt_logprobs=sample.prompt_logprobs,
            prompt_top_k=sample.topk_prompt_logprobs,
            top_k=sample.topk_sample_logprobs,
            images=tuple(map(build_image, sample.images)),
        )

    def _activate_weights(self, folder: Path | None) -> str:
        """Load the weights of a folder into the base model; None: restore the base weights. Returns
        a name of these weights."""
        models = self.models
        time, loaded = self._find_adapter(folder) if folder else (0, None)
        if models.substrate.sharing == "alone":
            # Loading is expensive, and often the same weights are used again.
            if models.guest != (folder, time):
                models.deactivate()
                models.substrate.reset_to_base(folder)
                models.guest = folder, time
        elif loaded is None:
            models.load_base()
        else:
            models.load_adapter(loaded.weights, loaded.scale)
        return f"{folder} {time}"

    def _find_adapter(self, folder: Path) -> tuple[int, LoadedAdapter | None]:
        """The modification time of the folder, and its adapter; None: a full model. Raises
        ArtifactError on all ranks alike: the folder may be deleted concurrently, which only some
        ranks see."""
        substrate, loaded, time, fault = self.models.substrate, None, 0, ""
        try:
            metadata, time = sampler_in(folder), folder.stat().st_mtime_ns
            is_known = (str(folder), time) in self.cached_adapters
            if not is_known:
                self._require_compatible(folder.name, metadata)
            if not is_known and self.models.guest != (folder, time):
                ranks = substrate.ranks
                require_whole_sampler(folder, share=ranks.rank, of=ranks.world_size)
            if substrate.sharing == "adapters":
                loaded = self._get_adapter(folder, time)
        except OSError as error:
            fault = f"{folder.name} cannot be read: {error.strerror}.\n  Save it again."
        except ArtifactError as error:
            fault = str(error)
        except Exception as error:
            # For example out of memory: the other ranks must not wait, and the models need not be
            # restarted.
            LOG.exception("%s cannot be sampled from on rank %d", folder, substrate.ranks.rank)
            fault = (
                f"{folder.name} cannot be sampled from, as rank {substrate.ranks.rank} met "
                f"{type(error).__name__}: {error}\n  Try again; the log of the workers says more."
            )
        gathered = substrate.ranks.all_gather((time, fault))
        for _, fault in gathered:
            if fault:
                raise ArtifactError(fault)
        return gathered[0][0], loaded

    def _require_compatible(self, name: str, metadata: Mapping[str, Any]) -> None:
        """Raise ArtifactError for a checkpoint of a server with another training configuration."""
        substrate = self.models.substrate
        room = substrate.run.lora.lora_rank if substrate.sharing == "adapters" else None
        rank = metadata["rank"]
        if (rank is None) != (room is None):
            kinds = (
                ("a whole model", "adapters") if rank is None else ("an adapter", "whole models")
            )
            raise ArtifactError(
                f"{name} is {kinds[0]}, and this server samples from {kinds[1]}.\n"
                "  Serve with the enable_lora and merge_lora_interval that it was saved with."
            )
        if rank is None or room is None:
            return
        if rank > room:
            raise ArtifactError(
                f"{name} is an adapter of rank {rank}, and this server has lora_rank {room}."
                f"\n  Serve with lora_rank {rank} or more."
            )
        if strange := sorted({*metadata["layers"]} - {*substrate.adapted}):
            raise ArtifactError(
                f"{name} has an adapter on {strange[0]}, which has none here.\n"
                "  Serve with the lora_target_modules that it was saved with."
            )

    def _get_adapter(self, folder: Path, time: int) -> LoadedAdapter:
        # With the time, because a checkpoint may be saved again under the same name.
        key = str(folder), time
        if key not in self.cached_adapters:
            self.cached_adapters[key] = self._read_adapter(folder)
        # The first entry is then the least recently used one.
        self.cached_adapters.move_to_end(key)
        while len(self.cached_adapters) > MAX_CACHED_ADAPTERS:
            self.cached_adapters.popitem(last=False)
        return self.cached_adapters[key]

    @torch.no_grad()
    def _read_adapter(self, folder: Path) -> LoadedAdapter:
        metadata, substrate = sampler_in(folder), self.models.substrate
        rank, layers = int(metadata["rank"]), list(metadata["layers"])
        initial = AdapterStart(folder, layers, substrate.names)
        weights: list[torch.Tensor] = []
        for trainable in substrate.trainable:
            local_weight = torch.zeros_like(local(trainable.parameter.detach()))
            for piece in trainable.shards:
                factor = parse_lora_name(piece.tensor)
                assert factor is not None, f"{piece.tensor} is no part of an adapter"
                if factor.hf_module not in layers:
                    continue
                shape = list(piece.full_shape)
                shape[rank_dim(factor, len(shape))] = rank
                full = padded(piece.tensor, initial(piece.tensor, tuple(shape)), piece.full_shape)
                copy_shard(full, piece, piece.view(local_weight))
            weights.append(local_weight)
        return LoadedAdapter(weights, lora_scaling(rank, metadata["alpha"], "rank"))


@dataclass(frozen=True)
class RunningGeneration:
    """A generation run, and the weights from which it samples."""

    handler: GenerationHandler
    run: GenerationRun
    adapter: str | None

    def may_join(self, command: GenerateCommand) -> bool:
        """Whether the command samples from the same weights, and the KV cache has room for it."""
        prompts = map(self.handler.build_prompt, command.samples)
        # Checkpoints are not written while a run goes on: the same folder has the same weights.
        return command.adapter == self.adapter and self.run.has_room(list(prompts))

    def result_of(self, command: GenerateCommand) -> GenerateResult:
        """The result of a command that no other joins. Raises the errors of `add` and `result`."""
        request = self.add(command)
        while not self.run.is_finished:
            self.run.step()
        return self.result(request)

    def add(self, command: GenerateCommand) -> GenerationRequest:
        """Add the prompts of a command. Raises ConfigError for an invalid one."""
        prompts = list(map(self.handler.build_prompt, command.samples))
        generator = self.handler.models.substrate.built.generator
        for number, prompt in enumerate(prompts):
            generator.require_possible(f"prompt {number}", prompt, self.handler.decode)
        return self.run.add(prompts)

    def result(self, request: GenerationRequest) -> GenerateResult:
        """The result of a finished request. Raises NotFiniteError."""
        if request.error:
            raise request.error
        return GenerateResult(results=tuple(map(_to_sample_result, request.outputs)))


def _to_sample_result(output: GenerationOutput) -> SampleResult:
    log_probs_T = output.log_probs_T
    tokens, log_probs = _to_arrays(output.top_k_logprobs)
    return SampleResult(
        sequences=tuple(map(_to_sequence, output.completions)),
        prompt_logprobs=None if log_probs_T is None else Array.of(log_probs_T.numpy(), "float32"),
        topk_prompt_tokens=tokens,
        topk_prompt_logprobs=log_probs,
    )


def _to_sequence(answer: Completion) -> SampledSequence:
    tokens, log_probs = _to_arrays(answer.top_k_logprobs)
    return SampledSequence(
        stop_reason=answer.finish_reason,
        tokens=Array.of(answer.tokens, "int32"),
        logprobs=Array.of(answer.log_probs, "float32"),
        topk_tokens=tokens,
        topk_logprobs=log_probs,
    )


def _to_arrays(top_k_logprobs: TopKLogprobs | None) -> tuple[Array | None, Array | None]:
    if top_k_logprobs is None:
        return None, None
    tokens_TK, log_probs_TK = top_k_logprobs
    return Array.of(tokens_TK.numpy(), "int32"), Array.of(log_probs_TK.numpy(), "float32")
