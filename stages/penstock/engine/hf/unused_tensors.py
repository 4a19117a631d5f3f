"""Which tensors of a base model's files no part of the model has, from headers: they are named
before training, because exports lack them. No torch for native models."""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.core.errors import CapabilityError
from penstock.core.safetensors_header import Entry, files_by_tensor, read_header
from penstock.engine.hf.stored_parts import find_parts
from penstock.engine.hf.weight_files import absent_tensors, prediction_tensors
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.multimodal import is_language, text_name
from penstock.models.names import HEAD_WEIGHT
from penstock.models.quantization_config import STORED, parse_quantization_config
from penstock.models.weights import WeightMap

# Earlier files have what follows from config.json; transformers passes over it as well.
COMPUTED = re.compile(r"rotary_emb\.inv_freq$")

# Names in the line; the others are counted.
SHOWN = 3

# Bytes of two tensors that are compared at a time.
BLOCK = 8 << 20


def describe_unused(folder: Path, hf_config: Mapping[str, Any], names: WeightMap) -> str | None:
    """One line with the number and the first names of the tensors in a folder that are neither read
    nor copied to exports; None without any.

    Raises CapabilityError if weights that the config ties have different values in the files.
    """
    files = _Files(folder)
    unused = sorted(files.entries.keys() - files.used(hf_config, names))
    unused = [name for name in unused if not COMPUTED.search(name)]
    if not unused:
        return None
    more = f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else ""
    are = "tensor is" if len(unused) == 1 else "tensors are"
    return (
        f"model: {len(unused)} {are} in the base model's files and not in the model that its "
        f"config.json describes: not trained, and not exported: {', '.join(unused[:SHOWN])}{more}"
    )


@dataclass(frozen=True)
class _Files:
    """The weight files of a folder."""

    folder: Path

    @cached_property
    def indexed(self) -> Mapping[str, Path]:
        return files_by_tensor(self.folder)

    @cached_property
    def entries(self) -> Mapping[str, tuple[Path, Entry]]:
        """File and header entry of every tensor, also of those that an index leaves out."""
        return {
            name: (file, entry)
            for file in sorted({*self.indexed.values()})
            for name, entry in read_header(file).items()
        }

    def used(self, hf_config: Mapping[str, Any], names: WeightMap) -> set[str]:
        """The tensors that are read, or copied to exports as they are."""
        stored = self.indexed.keys() & self.entries.keys()
        further = prediction_tensors(stored, names.config.num_hidden_layers)
        further += absent_tensors(stored, names)
        if isinstance(names, AutoWeightMap):
            from penstock.engine.hf.converted_weights import ConvertedWeights  # noqa: PLC0415
            from penstock.engine.hf.safetensors_reader import SafetensorsFolder  # noqa: PLC0415
            from penstock.engine.quantization.dequantized_folder import (  # noqa: PLC0415
                DequantizedFolder,
            )
            from penstock.engine.quantization.prequantized import published_in  # noqa: PLC0415

            published = published_in(hf_config, self.folder)
            with SafetensorsFolder(self.folder) as folder:
                floats = DequantizedFolder(folder, published) if published else folder
                converted = ConvertedWeights(floats, hf_config, names)
                sources, copies = converted.sources(), converted.copies()
                sources |= {*folder.names()} - {*floats.names()}
            self._require_equal(copies)
            return {*sources, *further, *(copy for copy, _ in copies)}
        rename = text_name if names.multimodal else names.config.names.today
        # Of two files' tensors with one name here the last is read.
        in_files = {rename(name): name for name in self.indexed if name in stored}
        parts = find_parts(names, in_files, lambda name: self.entries[in_files[name]][1].shape)
        used = {*names.hf_shapes(), *(part.source for part in parts.values())}
        if names.config.tie_word_embeddings and HEAD_WEIGHT in in_files:
            head, table = in_files[HEAD_WEIGHT], in_files.get(names.config.names.embedding)
            self._require_equal([(head, table)] if table else [])
            used.add(HEAD_WEIGHT)
        declared = parse_quantization_config(hf_config, self.folder)
        suffixes = ("", *STORED[declared.quant_method]) if declared else ("",)
        read = {
            in_files[name]
            for name in in_files
            if any(name.removesuffix(suffix) in used for suffix in suffixes)
            # Other parts of multimodal models are copied.
            or (names.multimodal and not is_language(in_files[name]))
        }
        return {*read, *further}

    def _require_equal(self, ties: Iterable[tuple[str, str]]) -> None:
        for copy, original in ties:
            # Of unequal lengths the first blocks, dtype and shape, differ already.
            if not all(
                a == b for a, b in zip(self._blocks(copy), self._blocks(original), strict=False)
            ):
                raise CapabilityError(
                    f"config.json says tie_word_embeddings: true, and {copy} has other values than "
                    f"{original} in the files: transformers loads them untied, with a warning.\n"
                    "  Write model.foundation: {tie_word_embeddings: false} to train both, or "
                    f"remove {copy} from the files."
                )

    def _blocks(self, name: str) -> Iterator[object]:
        file, entry = self.entries[name]
        yield entry.dtype, entry.shape
        with file.open("rb") as stream:
            stream.seek(entry.start)
            for first in range(0, entry.num_bytes, BLOCK):
                yield stream.read(min(BLOCK, entry.num_bytes - first))
