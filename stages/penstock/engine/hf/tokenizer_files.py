"""Tokenizer files for an exported model.

Existing files are copied byte for byte, so others load the tokenizer used in training.
"""

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from penstock.core.cache.stage import Source
from penstock.core.errors import ArtifactError
from penstock.core.files import atomic_write, regular_files
from penstock.core.sources.hub import local_folder
from penstock.core.sources.pin import TOKENIZER_FILES
from penstock.rows.tokenizer import load_tokenizer


@dataclass(frozen=True)
class TokenizerFiles:
    """A pinned tokenizer source and its path as typed."""

    typed: str
    source: Source

    def write(self, out: Path) -> None:
        """Write every file to `out`, each atomically, except config.json."""
        for name, path in self._files().items():
            with atomic_write(out / name) as part:
                shutil.copyfile(path, part)
        if self.source.pin["kind"] == "builtin":
            self._save_built_in(out)

    def generation_defaults(self) -> dict[str, Any]:
        """The special token ids for generation_config.json, by name."""
        tokenizer = load_tokenizer(self.typed, self.source.pin.get("commit"))
        found = {
            name: getattr(tokenizer, name)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        return {name: token for name, token in found.items() if token is not None}

    def _files(self) -> dict[str, Path]:
        """File name -> source path."""
        pin = self.source.pin
        if pin["kind"] == "builtin":
            return {}
        if pin["kind"] == "hub":
            folder = local_folder(self.typed, self.source, TOKENIZER_FILES)
            paths = sorted({p for pattern in TOKENIZER_FILES for p in folder.glob(pattern)})
            return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
        names = [entry["name"] for entry in pin["files"]]
        found = dict(zip(names, self.source.paths, strict=True))
        for name, path in found.items():
            if not path.is_file() or ".." in PurePosixPath(name).parts:
                raise ArtifactError(
                    f"The tokenizer's {name} is no longer in {self.typed}.\n"
                    "  Put it back, or name the tokenizer again in model.tokenizer_path."
                )
        found.pop("config.json", None)
        return found

    def _save_built_in(self, out: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            load_tokenizer(self.typed).save_pretrained(folder)
            for path in regular_files(Path(folder)):
                with atomic_write(out / path.name) as part:
                    shutil.copyfile(path, part)
