"""QLoRA layer selection: the quantized matrices of a base model, and their formats.

Linear layers in transformer blocks are quantized: those of attention, feed-forward networks and
experts, with or without adapters. Embeddings, the LM head, norms and routers are not.
"""

from collections.abc import Iterator, Mapping

from penstock.config.schema.quantization import DEFAULT, PAIRS, is_among
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.model_source import QuantizationArgs
from penstock.engine.quantization.prequantized import PrequantizedFormat
from penstock.engine.quantization.validate_settings import (
    fused,
    require_known,
    validate_prequantized,
)
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.tp_roles import ParallelStyle, Roles, find_parallel_style
from penstock.models.weights import WeightMap
from penstock_kernels.quant import Format, get_format

Formats = Mapping[str, Format]
"""By the name of a matrix in a checkpoint."""

FIELD = "lora.exclude_modules"

QUANTIZED = (
    ParallelStyle.COLWISE,
    ParallelStyle.ROWWISE,
    ParallelStyle.REPLICATED,
    ParallelStyle.EXPERTS,
)


def select_formats(
    quantizing: QuantizationArgs | None,
    published: PrequantizedFormat | None,
    names: WeightMap,
    roles: Roles,
) -> Formats:
    """The format of every quantized matrix; empty without `quantizing`.

    A pre-quantized checkpoint decides what the settings leave out.

    Raises:
        ConfigError: an invalid format, group size or module, or one that this checkpoint rules
            out.
        CapabilityError: a parameter of the model would be quantized only in part.
    """
    if published:
        validate_prequantized(quantizing, published.declared)
    if quantizing is None:
        return {}
    if published:
        linear = of_experts = published.format
    else:
        linear, of_experts = _pair(quantizing.format or DEFAULT, quantizing.group)
    excluded = quantizing.excluded
    if excluded is None:
        excluded = published.declared.ignored_modules if published else ()
    else:
        require_known(FIELD, excluded, names)
    formats: dict[str, Format] = {}
    for native, role in matrices(names, roles):
        parts = names.hf_names(native)
        chosen = [part for part in parts if not is_among(excluded, part.removesuffix(".weight"))]
        if not chosen:
            continue
        if len(chosen) < len(parts):
            raise CapabilityError(_in_part(native, next(p for p in parts if p not in chosen)))
        is_stack = bool(names.config.experts and names.config.experts.is_stacked)
        if role is ParallelStyle.EXPERTS and is_stack and not names.is_transposed(native):
            raise CapabilityError(
                f"lora.enable_qlora: {parts[0]} holds all experts of a layer as [out, in], which "
                "no format here takes.\n"
                "  Write exclude_modules: [experts] to quantize the rest."
            )
        formats |= dict.fromkeys(chosen, of_experts if role is ParallelStyle.EXPERTS else linear)
    return formats


def require_formats(
    quantizing: QuantizationArgs | None, names: WeightMap, roles: Roles, tensor_parallel_size: int
) -> None:
    """Raise ConfigError or CapabilityError as `select_formats`, and for columns that so many ranks
    would cut within groups that share a scale."""
    formats, shapes = select_formats(quantizing, None, names, roles), names.hf_shapes()
    for native, role in matrices(names, roles):
        if role is not ParallelStyle.ROWWISE:
            continue
        for tensor in names.hf_names(native):
            group = formats[tensor].group if tensor in formats else None
            columns, size = shapes[tensor][1], tensor_parallel_size
            if group and any(index * columns // size % group for index in range(size)):
                layer = tensor.removesuffix(".weight")
                raise CapabilityError(
                    f"train.tensor_parallel_size is {size}, and cuts the {columns} columns of "
                    f"{layer} within groups of {group} that share a scale "
                    f"({formats[tensor].name}).\n"
                    "  Write a smaller tensor_parallel_size, or another lora.quant_format."
                )


def quant_formats_by_param(formats: Formats, names: WeightMap) -> dict[str, Format]:
    """The same formats by model parameter name."""
    firsts = {native: names.hf_names(native)[0] for native in names.native_names()}
    return {native: formats[first] for native, first in firsts.items() if first in formats}


def _pair(name: str, group: int | None) -> tuple[Format, Format]:
    try:
        if name not in PAIRS:
            return (format := get_format(name, group)), format
        # The group size applies to the one of the two formats that has groups.
        linear, of_experts = PAIRS[name]
        return get_format(linear), get_format(of_experts, group)
    except ValueError as error:
        raise ConfigError(f"lora.quant_group_size: {error}.\n  Leave it out.") from error


def matrices(names: WeightMap, roles: Roles) -> Iterator[tuple[str, ParallelStyle]]:
    """The model's parameters that may be quantized, with their parallel styles."""
    if isinstance(names, AutoWeightMap):
        outline = names.config.outline
        # A router may be a module around its linear layer.
        routers = tuple(f"{name}." for name in outline.routers)
        for name in outline.linear:
            if name != outline.head and not f"{name}.".startswith(routers):
                yield f"{name}.weight", ParallelStyle.COLWISE
        return
    for native in names.native_names():
        module, _, leaf = native.rpartition(".")
        role = find_parallel_style(module, roles)
        is_matrix = leaf == "weight" or (
            role is ParallelStyle.EXPERTS and not leaf.endswith("_bias")
        )
        if role in QUANTIZED and is_matrix:
            yield native, role


def _in_part(native: str, apart: str) -> str:
    layer = apart.removesuffix(".weight")
    if native.endswith("qkv_proj.weight"):
        return fused(FIELD, layer)
    return (
        f"{FIELD} leaves out {layer}, and the experts of a layer are kept alike.\n"
        "  Leave all of them out (experts), or none."
    )
