"""Download of pinned sources, from the Hugging Face Hub or a URL."""

from collections.abc import Sequence
from pathlib import Path

from penstock.core import env
from penstock.core.cache.stage import Source
from penstock.core.errors import CapabilityError
from penstock.core.remote.urls import is_url
from penstock.core.sources.pin_remote import download_source

MODEL_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")


def local_folder(typed: str, source: Source, patterns: Sequence[str] = MODEL_FILES) -> Path:
    """The local folder of `source`: `typed` itself, or the files downloaded from its URL or at the
    Hub commit. Raises CapabilityError if it cannot be downloaded and is not cached."""
    if source.pin["kind"] != "hub":
        return download_source(source) if is_url(typed) else Path(typed).expanduser()
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            source.pin["repo"],
            revision=source.pin["commit"],
            allow_patterns=list(patterns),
            # `*` also matches folders, which may hold copies of the weights in other formats.
            ignore_patterns=None if any("/" in pattern for pattern in patterns) else ["*/*"],
            token=env.hub_token(),
        )
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CapabilityError(
            f"{source.pin['repo']} at {source.pin['commit'][:12]} could not be "
            f"fetched from the hub ({type(error).__name__}).\n"
            "  Check the network and `hf auth login`, or name a folder."
        ) from error
    return Path(folder)
