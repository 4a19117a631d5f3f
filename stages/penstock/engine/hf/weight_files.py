"""Check a folder's weight files against its config.json, from safetensors headers only.

No torch: checked before any work, and again by the readers of the weights.
"""

import re
from collections.abc import Callable, Collection, Iterable
from pathlib import Path

from penstock.core.errors import CapabilityError
from penstock.core.safetensors_header import files_by_tensor, read_header, unreadable
from penstock.engine.hf.stored_parts import find_parts, find_row_chunks
from penstock.models.state_layer_config import Shape
from penstock.models.weights import WeightMap

QUANTIZED = ("F8_E4M3", "F8_E5M2", "F8_E8M0", "U8", "I8", "I32")

# Factors that take the hidden states of a layer.
OF_HIDDEN_STATES = re.compile(
    r"\.layers\.(?P<layer>\d+)\.self_attn\.[qkv]_proj\.lora_A(\.default)?\.weight$"
)

# A layer of the decoder, or after its last one (DeepSeek, GLM).
LAYER = re.compile(r"model\.layers\.(\d+)\.")
# What other families call all that predicts further tokens (Qwen, ERNIE 4.5, MiMo).
MTP = re.compile(r"(?:model\.)?mtp[._]")

TOGETHER = (
    "Check that model.model_path and model.config_path belong together, and that model.foundation"
    " keeps the sizes of the weights."
)


def require_weights(
    folder: Path,
    names: WeightMap | None,
    num_layers: int,
    rename: Callable[[str], str] = str,
) -> None:
    """Raise CapabilityError unless every file in the folder's index is complete and the tensors
    match.

    `names` has the expected tensors, `num_layers` is the number of layers. Without names, as for
    pre-quantized models, only the files are checked. `rename` makes these names of those in the
    files.
    """
    files = files_by_tensor(folder)
    headers = {file: read_header(file) for file in sorted(set(files.values()))}
    if names is None:
        return
    in_files = {rename(name): name for name in files}

    def stored_shape(name: str) -> Shape:
        in_file = in_files[name]
        file = files[in_file]
        if in_file not in headers[file]:
            raise unreadable(file, f"it lacks {in_file}, which the index places there")
        return headers[file][in_file].shape

    other_forms = {
        **find_parts(names, in_files, stored_shape),
        **find_row_chunks(names, in_files, stored_shape),
    }
    shapes = {name: shape for name, shape in names.hf_shapes().items() if name not in other_forms}
    require_tensors(shapes, in_files)
    for name, shape in shapes.items():
        require_shape(name, stored_shape(name), shape)
    matches = (re.match(r"model\.(?:decoder\.)?layers\.(\d+)\.", name) for name in in_files)
    layers = {int(match[1]) for match in matches if match}
    # They would be dropped silently.
    if more := sorted(layer for layer in layers if layer >= num_layers):
        raise CapabilityError(
            f"the checkpoint has {max(layers) + 1} layers, and its config.json says "
            f"num_hidden_layers {num_layers}: layer {more[0]} and those after it would be left "
            f"out.\n  {TOGETHER}"
        )


def require_adapter(file: Path, hidden_size: int, num_layers: int) -> None:
    """Raise CapabilityError unless the file of an adapter is complete, and its factors are of a
    model with this width and so many layers."""
    for name, entry in read_header(file).items():
        match, fault = OF_HIDDEN_STATES.search(name), ""
        if match and entry.shape[-1] != hidden_size:
            fault = (
                f"{entry.shape}, for {entry.shape[-1]} features, and this model has {hidden_size} "
                "(hidden_size)"
            )
        elif match and int(match["layer"]) >= num_layers:
            fault = f"in layer {match['layer']}, and this model has {num_layers}"
        if fault:
            raise CapabilityError(
                f"{file.parent} is an adapter of another model: {name} is {fault}.\n"
                "  Name the base model that its adapter_config.json names."
            )


def require_plain(folder: Path, names: Callable[[str], bool]) -> None:
    """Raise CapabilityError for tensors with these names that are stored quantized."""
    for name, file in files_by_tensor(folder).items():
        if names(name) and (entry := read_header(file).get(name)) and entry.dtype in QUANTIZED:
            raise CapabilityError(
                f"{name} of the checkpoint is {entry.dtype}: parts besides the language model are "
                "copied to exports, which are not quantized.\n"
                "  Name the model that it was quantized from as model.model_path."
            )


def prediction_tensors(names: Iterable[str], num_layers: int) -> list[str]:
    """The tensors of a decoder with so many layers that predict further tokens."""
    return [
        name
        for name in names
        if MTP.match(name) or ((layer := LAYER.match(name)) and int(layer[1]) >= num_layers)
    ]


def absent_tensors(names: Iterable[str], weights: WeightMap) -> list[str]:
    """The tensors of parts that are not built."""
    built = weights.hf_shapes()
    return [name for name in names if name.startswith(weights.absent_parts) and name not in built]


def require_tensors(names: Iterable[str], present: Collection[str]) -> None:
    """Raise CapabilityError unless every name exists."""
    if missing := [name for name in names if name not in present]:
        raise CapabilityError(
            f"the checkpoint lacks {len(missing)} tensors that its config.json implies, first "
            f"{missing[0]}.\n  {TOGETHER}"
        )


def require_shape(name: str, shape: Shape, implied: Shape) -> None:
    """Raise CapabilityError unless the tensor has the shape that the config implies."""
    if shape != implied:
        raise CapabilityError(
            f"{name} is {shape} in the checkpoint, and the config makes it {implied}.\n"
            "  Check that the weights belong to this config.json."
        )
