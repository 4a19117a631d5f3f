"""Exported folders (a full model or only an adapter), and the packages needed to load them."""

from importlib.util import find_spec
from pathlib import Path

from penstock.core.errors import CapabilityError
from penstock.core.files import read_json_object

ADAPTER = "adapter_config.json"


def read_base_model(folder: Path) -> str | None:
    """Folder or hub id of the base model of the adapter in `folder`; None for a full model. Raises
    CapabilityError if a package needed to load it is not installed."""
    if not (folder / ADAPTER).is_file():
        _require_quantization_support(folder)
        return None
    if find_spec("peft") is None:
        raise CapabilityError(
            f"{folder} has only an adapter, and peft, which loads it, is not installed.\n"
            "  pip install peft, or export with export.merge_lora true."
        )
    named = read_json_object(folder / ADAPTER)["base_model_name_or_path"]
    # Exports may name a folder relative to the adapter's. Of an absolute path `/` keeps the second
    # operand, and a hub id is no folder here.
    beside = folder / named
    return str(beside) if beside.is_dir() else named


def _require_quantization_support(folder: Path) -> None:
    quantized = read_json_object(folder / "config.json").get("quantization_config")
    if quantized and find_spec("compressed_tensors") is None:
        raise CapabilityError(
            f"{folder} is quantized (export.quantise), and compressed-tensors, which "
            "transformers needs to load it, is not installed.\n"
            "  pip install compressed-tensors, or export without export.quantise."
        )
