"""Convolutions of queries, keys and values that files have as equal chunks of one tensor.

Transformers 5 joins the three of OLMo Hybrid's checkpoints and saves `torch.chunk` of the result,
whatever the rows of each are; it reads any three. No torch: checked before any work.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from penstock.engine.hf.expert_parts import StoredShape
from penstock.models.weights import WeightMap

JOINED = ".conv1d.weight"
"""How the names of the model's parameters end."""


@dataclass(frozen=True)
class RowChunk:
    """Rows of a tensor in files."""

    source: str
    start: int
    num_rows: int


def find_row_chunks(
    names: WeightMap, in_files: Collection[str], stored_shape: StoredShape
) -> Mapping[str, tuple[RowChunk, ...]]:
    """The chunks whose rows, one after another, are a tensor of the map, for each that files cut
    elsewhere. `in_files` are the names in the files."""
    chunks_by_name: dict[str, tuple[RowChunk, ...]] = {}
    shapes = names.hf_shapes()
    for native in names.native_names():
        stored = names.hf_names(native)
        if not native.endswith(JOINED) or len(stored) == 1 or not {*stored} <= {*in_files}:
            continue
        total, *columns = names.native_shape(native)
        # As `torch.chunk`: all but the last have the rounded-up share.
        chunk = -(-total // len(stored))
        chunks = {name: min(chunk, total - index * chunk) for index, name in enumerate(stored)}
        if {name: stored_shape(name) for name in stored} != {
            name: (rows, *columns) for name, rows in chunks.items()
        }:
            continue
        start = 0
        for name in stored:
            end = start + shapes[name][0]
            chunks_by_name[name] = tuple(_covering(chunks, start, end))
            start = end
    return chunks_by_name


def _covering(chunks: Mapping[str, int], start: int, end: int) -> list[RowChunk]:
    """The rows from `start` to `end` of all chunks, one after another."""
    parts, first = [], 0
    for source, rows in chunks.items():
        lowest, highest = max(start, first), min(end, first + rows)
        if lowest < highest:
            parts.append(RowChunk(source, lowest - first, highest - lowest))
        first += rows
    return parts
