"""Verify written folders: transformers loads a model, and PEFT an adapter, on the meta device. No
weights of a model are read."""

import logging
import sys
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from penstock.core.errors import CapabilityError, PenstockError, StageError
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.weight_files import prediction_tensors
from penstock.engine.quantization.prequantized import PrequantizedFormat, published_in
from penstock.models.automodel.build import build_config, model_class
from penstock.models.automodel.media.absent_tower import has_absent_tower, without_tower
from penstock.models.quantization_config import STORED
from penstock.rows.tokenizer import load_tokenizer

log = logging.getLogger("penstock.export")

# Names of each kind in an error; the others are counted.
SHOWN = 3

# PEFT's warning for entries of adapter_config.json that it does not know.
UNKNOWN = "Unexpected keyword arguments"

LONGEST = 400


class NotVerifiedError(Exception):
    """This machine cannot load a folder that others may."""


def verify_model(folder: Path, base: Path | None = None, *, runs_code: bool = False) -> None:
    """Load a model's names, shapes and dtypes, its config and its tokenizer as transformers does.

    `base` is the folder of the base model, of which an export has some tensors as they are.

    Raises:
        StageError: it does not load; names what is missing, unexpected or mismatched.
        NotVerifiedError: transformers here lacks the model, or a package.
    """
    try:
        hf_config = read_hf_config(str(folder), {}, runs_code=runs_code)
        with SafetensorsFolder(folder) as files:
            published = published_in(hf_config, folder)
            tensors = _as_loaded(files, published)
            copied = _copied_from(base, files)
    except (PenstockError, OSError) as error:
        raise _unloadable(folder, str(error)) from error
    config, class_ = _config(hf_config)
    with quiet_transformers():
        try:
            _, report = class_.from_pretrained(
                None,
                config=config,
                state_dict=tensors,
                device_map="meta",
                output_loading_info=True,
                # Reported with all other faults instead of raised as the first.
                ignore_mismatched_sizes=True,
            )
        except Exception as error:
            if "accelerate" in str(error):
                raise NotVerifiedError("accelerate is not installed") from error
            raise _unloadable(folder, _reason(error)) from error
    layers = getattr(config.get_text_config(decoder=True), "num_hidden_layers", sys.maxsize)
    unexpected = {*report["unexpected_keys"]} - copied - {*prediction_tensors(tensors, layers)}
    _require_loaded(folder, report["missing_keys"], unexpected, report["mismatched_keys"])
    _require_dtypes(folder, hf_config, tensors, copied)
    if any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer_config.json")):
        try:
            load_tokenizer(str(folder))
        except PenstockError as error:
            raise _unloadable(folder, str(error)) from error


def verify_adapter(folder: Path, hf_config: Mapping[str, Any]) -> None:
    """Load an adapter as PEFT does, into the model of this config.json without weights. Raises
    StageError if it does not load; NotVerifiedError if PEFT is not installed, or transformers lacks
    the model."""
    try:
        from peft import PeftModel  # noqa: PLC0415 - an optional package
    except ImportError as error:
        raise NotVerifiedError("peft is not installed") from error
    config, class_ = _config(hf_config)
    # By default PEFT (0.21) loads onto the GPU that it finds (`infer_device`).
    options: dict[str, Any] = {"low_cpu_mem_usage": True, "torch_device": "cpu"}
    with quiet_transformers(), warnings.catch_warnings(record=True) as noticed:
        warnings.simplefilter("always")
        with torch.device("meta"):
            model = class_._from_config(config)
        try:
            adapted = PeftModel.from_pretrained(model, str(folder), **options)
            # The result of loading is of this method alone.
            result = adapted.load_adapter(str(folder), "default", **options)
        except Exception as error:
            raise _unloadable(folder, _reason(error), "PEFT") from error
    texts = [str(warning.message) for warning in noticed]
    if ignored := [text for text in texts if text.startswith(UNKNOWN)]:
        raise _unloadable(folder, ignored[0], "PEFT")
    _require_loaded(folder, result.missing_keys, result.unexpected_keys, (), "PEFT")


@contextmanager
def noting_unverified(folder: Path) -> Iterator[None]:
    """A folder that only this machine cannot load is a warning."""
    try:
        yield
    except NotVerifiedError as reason:
        log.warning("export: %s is not verified: %s", folder.name, reason)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """transformers without progress bars and reports: what it finds is judged here."""
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415

    had_bars = transformers_logging.is_progress_bar_enabled()
    level = transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if had_bars:
            transformers_logging.enable_progress_bar()


def _config(hf_config: Mapping[str, Any]) -> tuple[Any, Any]:
    plain = {key: value for key, value in hf_config.items() if key != "quantization_config"}
    try:
        config = build_config(plain)
        class_ = model_class(config)
    except (CapabilityError, ImportError) as error:
        raise NotVerifiedError(str(error).partition("\n")[0]) from error
    # The tower's tensors are those of the base model.
    return (without_tower(config) if has_absent_tower(config) else config), class_


def _as_loaded(
    files: SafetensorsFolder, published: PrequantizedFormat | None
) -> dict[str, torch.Tensor]:
    # `_global_scale` before `_scale`.
    suffixes = sorted(STORED[published.declared.quant_method], key=len)[::-1] if published else ()
    tensors: dict[str, torch.Tensor] = {}
    for name in files.names():
        weight = next((name.removesuffix(end) for end in suffixes if name.endswith(end)), name)
        if published and published.reader.is_quantized(files, weight):
            shape, dtype = published.reader.shape(files, weight), torch.float32
        else:
            weight, stored = name, files.stored(name)
            shape, dtype = stored.shape, stored.dtype
        tensors[weight] = torch.empty(shape, dtype=dtype, device="meta")
    return tensors


def _copied_from(base: Path | None, files: SafetensorsFolder) -> set[str]:
    if base is None:
        return set()
    with SafetensorsFolder(base) as base_files:
        return {
            name
            for name in files.names()
            if name in base_files and files.stored(name).dtype == base_files.stored(name).dtype
        }


def _require_loaded(
    folder: Path,
    missing: Collection[str],
    unexpected: Collection[str],
    mismatched: Iterable[tuple[str, Any, Any]],
    library: str = "transformers",
) -> None:
    shapes = [f"{name} ({tuple(got)} for {tuple(wants)})" for name, got, wants in mismatched]
    kinds = {"missing": missing, "unexpected": unexpected, "mismatched": shapes}
    faults = [f"{len(names)} {kind} ({_some(names)})" for kind, names in kinds.items() if names]
    if faults:
        raise _unloadable(folder, f"its tensors are not the model's: {', '.join(faults)}", library)


def _require_dtypes(
    folder: Path,
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    copied: Collection[str],
) -> None:
    declared = getattr(torch, str(hf_config.get("dtype")), None)
    differing = [
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point()
        # Routers and the like are kept in float32.
        and tensor.dtype not in (declared, torch.float32)
        and name not in copied
    ]
    if declared and differing:
        raise _unloadable(
            folder,
            f"config.json says dtype {hf_config['dtype']}, and {len(differing)} tensors are of "
            f"another ({_some(differing)})",
        )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join([*ordered[:SHOWN], *(["..."] if ordered[SHOWN:] else [])])


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".")[:LONGEST] or type(error).__name__


def _unloadable(folder: Path, reason: str, library: str = "transformers") -> StageError:
    return StageError(
        f"{folder.name}/ was written, and {library} does not load it: {reason}.\n"
        "  Run it again; if it says the same, report it with the name of the base model."
    )
