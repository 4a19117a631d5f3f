"""Norms of a base model's weights, which magnitudes of adapters (DoRA) start at."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import torch

from penstock.adapters.names import EMBEDDING, MAGNITUDE, factor_of
from penstock.engine.parallel.pieces import Held
from penstock.engine.ranks import Ranks
from penstock.engine.safetensors_folder import SafetensorsFolder
from penstock.engine.weights import Readers, row_blocks


def norms_for(
    held: Sequence[Held],
    weights: Path | None,
    start: Callable[[str], torch.Tensor],
    *,
    readers: Readers,
    ranks: Ranks,
) -> dict[str, torch.Tensor]:
    """The norm of each row, for an embedding of each column, of every weight whose adapter has
    magnitudes on any rank; by the layer's name. Every rank calls it and gets all.

    Weights are those of the folder `weights`, or without one `start` of a weight's name. They are
    computed from whole rows in one order, so that the layout does not show: by rank 0 alone, or of
    `all_ranks` by each a share.
    """
    mine = {
        factor.hf_module
        for one in held
        for piece in one.pieces
        if (factor := factor_of(piece.tensor)) and factor.side == MAGNITUDE
    }
    wanted = sorted(set[str]().union(*ranks.gather(mine)))
    if not wanted:
        return {}
    if readers == "all_ranks":
        here = wanted[ranks.rank :: ranks.world]
    else:
        here = wanted if ranks.leads else []
    found: dict[str, torch.Tensor] = {}
    if weights is None:
        for layer in here:
            found[layer] = _norms(layer, [start(f"{layer}.weight")])
    elif here:
        with SafetensorsFolder(weights) as folder:
            folder.require(f"{layer}.weight" for layer in here)
            for layer in here:
                found[layer] = _norms(layer, _rows(folder, f"{layer}.weight"))
    return {layer: norms for some in ranks.gather(found) for layer, norms in some.items()}


def _norms(layer: str, stretches: Iterable[torch.Tensor]) -> torch.Tensor:
    """fp32, of sums in fp64."""
    dim = 0 if layer == EMBEDDING else 1
    squares = [rows.double().square_().sum(dim) for rows in stretches]
    total = torch.stack(squares).sum(0) if dim == 0 else torch.cat(squares)
    return total.sqrt_().float()


def _rows(folder: SafetensorsFolder, name: str) -> Iterator[torch.Tensor]:
    stored = folder.stored(name)
    for first, end in row_blocks(stored.shape, stored.dtype):
        yield folder.box(name, (first, 0), (end - first, stored.shape[1]))
