"""Parses the quantization config of a published checkpoint.

No torch: unsupported formats are refused before anything slow is imported. The engine reads the
tensors.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.core.errors import CapabilityError
from penstock.core.files import read_json_object

QuantMethod = Literal["bitsandbytes", "modelopt", "fp8", "compressed-tensors", "mxfp4"]

MODELOPT = "hf_quant_config.json"
"""ModelOpt's own file; its older exports have nothing in config.json."""

STORED: Mapping[QuantMethod, tuple[str, ...]] = {
    "bitsandbytes": (
        ".absmax",
        ".nested_absmax",
        ".nested_quant_map",
        ".quant_map",
        ".quant_state.bitsandbytes__nf4",
    ),
    "modelopt": ("_scale", "_scale_2"),
    "fp8": ("_scale_inv",),
    "compressed-tensors": (
        "_packed",
        "_scale",
        "_global_scale",
        "_shape",
        "_g_idx",
        "_zero_point",
    ),
    "mxfp4": ("_blocks", "_scales"),
}
"""What the names of the tensors that a matrix is stored as have after its own."""

FP8_BLOCK_SHAPE = (128, 128)

UNQUANTIZED_HINT = (
    "Name the model that it was quantized from as model.model_path; with lora.enable_lora and "
    "lora.enable_qlora it is quantized on loading"
)


@dataclass(frozen=True)
class QuantizationConfig:
    """How a checkpoint's matrices are quantized."""

    format: str
    """Name of the format in `penstock_kernels.quant`."""
    quant_method: QuantMethod
    """Determines names and layout of the tensors; from `quant_method` in config.json."""
    group_size: int | None = None
    """Group size in columns, if the config has it; None: the format's own."""
    ignored_modules: tuple[str, ...] = ()
    """Modules that are not quantized, as published: names, prefixes or patterns. The stored tensors
    take precedence."""


def parse_quantization_config(
    hf: Mapping[str, Any], folder: Path | None = None
) -> QuantizationConfig | None:
    """The quantization config in a config.json, or in ModelOpt's file in the `folder` of the
    weights; None without any.

    Raises:
        CapabilityError: an unsupported quantization.
    """
    config = hf.get("quantization_config")
    if config is None and folder and (folder / MODELOPT).is_file():
        inner = read_json_object(folder / MODELOPT).get("quantization")
        config = {"quant_method": "modelopt", **(inner if isinstance(inner, Mapping) else {})}
    if not config:
        return None
    if not isinstance(config, Mapping):
        raise _unsupported("is not a table")
    method = config.get("quant_method")
    if method is None and {"load_in_4bit", "load_in_8bit"} & set(config):
        # As transformers infers it.
        method = "bitsandbytes"
    if not isinstance(method, str) or method not in _METHODS:
        raise _unsupported(f"says quant_method {method!r}; {', '.join(_METHODS)} are read")
    return _METHODS[method](config)


def malformed(name: str, fault: str) -> CapabilityError:
    """The error for tensors of a quantized checkpoint that do not match its config."""
    return CapabilityError(
        f"{name} of the checkpoint cannot be read as its configuration says it is quantized: "
        f"{fault}.\n"
        f"  Fetch the checkpoint again. {UNQUANTIZED_HINT}."
    )


def _unsupported(subject: str) -> CapabilityError:
    return CapabilityError(f"quantization_config {subject}. {UNQUANTIZED_HINT}")


def _fp8(config: Mapping[str, Any]) -> QuantizationConfig:
    if (experts := config.get("expert_dtype", "fp8")) != "fp8":
        raise _unsupported(f"says expert_dtype {experts!r}; experts in fp8 are read")
    if config.get("modules_to_convert"):
        raise _unsupported(
            "names modules_to_convert; linear layers in fp8 are read, embeddings not"
        )
    ignored_modules = _read_names(config, "modules_to_not_convert", "ignored_layers")
    block = config.get("weight_block_size", FP8_BLOCK_SHAPE)
    if block is None:
        return QuantizationConfig("fp8", "fp8", ignored_modules=ignored_modules)
    if not _is_128_block(block):
        raise _unsupported(f"says weight_block_size {block}; tiles of [128, 128] are read")
    return QuantizationConfig("block_fp8", "fp8", 128, ignored_modules)


def _mxfp4(config: Mapping[str, Any]) -> QuantizationConfig:
    # Prefixes that are regular expressions.
    ignored = (f"re:{name}" for name in _read_names(config, "modules_to_not_convert"))
    return QuantizationConfig("mxfp4", "mxfp4", 32, tuple(ignored))


def _modelopt(config: Mapping[str, Any]) -> QuantizationConfig:
    algorithm = config.get("quant_algo")
    ignored_modules = _read_names(config, "ignore", "exclude_modules")
    if algorithm == "FP8":
        return QuantizationConfig("fp8", "modelopt", ignored_modules=ignored_modules)
    if algorithm not in ("NVFP4", "W4A16_NVFP4"):
        raise _unsupported(f"says quant_algo {algorithm!r} of ModelOpt; NVFP4 and FP8 are read")
    # Older exports have group_size at the top level, newer ones in config_groups.
    weight_groups = [group.get("weights") for group in _config_groups(config)]
    sizes = {config.get("group_size") or 16} | {
        weights.get("group_size") or 16 for weights in weight_groups if isinstance(weights, Mapping)
    }
    if sizes != {16}:
        raise _unsupported(f"says group_size {max(sizes)} of NVFP4, which has groups of 16")
    return QuantizationConfig("nvfp4", "modelopt", 16, ignored_modules)


def _bitsandbytes(config: Mapping[str, Any]) -> QuantizationConfig:
    if not (config.get("load_in_4bit") or config.get("_load_in_4bit")):
        raise _unsupported("has 8-bit bitsandbytes weights; only nf4 is supported")
    # fp4 is bitsandbytes' default.
    key = config.get("bnb_4bit_quant_type", "fp4")
    if key != "nf4":
        raise _unsupported(f"says bnb_4bit_quant_type {key!r}; nf4 is read")
    # The group size is stored with each matrix.
    return QuantizationConfig(
        "nf4", "bitsandbytes", ignored_modules=_read_names(config, "llm_int8_skip_modules")
    )


# Maps compressed-tensors' (format, weight type, bits, strategy) to a format name.
_COMPRESSED = {
    ("float-quantized", "float", 8, "block"): "block_fp8",
    ("float-quantized", "float", 8, "channel"): "fp8",
    ("float-quantized", "float", 8, "tensor"): "fp8",
    ("int-quantized", "int", 8, "channel"): "int8",
    ("int-quantized", "int", 8, "tensor"): "int8",
    ("pack-quantized", "int", 4, "group"): "int4",
    ("nvfp4-pack-quantized", "float", 4, "tensor_group"): "nvfp4",
}


def _compressed_tensors(config: Mapping[str, Any]) -> QuantizationConfig:
    for name in ("transform_config", "sparsity_config"):
        extra = config.get(name)
        if extra and not (isinstance(extra, Mapping) and extra.get("format") == "dense"):
            raise _unsupported(f"has a {name}; weights that are quantized and no more are read")
    groups, formats = _config_groups(config), set[QuantizationConfig]()
    for group in groups:
        layout = group.get("format") or config.get("format")
        formats.add(_compressed(layout, group.get("weights"), _read_names(config, "ignore")))
    if len(formats) != 1:
        raise _unsupported(f"quantizes weights in {len(formats)} ways; one for all is read")
    return formats.pop()


def _compressed(layout: Any, weights: Any, ignored_modules: tuple[str, ...]) -> QuantizationConfig:
    if not isinstance(weights, Mapping):
        raise _unsupported(
            "has a group of layers whose weights are not quantized; weights are read"
        )
    number, bits = weights.get("type", "int"), weights.get("num_bits", 8)
    # Without a strategy, the default of compressed-tensors.
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    key = (layout, number, bits, strategy)
    if key not in _COMPRESSED:
        raise _unsupported(
            f"says {layout} weights of {bits} bits ({number}) by {strategy}; of compressed-tensors "
            "fp8 and int8 by channel or tensor, fp8 in blocks, int4 in groups and nvfp4 are read"
        )
    if not weights.get("symmetric", True):
        raise _unsupported("says weights are not symmetric; those without zero points are read")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _unsupported(
            "says weights are quantized in the order of activations; others are read"
        )
    format = _COMPRESSED[key]
    block, size = weights.get("block_structure"), weights.get("group_size")
    if format == "block_fp8" and not _is_128_block(block):
        raise _unsupported(f"says block_structure {block}; tiles of [128, 128] are read")
    if format == "nvfp4" and size not in (None, 16):
        raise _unsupported(f"says group_size {size} of NVFP4, which has groups of 16")
    if format == "int4" and not isinstance(size, int):
        raise _unsupported(f"says group_size {size!r}, which is no number of columns")
    group_size = {"block_fp8": 128, "nvfp4": 16, "int4": size}.get(format)
    return QuantizationConfig(format, "compressed-tensors", group_size, ignored_modules)


def _is_128_block(block: Any) -> bool:
    # Early versions of compressed-tensors wrote a string.
    return block == "128x128" or (
        isinstance(block, list | tuple) and tuple(block) == FP8_BLOCK_SHAPE
    )


def _config_groups(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    groups = config.get("config_groups")
    entries = groups.values() if isinstance(groups, Mapping) else ()
    return [group for group in entries if isinstance(group, Mapping)]


def _read_names(config: Mapping[str, Any], *fields: str) -> tuple[str, ...]:
    for field in fields:
        if isinstance(names := config.get(field), list | tuple):
            return tuple(map(str, names))
    return ()


_METHODS: Mapping[str, Callable[[Mapping[str, Any]], QuantizationConfig]] = {
    "fp8": _fp8,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}
