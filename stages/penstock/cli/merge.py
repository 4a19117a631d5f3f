"""`penstock merge`: an adapter, anyone's, made part of its base model."""

from pathlib import Path
from typing import Any

from penstock.cli.console import Console
from penstock.core.errors import ConfigError
from penstock.core.remote.urls import is_url
from penstock.core.sources.hub import MODEL_FILES, local_folder
from penstock.core.sources.pin import pin_model
from penstock.export.licence import CARD, LICENSE_PATTERNS


def merge_adapter(base: str, adapter: str, out: Path, console: Console) -> dict[str, Any]:
    """Merge, and say where the model lies. Raises what `merge_folders` does, and ConfigError for
    a name that is neither a folder nor on the hub."""
    from penstock.export.merge import merge_folders

    facts = merge_folders(_folder(base), _folder(adapter), out)
    console.say(f"merged: {facts['changed']} of {facts['tensors']} tensors changed, in {out}")
    return facts


def _folder(typed: str) -> Path:
    """A folder here as it is; what lies elsewhere at the commit that its name stands for now."""
    folder = Path(typed).expanduser()
    if folder.is_dir():
        return folder
    if is_url(typed):
        raise ConfigError(f"{typed} is a URL.\n  Copy it to a folder here, and name that.")
    return local_folder(typed, pin_model(typed), (*MODEL_FILES, CARD, *LICENSE_PATTERNS))
