"""Bringing a hub repository, pinned to a commit, onto this machine."""

from collections.abc import Sequence
from pathlib import Path

from penstock.core import env
from penstock.core.errors import CapabilityError
from penstock.core.stage import Source

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def local_folder(typed: str, source: Source, patterns: Sequence[str] = MODEL_FILES) -> Path:
    """The folder that holds what `source` pins: `typed` itself, or a snapshot of the hub's commit.

    Raises CapabilityError when the hub cannot be reached and the snapshot is not in its cache.
    """
    if source.pin["kind"] != "hub":
        return Path(typed).expanduser()
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            source.pin["repo"],
            revision=source.pin["commit"],
            allow_patterns=list(patterns),
            token=env.hub_token(),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CapabilityError(
            f"{source.pin['repo']} at {source.pin['commit'][:12]} could not be "
            f"fetched from the hub ({type(error).__name__}).\n"
            "  Check the network and `hf auth login`, or name a folder."
        ) from error
    return Path(folder)
