"""Tokenizer files for an exported model.

Existing files are copied byte for byte, so others load the tokenizer used in training.
"""

import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from transformers import PreTrainedTokenizerBase

from penstock.core.cache.stage import Source
from penstock.core.errors import ArtifactError
from penstock.core.files import atomic_write, read_json, regular_files, write_json
from penstock.core.remote.urls import is_url
from penstock.core.sources.hub import local_folder
from penstock.core.sources.pin import TOKENIZER_FILES
from penstock.rows.chat_template import ChatTemplate
from penstock.rows.template_tokens import end_of_turn
from penstock.rows.tokenizer import load_tokenizer

TEMPLATE, OTHER_TEMPLATES = "chat_template.jinja", "additional_chat_templates"


@dataclass(frozen=True)
class TokenizerFiles:
    """A pinned tokenizer source and its path as typed."""

    typed: str
    source: Source
    chat_template: ChatTemplate | None = None
    """The one that replaces the tokenizer's own; None keeps that."""

    def write(self, out: Path) -> None:
        """Write every file to `out`, each atomically, except config.json."""
        for name, path in self._files().items():
            with atomic_write(out / name) as part:
                shutil.copyfile(path, part)
        if self.source.pin["kind"] == "builtin":
            # Elsewhere first: `save_pretrained` does not write atomically.
            with tempfile.TemporaryDirectory() as folder:
                load_tokenizer(self.typed).save_pretrained(folder)
                for path in regular_files(Path(folder)):
                    with atomic_write(out / path.name) as part:
                        shutil.copyfile(path, part)
        if self.chat_template:
            self._write_template(self.chat_template, out)

    def _write_template(self, template: ChatTemplate, out: Path) -> None:
        texts = template.export(self._load().chat_template)
        for path in [*out.glob("chat_template.*"), *out.glob(f"{OTHER_TEMPLATES}/*")]:
            path.unlink()
        config_path = out / "tokenizer_config.json"
        if config_path.is_file() and "chat_template" in (config := read_json(config_path)):
            write_json(config_path, {k: v for k, v in config.items() if k != "chat_template"})
        for name, text in texts.items():
            is_default = name == "default"
            path = out / (TEMPLATE if is_default else f"{OTHER_TEMPLATES}/{name}.jinja")
            path.parent.mkdir(exist_ok=True)
            with atomic_write(path) as part:
                part.write_text(text, encoding="utf-8")

    def generation_defaults(self) -> dict[str, Any]:
        """The special token ids for generation_config.json, by name."""
        tokenizer = self._load()
        tokens = {
            name: getattr(tokenizer, name)
            for name in ("bos_token_id", "eos_token_id", "pad_token_id")
        }
        return {name: token for name, token in tokens.items() if token is not None}

    def with_end_of_turn(self, generation_config: Mapping[str, Any]) -> Mapping[str, Any]:
        """The generation_config.json, where generation also stops at the token with which the
        replacing template ends an answer."""
        if self.chat_template is None or self.chat_template.text is None:
            return generation_config
        tokenizer = self.chat_template.apply(self._load())
        end = end_of_turn(tokenizer, self.chat_template.variables)
        eos: Any = generation_config.get("eos_token_id")
        ends = eos if isinstance(eos, list) else [] if eos is None else [eos]
        if end is None or end in ends:
            return generation_config
        return {**generation_config, "eos_token_id": [end, *ends] if ends else end}

    def _load(self) -> PreTrainedTokenizerBase:
        path = str(local_folder(self.typed, self.source)) if is_url(self.typed) else self.typed
        return load_tokenizer(path, self.source.pin.get("commit"))

    def _files(self) -> dict[str, Path]:
        pin = self.source.pin
        if pin["kind"] == "builtin":
            return {}
        if pin["kind"] == "hub":
            folder = local_folder(self.typed, self.source, TOKENIZER_FILES)
            paths = sorted({p for pattern in TOKENIZER_FILES for p in folder.glob(pattern)})
            return {path.relative_to(folder).as_posix(): path for path in paths if path.is_file()}
        names = [entry["name"] for entry in pin["files"]]
        paths = self.source.paths
        if not paths:
            folder = local_folder(self.typed, self.source)
            paths = tuple(folder / name for name in names)
        path_by_name = dict(zip(names, paths, strict=True))
        for name, path in path_by_name.items():
            # A pinned name must not lead out of the folder that is written.
            if not path.is_file() or ".." in PurePosixPath(name).parts:
                raise ArtifactError(
                    f"The tokenizer's {name} is no longer in {self.typed}.\n"
                    "  Put it back, or name the tokenizer again in model.tokenizer_path."
                )
        path_by_name.pop("config.json", None)
        return path_by_name
