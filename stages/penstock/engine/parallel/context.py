"""Context parallelism: several ranks share the tokens of each row, and only attention notices.

Over the ring axis tokens stay and keys and values travel (`ring.py`); over the ulysses axis tokens
are exchanged for heads (`ulysses.py`). With both, a ring rank's tokens are cut over its ulysses
ranks, and the ring runs on the share of the heads that each of these gets.

T tokens of a row or micro-batch, padding included.
"""

from dataclasses import replace

import torch

from penstock.engine.parallel.degrees import Degrees
from penstock.engine.parallel.mesh import Mesh
from penstock.engine.parallel.ring import Ring, spread
from penstock.engine.parallel.ulysses import Ulysses
from penstock.models.layers.attention import Attend
from penstock.rows.collate import MicroBatch
from penstock_kernels.attention import Segments, attention


def multiple(degrees: Degrees) -> int:
    """What T must be a multiple of."""
    return degrees.ulysses * (2 * degrees.ring if degrees.ring > 1 else 1)


class Context:
    """This rank's share of the tokens of a row, and attention from them to all of it."""

    def __init__(self, mesh: Mesh) -> None:
        """Every rank of the mesh must make one at the same time."""
        self.multiple = multiple(mesh.degrees)
        """What T must be a multiple of."""
        ring, ulysses = mesh.group("ring"), mesh.group("ulysses")
        self._ring = Ring(ring, mesh.size("ring"), mesh.index("ring")) if ring else None
        self._ulysses = (
            Ulysses(ulysses, mesh.size("ulysses"), mesh.index("ulysses")) if ulysses else None
        )

    def mine(self, batch: MicroBatch) -> MicroBatch:
        """This rank's tokens. What is not a tensor stays that of the whole micro-batch."""
        return replace(
            batch,
            input_ids_T=self.part(batch.input_ids_T),
            labels_T=self.part(batch.labels_T),
            position_ids_T=self.part(batch.position_ids_T),
        )

    def segments(self, lengths: tuple[int, ...], device: torch.device | str) -> Segments:
        """What `attend` needs to know of a micro-batch's documents, once for all layers."""
        if self._ring:
            return spread(lengths, self._ring.size, self._ring.index, device)
        return Segments.of(lengths, device)

    def attend(self, backend: str) -> Attend:
        """Attention from this rank's tokens to the whole row's, on `attention`'s backend."""
        inner = self._ring.attend(backend) if self._ring else attention.backend(backend)
        return self._ulysses.attend(inner) if self._ulysses else inner

    def part(self, x_T: torch.Tensor) -> torch.Tensor:
        """This rank's share of what there is for each token of a micro-batch."""
        assert x_T.shape[0] % self.multiple == 0, (
            f"{x_T.shape[0]} tokens are not padded to a multiple of {self.multiple}"
        )
        if self._ring:
            x_T = self._ring.mine(x_T)
        return self._ulysses.mine(x_T) if self._ulysses else x_T
