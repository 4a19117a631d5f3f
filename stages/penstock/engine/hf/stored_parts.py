"""Files whose tensors have another form than `WeightMap` says. No torch: checked before any work.

- One tensor for all experts of a layer where there is one for each, as Qwen3.5 is published and
  transformers does not write it, and stacks of matrices [in, out] instead of [out, in], as
  Qwen3-VL's are. ERNIE-4.5-VL: weights of routers [in, out], and one tensor for the selection
  biases of both. Each tensor is a part of one in the files, transposed or not.
- Convolutions of queries, keys and values that files have as equal chunks of one tensor.
  Transformers 5 joins the three of OLMo Hybrid's checkpoints and saves `torch.chunk` of the result,
  whatever the rows of each are; it reads any three.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from penstock.models.names import IMAGE_EXPERTS, SELECTION_BIAS
from penstock.models.state_layer_config import Shape
from penstock.models.weights import WeightMap

StoredShape = Callable[[str], Shape]


@dataclass(frozen=True)
class Part:
    """Where a tensor is in a file's tensor."""

    source: str
    start: Shape
    """Its first element in the source. What the source has more dimensions, come first."""
    is_transposed: bool = False
    """Whether the source has its last two dimensions in the other order."""

    def box(self, offsets: Sequence[int], sizes: Sequence[int]) -> tuple[list[int], list[int]]:
        """(offsets, sizes) in the source of a box of the tensor."""
        offsets, sizes = list(offsets), list(sizes)
        if self.is_transposed:
            # The last two, exchanged.
            offsets[-2:], sizes[-2:] = offsets[:-3:-1], sizes[:-3:-1]
        more = len(self.start) - len(offsets)
        offsets = [a + b for a, b in zip(self.start, [0] * more + offsets, strict=True)]
        return offsets, [1] * more + sizes


def find_parts(
    names: WeightMap, in_files: Collection[str], stored_shape: StoredShape
) -> Mapping[str, Part]:
    """The tensors that files have in another form, by their names in the map. `in_files` are the
    names in the files, which are those of the map as far as the forms agree."""
    parts: dict[str, Part] = {}
    shapes = names.hf_shapes() if names.config.experts else {}
    for native in names.native_names() if shapes else ():
        layer, _, module = native.partition(".mlp.")
        stored = names.hf_names(native)
        if module.startswith("experts."):
            stack, full_shape = names.stack_parameter(native), names.native_shape(native)
            if stack in in_files:
                parts |= _parts_of_stack(stack, stored_shape(stack), stored, shapes, full_shape)
        elif module and stored[0] not in in_files:
            # ERNIE-4.5-VL's routers.
            of_images, shape = module.startswith(f"{IMAGE_EXPERTS}."), shapes[stored[0]]
            if module.endswith(SELECTION_BIAS):
                part = Part(f"{layer}.mlp.moe_statics.{SELECTION_BIAS}", (int(of_images), 0))
                part_shape = 2, shape[-1]
            elif module.endswith("gate.weight"):
                part = Part(f"{layer}.mlp.gate.weight{'_1' * of_images}", (0, 0), True)
                part_shape = shape[::-1]
            else:
                continue
            if part.source in in_files and stored_shape(part.source) == part_shape:
                parts[stored[0]] = part
    return parts


def _parts_of_stack(
    stack: str,
    shape: Shape,
    stored: Sequence[str],
    shapes: Mapping[str, Shape],
    full_shape: Shape,
) -> Mapping[str, Part]:
    """The parts of a stack of the shape `full_shape` whose matrices have these tensors in order;
    none if it is of another model, or is in the map as it is."""
    is_transposed = shape != full_shape
    if shape not in (full_shape, (full_shape[0], *full_shape[:0:-1])):
        return {}
    if tuple(stored) == (stack,):
        return {stack: Part(stack, (0, 0, 0), is_transposed)} if is_transposed else {}
    parts: dict[str, Part] = {}
    first = 0
    for name in stored:
        # Gate and up projection of an expert are rows of one matrix of the stack.
        expert, row = divmod(first, full_shape[1])
        parts[name] = Part(
            stack, (expert, 0, row) if is_transposed else (expert, row, 0), is_transposed
        )
        first += shapes[name][0]
    return parts


# How the names of the model's parameters end.
CONVOLUTIONS = ".conv1d.weight"


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
        if not native.endswith(CONVOLUTIONS) or len(stored) == 1 or not {*stored} <= {*in_files}:
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
    parts, first = [], 0
    for source, rows in chunks.items():
        lowest, highest = max(start, first), min(end, first + rows)
        if lowest < highest:
            parts.append(RowChunk(source, lowest - first, highest - lowest))
        first += rows
    return parts
