"""`penstock merge`: merges a PEFT adapter into its base model."""

from pathlib import Path
from typing import Any

from penstock.cli.console import Console
from penstock.core.errors import ConfigError
from penstock.core.remote.urls import is_url
from penstock.core.sources.hub import MODEL_FILES, local_folder
from penstock.core.sources.pin import pin_model
from penstock.export.license import CARD, LICENSE_PATTERNS


def merge_adapter(base: str, adapter: str, out: Path, console: Console) -> dict[str, Any]:
    """Merge the adapter and write the model to `out`. Raises what `merge_folders` raises, and
    ConfigError for a name that is neither a folder nor on the hub."""
    from penstock.export.merge import merge_folders

    facts = merge_folders(_folder(base), _folder(adapter), out)
    console.say(f"merged: {facts['changed']} of {facts['tensors']} tensors changed, in {out}")
    return facts


def _folder(typed: str) -> Path:
    """A local folder as it is, or a hub repository at its current commit."""
    folder = Path(typed).expanduser()
    if folder.is_dir():
        return folder
    if is_url(typed):
        raise ConfigError(f"{typed} is a URL.\n  Copy it to a local folder, and name that.")
    return local_folder(typed, pin_model(typed), (*MODEL_FILES, CARD, *LICENSE_PATTERNS))
