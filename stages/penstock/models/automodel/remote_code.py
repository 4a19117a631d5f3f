"""Model code beside a config.json (`auto_map`), run only where the user said so.

Whether code is trusted is known where config.json is read (`engine/hf/config.py`), which then adds
an entry to it: the folder and the digest of its code. Without that entry no code is run. No torch.
"""

import hashlib
import importlib
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.core.errors import CapabilityError, ConfigError

CODE = "_code"
"""The entry of a config.json that was read with its code; never of the file itself."""
AUTO_MAP = "auto_map"
PATTERN = "*.py"
CONFIG, MODEL = "AutoConfig", "AutoModelForCausalLM"


def trusted(hf_config: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The config with the code in `folder`. Raises ConfigError for a config without code."""
    if AUTO_MAP not in hf_config:
        raise ConfigError(
            f"model.trust_remote_code is true, and {folder}/config.json names no code of its own "
            "(auto_map).\n  Leave trust_remote_code out."
        )
    return {**hf_config, CODE: {"folder": str(folder.resolve()), "digest": code_digest(folder)}}


def code_digest(folder: Path) -> str:
    """The digest of the code in a folder: names and contents of its files."""
    total = hashlib.sha256()
    for file in code_files(folder):
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        total.update(f"{file.name} {content}\n".encode())
    return total.hexdigest()


def code_files(folder: Path) -> list[Path]:
    """The files of code in a folder, sorted."""
    return sorted(folder.glob(PATTERN))


def load_class(hf_config: Mapping[str, Any], name: str) -> Any:
    """The class that `auto_map` names for an auto class of transformers.

    Raises CapabilityError for code that cannot be run, and ConfigError if it has changed since its
    config.json was read.
    """
    folder, digest = Path(hf_config[CODE]["folder"]), hf_config[CODE]["digest"]
    reference = hf_config[AUTO_MAP].get(name)
    if not isinstance(reference, str) or "--" in reference or "." not in reference:
        raise CapabilityError(
            f"config.json in {folder} has {reference!r} as {name} of auto_map, and what is needed "
            "is the name of a class in a file beside it (modeling_x.XForCausalLM).\n"
            "  Copy the code into this folder, and correct auto_map."
        )
    if code_digest(folder) != digest:
        raise ConfigError(
            f"the code in {folder} has changed since this run began.\n  Run it again."
        )
    file, _, leaf = reference.rpartition(".")
    try:
        return getattr(importlib.import_module(f"{_package(folder, digest)}.{file}"), leaf)
    except Exception as error:  # What the code may raise is not known.
        raise CapabilityError(
            f"the code of the model in {folder} cannot be run: {reference}: "
            f"{type(error).__name__}: {error}\n"
            "  Install what it imports, or a version of transformers that it was written for."
        ) from error


def _package(folder: Path, digest: str) -> str:
    # A package of the folder's files, which import one another relatively.
    # By the digest: under a name that it has imported, Python would not read changed code again.
    name = f"penstock_remote_code_{digest[:16]}"
    if name not in sys.modules:
        package = ModuleType(name)
        package.__path__ = [str(folder)]
        sys.modules[name] = package
    return name
