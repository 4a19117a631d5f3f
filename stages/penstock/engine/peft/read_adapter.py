"""Read a PEFT adapter folder: the delta of each base model tensor.

Everything that such a folder can specify is either computed or rejected by name; nothing is
ignored. The formulas are those of PEFT's layers.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Self

import torch

from penstock.adapters.peft_format import EMBEDDED, LINEAR, NORMS, PREFIX, separate_factors
from penstock.adapters.scaling import lora_scaling
from penstock.adapters.weight_delta import LoraDelta, WeightDelta
from penstock.core.errors import CapabilityError
from penstock.engine.hf.safetensors_reader import SafetensorsFolder, Stored
from penstock.engine.peft.adapter_config import read_peft_config

WEIGHTS = "adapter_model.safetensors"

# The embedding and the head whose adapters PEFT ties with `ensure_weight_tying`; it leaves those of
# other names apart.
PEFT_EMBEDDINGS = ("embed_tokens", "lm_head")

BIAS = "lora_B.bias"
PARTS = (*LINEAR, *EMBEDDED, NORMS, f"{NORMS}.weight", BIAS)


class PeftFolder:
    """A folder with `adapter_config.json` and `adapter_model.safetensors`."""

    def __init__(
        self,
        folder: Path,
        rename: Callable[[str], str] = str,
        is_conv1d: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """`rename` makes the names of layers here of those in the folder. `is_conv1d` says of a
        layer here whether it is a Conv1D of transformers, with weights [in, out]: PEFT goes by
        that, and not by `fan_in_fan_out`.

        Raises CapabilityError for any other folder, or for unsupported settings.
        """
        self.config = read_peft_config(folder)
        if not (folder / WEIGHTS).is_file():
            raise CapabilityError(
                f"{folder} has no {WEIGHTS}. Pickled weights (.bin) are not read, since reading "
                "them can run code.\n  Save the adapter again with safetensors."
            )
        self.folder, self._rename, self._is_conv1d = folder, rename, is_conv1d
        self._tensors = SafetensorsFolder(folder, single=WEIGHTS)
        self._layers: dict[str, dict[str, str]] = {}
        self._replaced: dict[str, str] = {}
        self._of_base: dict[str, str] = {}
        for name in self._tensors.names():
            self._sort(name)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._tensors.__exit__()

    def modules(self) -> list[str]:
        return list(self._layers)

    def part(self, module: str, end: str) -> torch.Tensor | None:
        """A tensor of a layer's adapter by its suffix (one of PARTS), fp32; None if it has none."""
        ends = self._layers.get(module, {})
        name = ends.get(end) or ends.get(f"{end}.weight")
        return self._read(name) if name else None

    def targets(self) -> list[str]:
        matrices = [f"{module}.weight" for module in self._layers]
        biases = [f"{module}.bias" for module, ends in self._layers.items() if BIAS in ends]
        replaced = [*self._replaced, *self._of_base]
        return list(dict.fromkeys([*replaced, *matrices, *biases]))

    def replacement(self, target: str) -> Stored | None:
        """The header entry of the tensor that replaces the base model's, or None."""
        name = self._replaced.get(target) or self._of_base.get(target)
        return self._tensors.stored(name) if name else None

    def replacing(self, target: str) -> torch.Tensor:
        return self._tensors[self._replaced.get(target) or self._of_base[target]]

    def is_trained(self, target: str) -> bool:
        """Whether the adapter changes this tensor, beyond a copy of the base model's."""
        layer, _, leaf = target.rpartition(".")
        return target in self._replaced or (leaf == "weight" and layer in self._layers)

    def is_replaced(self, target: str) -> bool:
        return target in self._replaced

    def may_be_embedding(self, target: str) -> bool:
        """Whether the adapter has a whole matrix for this tensor, or factors of an embedding."""
        stored, layer = self.replacement(target), target.removesuffix(".weight")
        is_matrix = stored is not None and len(stored.shape) == 2
        return is_matrix or EMBEDDED[0] in self._layers.get(layer, {})

    def ties(self, embedding: str, head: str) -> bool:
        """Whether the embedding and the head that is tied to it have one and the same adapter."""
        config = self.config
        # A head's magnitudes are of rows, an embedding's of columns.
        apart = config.get("use_dora") or config.get("alpha_pattern") or config.get("rank_pattern")
        if apart or not config.get("ensure_weight_tying"):
            return False
        return self.is_trained(head) or embedding.endswith(f"{PEFT_EMBEDDINGS[0]}.weight")

    def change_of(self, target: str) -> WeightDelta | None:
        """The delta of the base model's tensor, or None. Reads its factors. A bias [n] counts as a
        matrix [n, 1]."""
        module, _, kind = target.rpartition(".")
        ends = self._layers.get(module)
        if ends is None or (kind == "bias" and BIAS not in ends):
            return None
        if kind == "bias":
            scale = self._scale(module, rank=self._tensors.stored(ends[LINEAR[0]]).shape[0])
            bias = self._read(ends[BIAS])
            return WeightDelta(LoraDelta(bias.unsqueeze(1), torch.ones(1, 1), scale))
        norms = self.part(module, NORMS)
        return WeightDelta(
            self._product(module, ends),
            None if norms is None else norms.flatten(),
            of_columns=EMBEDDED[0] in ends or self._is_conv1d(module),
        )

    def outline(self, module: str) -> tuple[int, int]:
        """The output and input features of an adapted layer."""
        ends = self._layers[module]
        (_, width), (out, _) = (self._tensors.stored(ends[factor]).shape for factor in LINEAR)
        return out, width

    def products(self, module: str, num_experts: int) -> list[LoraDelta]:
        """The delta of each expert's matrix [out, in] of an expert stack."""
        ends = self._layers[module]
        lora_A, lora_B = (self._read(ends[factor]) for factor in LINEAR)
        a_ERI, b_EOR = separate_factors(lora_A, lora_B, num_experts)
        scale = self._scale(module, rank=a_ERI.shape[1])
        return [LoraDelta(b, a, scale) for a, b in zip(a_ERI, b_EOR, strict=True)]

    def _sort(self, name: str) -> None:
        inner = name.removeprefix(PREFIX)
        end = next((end for end in PARTS if inner.endswith(f".{end}")), None)
        if end:
            module = self._rename(inner.removesuffix(f".{end}"))
            self._layers.setdefault(module, {})[end] = name
        elif inner == name or ".lora_" in inner or "token_adapter" in inner:
            raise CapabilityError(
                f"{self.folder} holds {name}, which is no part of a low-rank adapter that can be "
                "merged.\n  Merge it with the library that wrote it."
            )
        else:
            self._sort_whole(name, inner)

    def _sort_whole(self, name: str, inner: str) -> None:
        """A whole tensor: a trained one, or a copy of the base model's, which PEFT saves of
        embeddings (`save_embedding_layers`)."""
        module, _, leaf = inner.rpartition(".")
        for wrapped in (".modules_to_save", ".base_layer", ".original_module"):
            if module.endswith(wrapped):
                target = self._rename(f"{module.removesuffix(wrapped)}.{leaf}")
                is_copy = wrapped != ".modules_to_save" and leaf == "weight"
                (self._of_base if is_copy else self._replaced)[target] = name
                return
        trained = self.config.get("modules_to_save") or ()
        is_trained = leaf == "bias" or any(
            module == layer or module.endswith(f".{layer}") for layer in trained
        )
        if self.config.get("ensure_weight_tying"):
            names_known = any(layer.rpartition(".")[2] in PEFT_EMBEDDINGS for layer in trained)
            is_trained = is_trained or names_known
        (self._replaced if is_trained else self._of_base)[self._rename(inner)] = name

    def _product(self, module: str, ends: Mapping[str, str]) -> LoraDelta:
        is_embedding = EMBEDDED[0] in ends
        sides = EMBEDDED if is_embedding else LINEAR
        if missing := [factor for factor in sides if factor not in ends]:
            raise CapabilityError(
                f"{self.folder} lacks {module}.{missing[0]}, one half of an adapter.\n"
                "  Save it again."
            )
        lora_A, lora_B = (self._read(ends[factor]) for factor in sides)
        if lora_A.ndim != 2 or lora_B.ndim != 2:
            raise CapabilityError(
                f"{self.folder} adapts {module}, a convolution; only linear layers and "
                "embeddings are merged."
            )
        scale = self._scale(module, rank=lora_A.shape[0])
        if is_embedding or self._is_conv1d(module):
            # Stored transposed: [in, out].
            return LoraDelta(lora_A.T.contiguous(), lora_B.T.contiguous(), scale)
        return LoraDelta(lora_B, lora_A, scale)

    def _scale(self, module: str, rank: int) -> float:
        # PEFT's default.
        alpha = self.config.get("lora_alpha") or 8
        for pattern, value in (self.config.get("alpha_pattern") or {}).items():
            # As `get_pattern_key` of PEFT, of which the first match counts.
            if re.fullmatch(rf"(.*\.)?({self._rename(pattern)})", module):
                alpha = value
                break
        return lora_scaling(rank, alpha, "root" if self.config.get("use_rslora") else "rank")

    def _read(self, name: str) -> torch.Tensor:
        return self._tensors[name].float()
