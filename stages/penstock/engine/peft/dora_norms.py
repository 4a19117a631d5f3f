"""DoRA magnitude initialization: norms of the base model's weights."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import torch

from penstock.adapters.names import EMBEDDING, MAGNITUDE, parse_lora_name
from penstock.engine.distributed.param_shards import LocalParam
from penstock.engine.distributed.ranks import ProcessInfo
from penstock.engine.hf.load_weights import Readers, ToReader, row_blocks
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.quantization.quantized_reader import TensorReader


def norms_for(
    params: Sequence[LocalParam],
    weights: Path | None,
    drawn: TensorReader,
    *,
    readers: Readers,
    ranks: ProcessInfo,
    to_reader: ToReader,
) -> dict[str, torch.Tensor]:
    """The row norms (of an embedding, column norms) of every weight with a DoRA adapter on any
    rank, by layer name, on all ranks. Collective.

    Weights come from the folder `weights`, wrapped by `to_reader`, or without one from the initial
    values `drawn`. Norms are computed from full rows in a fixed order, so they do not depend on the
    layout: by rank 0 alone, or with `all_ranks` a share by each.
    """
    local_layers = {
        factor.hf_module
        for param in params
        for piece in param.shards
        if (factor := parse_lora_name(piece.tensor)) and factor.side == MAGNITUDE
    }
    # Sorted: ranks share out the layers by their numbers, which must be the same on all.
    layers = sorted(set[str]().union(*ranks.all_gather(local_layers)))
    if not layers:
        return {}
    if readers == "all_ranks":
        read_layers = layers[ranks.rank :: ranks.world_size]
    else:
        read_layers = layers if ranks.is_main_process else []
    norms_by_layer: dict[str, torch.Tensor] = {}
    with SafetensorsFolder(weights) if weights else nullcontext() as opened:
        source = to_reader(opened) if opened else drawn
        if read_layers:
            source.require(f"{layer}.weight" for layer in read_layers)
        for layer in read_layers:
            name, dim = f"{layer}.weight", 0 if layer == EMBEDDING else 1
            stored = source.stored(name)
            squares: list[torch.Tensor] = []
            for first, end in row_blocks(stored.shape, stored.dtype):
                rows = source.box(name, (first, 0), (end - first, stored.shape[1]))
                # In fp64, so that the sizes of blocks and the order of their sums do not show in
                # fp32.
                squares.append(rows.double().square_().sum(dim))
            total = torch.stack(squares).sum(0) if dim == 0 else torch.cat(squares)
            norms_by_layer[layer] = total.sqrt_().float()
    for rank_norms in ranks.all_gather(norms_by_layer):
        norms_by_layer |= rank_norms
    return norms_by_layer
