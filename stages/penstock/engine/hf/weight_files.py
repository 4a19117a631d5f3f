"""Check a folder's weight files against its config.json, from safetensors headers only.

No torch: checked before any work, and again by the readers of the weights.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from penstock.core.errors import CapabilityError
from penstock.core.safetensors_header import files_by_tensor, read_header, unreadable
from penstock.models.weights import Shape

TOGETHER = "Check that model.model_path and model.config_path belong together."


def require_weights(folder: Path, shapes: Mapping[str, Shape] | None, num_layers: int) -> None:
    """Raise CapabilityError unless every file in the folder's index is complete and the tensors
    match.

    `shapes` are the expected tensors, `num_layers` the number of layers. Without shapes, as for
    pre-quantized models, only the files are checked.
    """
    files = files_by_tensor(folder)
    headers = {file: read_header(file) for file in sorted(set(files.values()))}
    if shapes is None:
        return
    require_tensors(shapes, files)
    for name, shape in shapes.items():
        file = files[name]
        if name not in headers[file]:
            raise unreadable(file, f"it lacks {name}, which the index places there")
        require_shape(name, headers[file][name].shape, shape)
    _require_no_more_layers(files, num_layers)


def require_tensors(names: Iterable[str], there: Collection[str]) -> None:
    """Raise CapabilityError unless every name exists."""
    if missing := [name for name in names if name not in there]:
        raise CapabilityError(
            f"the checkpoint lacks {len(missing)} tensors that its config.json implies, first "
            f"{missing[0]}.\n  {TOGETHER}"
        )


def require_shape(name: str, found: Shape, implied: Shape) -> None:
    """Raise CapabilityError unless the tensor has the shape that the config implies."""
    if found != implied:
        raise CapabilityError(
            f"{name} is {found} in the checkpoint, and the config makes it {implied}.\n"
            "  Check that the weights belong to this config.json."
        )


def _require_no_more_layers(names: Iterable[str], num_layers: int) -> None:
    """Reject layers that would be dropped silently."""
    found = (re.match(r"model\.(?:decoder\.)?layers\.(\d+)\.", name) for name in names)
    layers = {int(match[1]) for match in found if match}
    if more := sorted(layer for layer in layers if layer >= num_layers):
        raise CapabilityError(
            f"the checkpoint has {max(layers) + 1} layers, and its config.json says "
            f"num_hidden_layers {num_layers}: layer {more[0]} and those after it would be left "
            f"out.\n  {TOGETHER}"
        )
