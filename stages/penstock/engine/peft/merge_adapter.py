"""Merge a PEFT adapter into a base model, including adapters of MoE expert stacks.

For most layers the folder gives the delta directly. The experts of a layer are one tensor for PEFT
(`target_parameters`), whose A has rows by expert and rank and whose B has columns by rank and
expert; a base model's files may have that tensor too, transposed or not, or each expert's own
matrices.
"""

import re
from collections.abc import Callable
from difflib import get_close_matches
from functools import lru_cache, partial
from pathlib import Path

import torch

from penstock.adapters.weight_delta import BatchedDelta, LoraDelta, WeightDelta
from penstock.core.errors import CapabilityError
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.engine.peft.read_adapter import PeftFolder
from penstock.engine.peft.transformers_names import Embeddings

# PEFT wraps a module again for each further parameter that it adapts.
WRAPPED = ".base_layer"

# The halves of PEFT's combined matrix, by the families' names of an expert's matrices.
MATRICES = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up"}
DOWN = ("down_proj", "w2")

# How many expert parameters' factors are cached: two layers, in which all threads are busy.
KEPT = 4


class AdapterMerge:
    """The deltas of one adapter for one base model, by base tensor name."""

    def __init__(
        self,
        folder: PeftFolder,
        base: SafetensorsFolder,
        hidden_size: int | None,
        embeddings: Callable[[], Embeddings | None],
    ) -> None:
        """`hidden_size` tells whether square expert matrices are transposed. `embeddings` gives the
        base model's, and is called if the adapter may change them.

        Raises CapabilityError for layers that the base model does not have, and for embeddings that
        cannot be merged.
        """
        self.folder, self._base, self._hidden_size = folder, base, hidden_size
        # Read a layer's factors once for all of its experts, whose tensors are neighbours.
        self._products = lru_cache(maxsize=KEPT)(folder.products)
        self._of_experts: dict[str, Callable[[], WeightDelta]] = {}
        self._plain: list[str] = []
        self._copied: dict[str, str] = {}
        self.embeddings: Embeddings | None = None
        self.unties = False
        missing: list[str] = []
        for target in folder.targets():
            if target in base:
                self._plain.append(target)
            elif not self._match_experts(target.removesuffix(".weight")):
                missing.append(target)
        if missing or any(map(folder.may_be_embedding, self._plain)):
            self.embeddings = embeddings()
            missing = self._tie_or_untie(missing)
        if missing:
            near = get_close_matches(missing[0], base.names(), n=1)
            raise CapabilityError(
                f"{folder.folder} adapts {len(missing)} tensors that the base model does not have,"
                f" first {missing[0]}{f' (it has {near[0]})' if near else ''}.\n"
                "  Name the base model that it was trained on; a head that is the embedding itself "
                "(tie_word_embeddings) cannot be merged apart from it."
            )
        self._check_vocabulary()

    def targets(self) -> list[str]:
        return [*self._plain, *self._of_experts]

    def by_file(self) -> dict[Path, list[str]]:
        """The names of the merged model's tensors, by the base model's files."""
        files = self._base.by_file()
        for target, source in self._copied.items():
            # A copy goes into the file of its source.
            next(names for names in files.values() if source in names).append(target)
        return files

    def source(self, target: str) -> str:
        """The base model's tensor that the merged model's is made of: itself, or the one that it
        was tied to."""
        return self._copied.get(target, target)

    def replacement(self, target: str) -> Stored | None:
        return self.folder.replacement(self._replaced_by(target))

    def replacing(self, target: str) -> torch.Tensor:
        return self.folder.replacing(self._replaced_by(target))

    def shape(self, target: str) -> tuple[int, ...]:
        return (self.replacement(target) or self._base.stored(self.source(target))).shape

    def _replaced_by(self, target: str) -> str:
        """Tied tensors share a copy of the base model's: the other's, if `target` has none."""
        own, ends = self.folder.replacement(target), self.embeddings
        if own is None and ends and ends.is_tied and target in (ends.embedding, ends.head):
            tied = ends.head if target == ends.embedding else ends.embedding
            if tied and not self.folder.is_replaced(tied):
                return tied
        return target

    def _tie_or_untie(self, missing: list[str]) -> list[str]:
        """Merge into tied embeddings as PEFT computes them: an adapter of one of the two leaves the
        other as it is, so they become two tensors. Returns what is still missing."""
        folder, ends = self.folder, self.embeddings
        if not ends or not ends.is_tied or not ends.embedding or not ends.head:
            return missing
        pair = (ends.embedding, ends.head)
        stored = [name for name in pair if name in self._base]
        changed = any(map(folder.is_trained, pair))
        self.unties = changed and not (folder.ties(*pair) and len(stored) == 1)
        for name in pair:
            is_new = name not in self._base
            if is_new and self.unties and stored:
                self._copied[name] = stored[0]
            in_files = not is_new or name in self._copied
            touched = folder.is_trained(name) or folder.replacement(self._replaced_by(name))
            if in_files and touched and name not in self._plain:
                self._plain.append(name)
        return [name for name in missing if name not in pair]

    def _check_vocabulary(self) -> None:
        ends = self.embeddings
        if not ends or not ends.embedding or not ends.head:
            return
        names = [ends.embedding, ends.head]
        bias = f"{ends.head.removesuffix('.weight')}.bias"
        sizes = {
            name: self.shape(name)[0]
            for name in (*names, bias)
            if name in self._base or name in self._copied
        }
        first = next(iter(sizes), "")
        for name, size in sizes.items():
            if size != sizes[first]:
                raise CapabilityError(
                    f"{self.folder.folder} makes {first} {sizes[first]} tokens, and {name} would "
                    f"have {size}.\n  Save the adapter again with save_embedding_layers=True, from "
                    "a model whose embeddings were both resized."
                )

    def change_of(self, target: str) -> WeightDelta | None:
        build_change = self._of_experts.get(target)
        return build_change() if build_change else self.folder.change_of(target)

    def _match_experts(self, module: str) -> bool:
        """Fill `_of_experts` with the expert tensors of a layer; returns whether there are any."""
        layer = module
        while layer.endswith(WRAPPED):
            layer = layer.removesuffix(WRAPPED)
        stacks = [
            name
            for name in self._base.names()
            if name.rpartition(".")[0] == layer and len(self._base.stored(name).shape) == 3
        ]
        if stacks:
            return self._match_stack(module, stacks)
        return self._match_separate(module, layer)

    def _match_stack(self, module: str, names: list[str]) -> bool:
        """One tensor [experts, out, in], or transposed [experts, in, out], with matching sizes."""
        shapes = {name: self._base.stored(name).shape for name in names}
        # The rows of a gate-up projection are then the hidden size.
        is_transposed = any(
            name.endswith("gate_up_proj") and rows == self._hidden_size != columns
            for name, (_, rows, columns) in shapes.items()
        )
        for name, (num_experts, *sides) in shapes.items():
            out, width = self.folder.outline(module)
            if [out, width][:: -1 if is_transposed else 1] == sides:
                self._of_experts[name] = partial(self._stack, module, num_experts, is_transposed)
                return True
        return False

    def _match_separate(self, module: str, layer: str) -> bool:
        """Separate matrices of each expert; gate and up, if both are there, are row ranges of one
        factor."""
        matrices = self._matrices(layer)
        if not matrices:
            return False
        num_experts = 1 + max(expert for expert, _ in matrices)
        out, width = self.folder.outline(module)
        is_gated = any(kind == "gate" for _, kind in matrices)
        for (expert, kind), name in matrices.items():
            rows, columns = self._base.stored(name).shape
            start = rows if kind == "up" and is_gated else 0
            parts = 2 if kind != "down" and is_gated else 1
            if columns == width and out == parts * rows:
                self._of_experts[name] = partial(
                    self._rows_of_expert, module, num_experts, expert, slice(start, start + rows)
                )
        return any(name in self._of_experts for name in matrices.values())

    def _matrices(self, layer: str) -> dict[tuple[int, str], str]:
        # Mixtral's files use this name, and transformers' model uses mlp.
        old = layer.replace(".mlp.", ".block_sparse_moe.")
        pattern = re.compile(rf"({re.escape(layer)}|{re.escape(old)})\.(\d+)\.(\w+)\.weight")
        names: dict[tuple[int, str], str] = {}
        for name in self._base.names():
            if match := pattern.fullmatch(name):
                last = match[3]
                kind = "down" if last in DOWN else MATRICES.get(last)
                if kind:
                    names[int(match[2]), kind] = name
        return names

    def _stack(self, module: str, num_experts: int, is_transposed: bool) -> WeightDelta:
        products = self._products(module, num_experts)
        if is_transposed:
            products = [product.transpose() for product in products]
        return WeightDelta(BatchedDelta(tuple(products)))

    def _rows_of_expert(
        self, module: str, num_experts: int, expert: int, rows: slice
    ) -> WeightDelta:
        product = self._products(module, num_experts)[expert]
        return WeightDelta(LoraDelta(product.left[rows], product.right, product.scale))
