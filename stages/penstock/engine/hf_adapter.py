"""The low-rank adapters of a checkpoint: merged into a model, or in a folder that peft loads."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.adapters.merge import merged
from penstock.adapters.names import factor_of
from penstock.adapters.peft_format import adapter_config, peft_name
from penstock.core.errors import ArtifactError
from penstock.core.files import write_json
from penstock.engine.checkpoint_reader import CheckpointReader
from penstock.engine.hf_folder import save_tensors
from penstock.engine.hf_weights import HfWeights

WEIGHTS = "adapter_model.safetensors"


@dataclass(frozen=True)
class Adapters:
    """All adapters of one checkpoint; they share rank and alpha."""

    reader: CheckpointReader
    pairs: dict[str, tuple[str, str]]
    """Linear layer in a Hugging Face checkpoint -> names of its A [r, in] and B [out, r]
    in the checkpoint."""
    rank: int
    alpha: float

    @property
    def names(self) -> list[str]:
        """The names of all factors, sorted."""
        return sorted(name for pair in self.pairs.values() for name in pair)

    @property
    def num_parameters(self) -> int:
        """Numbers in all factors."""
        shapes = self.reader.shapes()
        return sum(torch.Size(shapes[name][0]).numel() for name in self.names)

    def merged_into(self, base: HfWeights) -> HfWeights:
        """The base model's tensors with every adapter added, in fp32 where one was."""
        pairs = {f"{layer}.weight": pair for layer, pair in self.pairs.items()}
        if stray := sorted(set(pairs) - set(base.shapes)):
            raise ArtifactError(
                f"{self.reader.folder} adapts {stray[0]}, which the base model does not have.\n"
                "  model.config_path is not what the run was trained with."
            )

        def read(wanted: Sequence[str]) -> dict[str, torch.Tensor]:
            tensors = base.read(wanted)
            here = [name for name in wanted if name in pairs]
            factors = self.reader.read([factor for name in here for factor in pairs[name]])
            for name in here:
                lora_A, lora_B = (factors[factor] for factor in pairs[name])
                weight = tensors[name].float()
                tensors[name] = merged(weight, lora_A, lora_B, self.alpha / self.rank)
            return tensors

        return replace(base, read=read)


def adapters_in(reader: CheckpointReader, alpha: float | None) -> Adapters | None:
    """The adapters of the checkpoint, or None where it has none; `alpha` is what the run was given.

    Raises ArtifactError when only one of the two says that there are adapters, or a factor lacks
    its other half.
    """
    sides: dict[str, dict[str, str]] = {}
    for name in reader.shapes():
        if factor := factor_of(name):
            sides.setdefault(factor.hf_module, {})[factor.side] = name
    if (alpha is not None) != bool(sides):
        raise ArtifactError(
            f"{reader.folder} holds {len(sides)} adapters, and lora.enable_lora says "
            f"{'true' if alpha is not None else 'false'}.\n"
            "  Export with the config that the run was trained with."
        )
    if alpha is None:
        return None
    if lone := sorted(layer for layer, pair in sides.items() if len(pair) != 2):
        raise ArtifactError(
            f"{reader.folder} holds only half of the adapter of {lone[0]}.\n"
            "  Take another checkpoint of the run."
        )
    pairs = {layer: (pair["lora_A"], pair["lora_B"]) for layer, pair in sorted(sides.items())}
    first = next(iter(pairs.values()))[0]
    return Adapters(reader, pairs, rank=reader.shapes()[first][0][0], alpha=alpha)


def write_adapter_folder(
    adapters: Adapters,
    out: Path,
    *,
    base_shapes: Iterable[tuple[str, tuple[int, ...]]],
    base_model: str,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Write what peft loads, and return facts of it. `dtype` None keeps the trained precision.

    `base_shapes` are the base model's tensors, by which peft is told which layers are adapted;
    `base_model` is where peft finds the model, a hub id or a path.
    """
    tensors = adapters.reader.read(adapters.names)
    save_tensors(
        {peft_name(name): tensor.to(dtype or tensor.dtype) for name, tensor in tensors.items()},
        out / WEIGHTS,
    )
    config = adapter_config(
        rank=adapters.rank,
        alpha=adapters.alpha,
        adapted=list(adapters.pairs),
        linear_layers=[
            name.removesuffix(".weight")
            for name, shape in base_shapes
            if len(shape) == 2 and not name.endswith("embed_tokens.weight")
        ],
        base_model=base_model,
        revision=revision,
    )
    write_json(out / "adapter_config.json", config)
    return {
        "rank": adapters.rank,
        "alpha": adapters.alpha,
        "target_modules": config["target_modules"],
        "parameters": adapters.num_parameters,
    }
