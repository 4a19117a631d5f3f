"""Context parallelism: several ranks share the tokens of each row, and only attention notices.

Over the ring axis tokens stay and keys and values travel (`ring.py`); over the ulysses axis tokens
are exchanged for heads (`ulysses.py`). With both, a ring rank's tokens are cut over its ulysses
ranks, and the ring runs on the share of the heads that each of these gets.

T tokens of a row or micro-batch, padding included.
"""

from dataclasses import replace

import torch

from penstock.engine.distributed.collectives import reduce_from_tp_region
from penstock.engine.distributed.device_mesh import Mesh
from penstock.engine.distributed.parallel_dims import ParallelDims
from penstock.engine.distributed.ring_attention import Ring, ring_segments
from penstock.engine.distributed.ulysses import Ulysses
from penstock.engine.generation.kv_cache import keeping
from penstock.models.layers.attention import AttentionFn
from penstock.rows.collate import MicroBatch
from penstock.rows.shared_prefix import first_blind_rows
from penstock_kernels.attention import VarlenMetadata, attention


def multiple(degrees: ParallelDims) -> int:
    """What T must be a multiple of."""
    return degrees.ulysses * (2 * degrees.ring if degrees.ring > 1 else 1)


class ContextParallel:
    """This rank's share of the tokens of a row, and attention from them to all of it."""

    def __init__(self, mesh: Mesh) -> None:
        """Every rank of the mesh must make one at the same time."""
        self.multiple = multiple(mesh.degrees)
        """What T must be a multiple of."""
        ring, ulysses = mesh.group("ring"), mesh.group("ulysses")
        self._groups = [group for group in (ring, ulysses) if group]
        self._ring = Ring(ring, mesh.size("ring"), mesh.index("ring")) if ring else None
        self._ulysses = (
            Ulysses(ulysses, mesh.size("ulysses"), mesh.index("ulysses")) if ulysses else None
        )

    @property
    def keeps(self) -> bool:
        """Whether `attend` knows passes that fill or read a cache of keys and values."""
        return self._ring is None

    def mine(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens. What is not a tensor stays that of the whole micro-batch."""
        return replace(
            batch,
            input_ids_T=self.part(batch.input_ids_T),
            labels_T=self.part(batch.labels_T),
            position_ids_T=self.part(batch.position_ids_T),
        )

    def segments(self, batch: MicroBatch, device: torch.device | str) -> VarlenMetadata:
        """What `attend` needs to know of a micro-batch's documents, once for all layers."""
        spans = batch.spans()
        if self._ring:
            return ring_segments(
                batch.lengths, self._ring.size, self._ring.index, device, spans=spans
            )
        start_rows = None if spans is None else first_blind_rows(spans)
        return VarlenMetadata.of(batch.lengths, device, start_rows=start_rows)

    def attend(self, backend: str) -> AttentionFn:
        """Attention from this rank's tokens to the whole row's, on `attention`'s backend."""
        ring = self._ring
        inner = ring.attend(backend) if ring else keeping(attention.backend(backend))
        return self._ulysses.attend(inner) if self._ulysses else inner

    def total(self, mine: torch.Tensor) -> torch.Tensor:
        """The sum of what the ranks that share a row found, on all of them.

        The gradient of each one's own is the sum's: what is made of it must be made alike on all.
        """
        for group in self._groups:
            mine = reduce_from_tp_region(mine, group, "whole")
        return mine

    def part(self, x_T: torch.Tensor) -> torch.Tensor:
        """This rank's share of what there is for each token of a micro-batch."""
        assert x_T.shape[0] % self.multiple == 0, (
            f"{x_T.shape[0]} tokens are not padded to a multiple of {self.multiple}"
        )
        if self._ring:
            x_T = self._ring.mine(x_T)
        return self._ulysses.mine(x_T) if self._ulysses else x_T
