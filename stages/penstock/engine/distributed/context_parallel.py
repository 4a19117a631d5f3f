"""Context parallelism: the tokens of each packed sequence are split over ranks.

Only attention and layers with recurrent states communicate.

Over the ring axis keys and values are sent (`ring_attention.py`); over the ulysses axis an
all-to-all exchanges tokens for heads (`ulysses.py`). With both, the tokens of a ring rank are split
over its ulysses ranks, and ring attention runs on the share of the heads that each of these gets.
Layers with states exchange tokens for heads over both axes.

T tokens of a packed sequence or micro-batch, padding included.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from penstock.engine.distributed.collectives import reduce_from_tp_region
from penstock.engine.distributed.device_mesh import Axis, Mesh
from penstock.engine.distributed.ring_attention import Ring, RingSegments, ring_segments
from penstock.engine.distributed.ulysses import Ulysses
from penstock.engine.generation.kv_cache import with_kv_cache
from penstock.losses.labels import Labels
from penstock.models.causal_lm import CausalLM
from penstock.models.decoder_config import DecoderConfig
from penstock.models.layers.attention import AttentionFn
from penstock.models.layers.indexer import Indexer
from penstock.models.layers.recurrent.mixer import RecurrentMixer
from penstock.rows.collate import MicroBatch
from penstock.rows.shared_prefix import first_blind_rows
from penstock_kernels.attention import VarlenMetadata, attention
from penstock_kernels.sparse_attention import PartialSegments


class ContextParallel:
    """This rank's share of the tokens of packed sequences, and attention from it to all tokens."""

    def __init__(self, mesh: Mesh) -> None:
        """Every rank of the mesh must create it at the same time."""
        # What T must be a multiple of: in zigzag order a ring rank has two chunks.
        self.multiple = mesh.dims.ulysses * (2 * mesh.dims.ring if mesh.dims.ring > 1 else 1)
        ring, ulysses = mesh.group("ring"), mesh.group("ulysses")
        self._mesh, self._groups = mesh, [group for group in (ring, ulysses) if group]
        self._ring = Ring(ring, mesh.size("ring"), mesh.index("ring")) if ring else None
        self._ulysses = (
            Ulysses(ulysses, mesh.size("ulysses"), mesh.index("ulysses")) if ulysses else None
        )

    def supports_kv_cache(self, config: DecoderConfig) -> bool:
        """Whether attention of such a model supports passes with a KV cache."""
        return self._ring is None and not (config.indexer and self._ulysses)

    def shard_batch(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens of the batch; other fields still describe the full micro-batch."""
        return replace(
            batch,
            input_ids_T=self.shard_tensor(batch.input_ids_T),
            labels_T=self.shard_tensor(batch.labels_T),
            position_ids_T=self.shard_tensor(batch.position_ids_T),
        )

    def shard_labels(self, batch: MicroBatch, device: torch.device) -> Labels:
        """This rank's labels of a micro-batch with their loss weights, on the device."""
        weights_T = batch.loss_weights_T
        local_T = None if weights_T is None else self.shard_tensor(weights_T)
        return Labels.from_host(self.shard_tensor(batch.labels_T), device, local_T)

    def varlen_metadata(self, batch: MicroBatch, device: torch.device | str) -> VarlenMetadata:
        """The document boundaries of a micro-batch for `attend`, built once for all layers."""
        spans, runs = batch.spans(), batch.bidirectional
        if self._ring:
            ring_rank = self._ring.size, self._ring.index, device
            return ring_segments(batch.lengths, *ring_rank, spans=spans, bidirectional=runs)
        start_rows = None if spans is None else first_blind_rows(spans)
        return VarlenMetadata.of(batch.lengths, device, start_rows=start_rows, bidirectional=runs)

    def attention_fn(self, backend: str) -> AttentionFn:
        ring = self._ring
        inner = ring.attend(backend) if ring else with_kv_cache(attention.backend(backend))
        return self._ulysses.attend(inner) if self._ulysses else inner

    def parallelize(self, parts: Sequence[CausalLM]) -> None:
        """Let the layers that read other tokens in other ways than `attention_fn` does read those
        of all ranks. Every rank must call it at the same time.
        """
        # Of the whole model: a rank of a pipeline takes part in making the groups of others.
        config = parts[0].config
        axes: tuple[Axis, ...] = ("ring", "ulysses") if self._ring else ("ulysses",)
        group = self._mesh.group(*axes) if config.linear_layers or config.indexer else None
        if group is None:
            return
        size, index = self._mesh.size(*axes), self._mesh.index(*axes)
        exchange = Ulysses(group, size, index, zigzag=self._mesh.size("ring"))
        for module in (module for part in parts for module in part.modules()):
            if isinstance(module, RecurrentMixer):
                # Run for all tokens of some heads.
                module.run_core = exchange.run_core(module)
            elif isinstance(module, Indexer):
                module.keys = _GatheredKeys(exchange, self.shard_tensor)

    def all_reduce_sum(self, local_sum: torch.Tensor) -> torch.Tensor:
        """All-reduce `local_sum`. The gradient of each rank's term is the gradient of the sum, so
        what follows must be computed identically on all ranks.
        """
        for group in self._groups:
            local_sum = reduce_from_tp_region(local_sum, group, "whole")
        return local_sum

    def gather_tokens(self, x_S: torch.Tensor) -> torch.Tensor:
        """All tokens of a per-token tensor, where `attend` supports a KV cache; no gradients."""
        return self._ulysses.gather(x_S) if self._ulysses else x_S

    def shard_tensor(self, x_T: torch.Tensor) -> torch.Tensor:
        assert x_T.shape[0] % self.multiple == 0, (
            f"{x_T.shape[0]} tokens are not padded to a multiple of {self.multiple}"
        )
        if self._ring:
            x_T = self._ring.shard(x_T)
        return self._ulysses.shard(x_T) if self._ulysses else x_T


@dataclass(frozen=True)
class _GatheredKeys:
    """The keys of all tokens, for the queries of this rank's: `AllKeys` of an indexer."""

    exchange: Ulysses
    shard: Callable[[torch.Tensor], torch.Tensor]

    def segments(self, segments: VarlenMetadata) -> VarlenMetadata:
        if "partial" not in segments.memo:
            unsharded = segments.unsharded() if isinstance(segments, RingSegments) else segments
            own = self.shard(torch.arange(unsharded.num_tokens)).tolist()
            settings = {**vars(unsharded), "memo": {}}
            segments.memo["partial"] = PartialSegments(**settings, queries=tuple(_ranges(own)))
        return segments.memo["partial"]

    def gather(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        # Separate collectives would cost as many times the latency.
        flat = [part.flatten(1) for part in parts]
        all_TF = self.exchange.gather_in_sequence(torch.cat(flat, dim=1))
        split = all_TF.split([part.shape[1] for part in flat], dim=1)
        return tuple(
            # `cat` has promoted all parts to the widest dtype.
            x.unflatten(1, part.shape[1:]).to(part.dtype)
            for x, part in zip(split, parts, strict=True)
        )


def _ranges(numbers: Sequence[int]) -> list[range]:
    ranges: list[range] = []
    for number in numbers:
        if ranges and number == ranges[-1].stop:
            ranges[-1] = range(ranges[-1].start, number + 1)
        else:
            ranges.append(range(number, number + 1))
    return ranges
