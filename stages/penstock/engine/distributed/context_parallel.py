"""Context parallelism: the tokens of each packed sequence are split over ranks.

Only attention communicates.

Over the ring axis keys and values are sent (`ring_attention.py`); over the ulysses axis an
all-to-all exchanges tokens for heads (`ulysses.py`). With both, the tokens of a ring rank are split
over its ulysses ranks, and ring attention runs on the share of the heads that each of these gets.

T tokens of a packed sequence or micro-batch, padding included.
"""

from dataclasses import replace

import torch

from penstock.engine.distributed.collectives import reduce_from_tp_region
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.engine.distributed.ring_attention import Ring, ring_segments
from penstock.engine.distributed.ulysses import Ulysses
from penstock.engine.generation.kv_cache import with_kv_cache
from penstock.models.layers.attention import AttentionFn
from penstock.rows.collate import MicroBatch
from penstock.rows.shared_prefix import first_blind_rows
from penstock_kernels.attention import VarlenMetadata, attention


def multiple(degrees: ParallelDims) -> int:
    """What T must be a multiple of."""
    return degrees.ulysses * (2 * degrees.ring if degrees.ring > 1 else 1)


class ContextParallel:
    """This rank's share of the tokens of packed sequences, and attention from it to all tokens."""

    def __init__(self, mesh: Mesh) -> None:
        """Every rank of the mesh must create it at the same time."""
        self.multiple = multiple(mesh.dims)
        """What T must be a multiple of."""
        ring, ulysses = mesh.group("ring"), mesh.group("ulysses")
        self._groups = [group for group in (ring, ulysses) if group]
        self._ring = Ring(ring, mesh.size("ring"), mesh.index("ring")) if ring else None
        self._ulysses = (
            Ulysses(ulysses, mesh.size("ulysses"), mesh.index("ulysses")) if ulysses else None
        )

    @property
    def supports_kv_cache(self) -> bool:
        """Whether `attend` supports passes with a KV cache."""
        return self._ring is None

    def shard_batch(self, batch: MicroBatch) -> MicroBatch:
        """Slice the batch to this context-parallel rank.

        Non-tensor fields still describe the full micro-batch.
        """
        return replace(
            batch,
            input_ids_T=self.shard_tensor(batch.input_ids_T),
            labels_T=self.shard_tensor(batch.labels_T),
            position_ids_T=self.shard_tensor(batch.position_ids_T),
        )

    def varlen_metadata(self, batch: MicroBatch, device: torch.device | str) -> VarlenMetadata:
        """The document boundaries of a micro-batch for `attend`, built once for all layers."""
        spans = batch.spans()
        if self._ring:
            return ring_segments(
                batch.lengths, self._ring.size, self._ring.index, device, spans=spans
            )
        start_rows = None if spans is None else first_blind_rows(spans)
        return VarlenMetadata.of(batch.lengths, device, start_rows=start_rows)

    def attention_fn(self, backend: str) -> AttentionFn:
        """Attention from this rank's tokens to the whole packed sequence, on `backend`."""
        ring = self._ring
        inner = ring.attend(backend) if ring else with_kv_cache(attention.backend(backend))
        return self._ulysses.attend(inner) if self._ulysses else inner

    def all_reduce_sum(self, mine: torch.Tensor) -> torch.Tensor:
        """All-reduce `mine` over the context-parallel ranks.

        The gradient of each rank's term is the gradient of the sum, so what follows must be
        computed identically on all ranks.
        """
        for group in self._groups:
            mine = reduce_from_tp_region(mine, group, "whole")
        return mine

    def gather_tokens(self, x_S: torch.Tensor) -> torch.Tensor:
        """All tokens of a per-token tensor, where `attend` supports a KV cache; no gradients."""
        return self._ulysses.gather(x_S) if self._ulysses else x_S

    def shard_tensor(self, x_T: torch.Tensor) -> torch.Tensor:
        """This rank's share of a per-token tensor of a micro-batch."""
        assert x_T.shape[0] % self.multiple == 0, (
            f"{x_T.shape[0]} tokens are not padded to a multiple of {self.multiple}"
        )
        if self._ring:
            x_T = self._ring.shard(x_T)
        return self._ulysses.shard(x_T) if self._ulysses else x_T
