"""Files whose experts have another form than `WeightMap` says.

- One tensor for all experts of a layer where there is one for each, as Qwen3.5 is published and
  transformers does not write it, and stacks of matrices [in, out] instead of [out, in], as
  Qwen3-VL's are.
- ERNIE-4.5-VL: weights of routers [in, out], and one tensor for the selection biases of both.

Each tensor is then a part of one in the files, transposed or not. No torch: checked before any
work.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.models.names import IMAGE_EXPERTS, SELECTION_BIAS
from penstock.models.state_layer_config import Shape
from penstock.models.weights import WeightMap

StoredShape = Callable[[str], Shape]
"""The shape of a tensor in files."""


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
            for part in _parts_of_ernie(f"{layer}.mlp", module):
                is_there = part.source in in_files
                part_shape = (
                    shapes[stored[0]][::-1] if part.is_transposed else (2, shapes[stored[0]][-1])
                )
                if is_there and stored_shape(part.source) == part_shape:
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


def _parts_of_ernie(layer: str, module: str) -> Iterator[Part]:
    """Where ERNIE-4.5-VL's files have a router's tensor."""
    of_images = module.startswith(f"{IMAGE_EXPERTS}.")
    if module.endswith(SELECTION_BIAS):
        yield Part(f"{layer}.moe_statics.{SELECTION_BIAS}", (int(of_images), 0))
    elif module.endswith("gate.weight"):
        yield Part(f"{layer}.gate.weight_1" if of_images else f"{layer}.gate.weight", (0, 0), True)
