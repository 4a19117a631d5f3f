"""Save LoRA adapters from a checkpoint: merged into a model, or as a PEFT folder."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.adapters.names import (
    EACH,
    EMBEDDING,
    MAGNITUDE,
    SIDES,
    Side,
    native_name,
    parse_lora_name,
)
from penstock.adapters.peft_format import (
    PREFIX,
    AdaptedExperts,
    LoraScaling,
    adapter_config,
    fused_factors,
    peft_bias,
    peft_name,
)
from penstock.adapters.weight_delta import LoraDelta, WeightDelta
from penstock.core.errors import ArtifactError
from penstock.core.files import write_json
from penstock.engine.hf.save_model import save_tensors
from penstock.engine.hf.state_dict import HFStateDict, Tensors
from penstock.engine.model_source import LoraArgs
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.weights import LAYERS, WeightMap

WEIGHTS = "adapter_model.safetensors"

# Targets that PEFT takes for stacked experts of some model types.
MOE_TARGETS = ("gate", "gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")


@dataclass(frozen=True)
class Pair:
    """The checkpoint tensors of one layer's adapter."""

    lora_A: str  # noqa: N815 - as everyone calls it
    lora_B: str  # noqa: N815 - as everyone calls it
    magnitude: str | None = None
    expert: int | None = None
    """The index of the expert, if the layer's experts have stacked factors."""

    @property
    def tensors(self) -> list[str]:
        return [self.lora_A, self.lora_B, *([self.magnitude] if self.magnitude else [])]

    def read_from(self, tensors: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """A [r, in] and B [out, r], from the checkpoint's factors."""
        return self._own(tensors[self.lora_A]), self._own(tensors[self.lora_B])

    def change(self, tensors: Mapping[str, torch.Tensor], scale: float, layer: str) -> WeightDelta:
        """The delta of this layer's weight, [out, in], or the embedding's, [in, out]."""
        a, b = (factor.float() for factor in self.read_from(tensors))
        magnitude = tensors[self.magnitude].float() if self.magnitude else None
        if layer == EMBEDDING:
            return WeightDelta(LoraDelta(a.T, b.T, scale), magnitude, of_columns=True)
        return WeightDelta(LoraDelta(b, a, scale), magnitude)

    def _own(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.expert is None:
            return tensor
        # A copy: safetensors rejects tensors that share memory, and experts may share a factor.
        return (tensor if tensor.dim() == 2 else tensor[self.expert]).clone()


@dataclass(frozen=True)
class Adapters:
    """All adapters of one checkpoint; they share rank and alpha."""

    reader: Tensors
    pairs: dict[str, Pair]
    """By the layer in a Hugging Face checkpoint."""
    fused: dict[str, Pair]
    """By the model's parameter that stacks the matrices of a layer's experts, if checkpoints do."""
    biases: list[str]
    """Biases of the base model that were trained as well."""
    strength: LoraScaling
    weights: WeightMap

    @property
    def names(self) -> list[str]:
        """The names of all tensors, sorted."""
        return sorted([*_tensors([*self.pairs.values(), *self.fused.values()]), *self.biases])

    @property
    def num_parameters(self) -> int:
        shapes = self.reader.shapes()
        return sum(torch.Size(shapes[name][0]).numel() for name in self.names)

    def merged_into(self, base: HFStateDict) -> HFStateDict:
        """The base model's tensors with every adapter merged; merged tensors are fp32."""
        layers = {f"{layer}.weight": layer for layer in self.pairs}
        natives = {self.weights.hf_names(native)[0]: native for native in self.fused}
        if stray := sorted({*layers, *natives, *self.biases} - set(base.shapes)):
            raise ArtifactError(
                f"{self.reader.folder} adapts {stray[0]}, which the base model does not have.\n"
                "  model.config_path is not what the run was trained with."
            )
        scale = self.strength.scale

        def read(requested: Sequence[str]) -> dict[str, torch.Tensor]:
            tensors = base.read([name for name in requested if name not in self.biases])
            trained = [name for name in requested if name in self.biases]
            pairs = [self.pairs[layers[name]] for name in requested if name in layers]
            pairs += [self.fused[natives[name]] for name in requested if name in natives]
            factors = self.reader.read([*_tensors(pairs), *trained])
            for name in requested:
                if name in layers:
                    change = self.pairs[layers[name]].change(factors, scale, layers[name])
                    # In fp32, and rounded once when it is written.
                    tensors[name] = change.apply_to(tensors[name].float())
                elif native := natives.get(name):
                    # Its matrices, [out, in] as adapters are, are views and merged in place.
                    tensors[name] = stack = tensors[name].float()
                    stack_EOI = stack.mT if self.weights.is_transposed(native) else stack
                    for number, matrix in enumerate(stack_EOI):
                        pair = replace(self.fused[native], expert=number)
                        change = pair.change(factors, scale, "")
                        matrix.copy_(change.apply_to(matrix.contiguous()))
                elif name in self.biases:
                    tensors[name] = factors[name].float()
            return {name: tensors[name] for name in requested}

        return replace(base, read=read)


def adapters_in(reader: Tensors, weights: WeightMap, adapting: LoraArgs | None) -> Adapters | None:
    """The adapters of the checkpoint; None if it has none.

    `adapting` are the LoRA settings of the run, `weights` the names of the base model. Raises
    ArtifactError if only one of checkpoint and settings has adapters, if a factor lacks its
    counterpart, or if the number of experts differs.
    """
    sides: dict[str, dict[Side, str]] = {}
    for name in reader.shapes():
        if factor := parse_lora_name(name):
            sides.setdefault(factor.hf_module, {})[factor.side] = name
    if (adapting is not None) != bool(sides):
        raise ArtifactError(
            f"{reader.folder} holds {len(sides)} adapters, and lora.enable_lora says "
            f"{'true' if adapting is not None else 'false'}.\n"
            "  Export with the config that the run was trained with."
        )
    if adapting is None:
        return None
    if lone := sorted(layer for layer, pair in sides.items() if not set(SIDES) <= set(pair)):
        raise ArtifactError(
            f"{reader.folder} holds only half of the adapter of {lone[0]}.\n"
            "  Take another checkpoint of the run."
        )
    pairs: dict[str, Pair] = {}
    fused: dict[str, Pair] = {}
    for layer, pair in sorted(sides.items()):
        mixture, is_expert_layer, matrix = layer.partition(f".{EACH}.")
        if not is_expert_layer:
            pairs[layer] = _pair(pair)
            continue
        _check_count(pair.values(), reader, weights)
        if layers := weights.expert_layers(matrix, mixture.removesuffix(".mlp")):
            pairs |= {name: _pair(pair, number) for number, name in enumerate(layers)}
        else:
            fused[f"{mixture}.experts.{matrix}"] = _pair(pair)
    # Only the trained ones: a full-model checkpoint has others.
    bias = adapting.bias
    biases = [name for name in reader.shapes() if name.endswith(".bias") and bias != "none"]
    if bias == "lora_only":
        biases = [name for name in biases if name.removesuffix(".bias") in pairs]
    strength = LoraScaling(
        rank=reader.shapes()[next(iter(sides.values()))["lora_A"]][0][-2],
        alpha=adapting.alpha,
        scaling=adapting.scaling,
        dropout=adapting.dropout,
        bias=adapting.bias,
        normed="dora" if any(MAGNITUDE in pair for pair in sides.values()) else "plain",
    )
    return Adapters(reader, pairs, fused, biases, strength, weights)


def _pair(sides: Mapping[Side, str], expert: int | None = None) -> Pair:
    return Pair(sides["lora_A"], sides["lora_B"], sides.get(MAGNITUDE), expert)


def _check_count(factors: Iterable[str], reader: Tensors, weights: WeightMap) -> None:
    num_experts = weights.num_experts
    for name in factors:
        shape = reader.shapes()[name][0]
        if not num_experts or (len(shape) == 3 and shape[0] != num_experts):
            raise ArtifactError(
                f"{name} in {reader.folder} is for {shape[0]} experts, and the config has "
                f"{num_experts} in a layer.\n"
                "  model.config_path is not what the run was trained with."
            )


def _tensors(pairs: Iterable[Pair]) -> list[str]:
    # Experts may share a tensor.
    return sorted({name for pair in pairs for name in pair.tensors})


def write_adapter_folder(
    adapters: Adapters,
    out: Path,
    *,
    base_model: str,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Any]:
    """Write a PEFT folder, and return facts. `dtype` None keeps the training precision.

    `base_model` is the hub id or path of the base model for PEFT. Each expert gets its own pair,
    also of shared factors, and a pair of zeros for each of its matrices without an adapter, because
    PEFT supports nothing else.
    """
    weights = adapters.weights
    rename = weights.module_name
    experts = _expert_layers(weights)
    expert_layers = {layer for layers in experts.values() for layer in layers}
    # The last components of names that PEFT may take for layers of experts: with stacked experts
    # also where only dense layers have them. PEFT has no DoRA of parameters.
    is_stacked = isinstance(weights, AutoWeightMap) and weights.num_experts
    parts: Collection[str] = {layer.rpartition(".")[2] for layer in expert_layers}
    if is_stacked and adapters.strength.normed == "plain":
        parts = MOE_TARGETS
    if expert_layers and weights.has_stacked_adapters:
        adapters, experts, parts = _with_stacks(adapters), {}, ()
    bearing = [name for name in experts if not adapters.pairs.keys().isdisjoint(experts[name])]
    tensors = _peft_tensors(adapters, [layer for name in bearing for layer in experts[name]])
    named = {PREFIX + rename(name.removeprefix(PREFIX)): tensors[name] for name in tensors}
    save_tensors(
        {name: named[name].to(dtype or named[name].dtype) for name in sorted(named)}, out / WEIGHTS
    )
    config = adapter_config(
        adapters.strength,
        shortens=not weights.multimodal,
        adapted=[layer for layer in adapters.pairs if layer not in expert_layers],
        linear_layers=[
            layer
            for name, shape in weights.hf_shapes().items()
            if len(shape) == 2
            and not name.endswith(("embed_tokens.weight", weights.config.names.embedding))
            and (layer := name.removesuffix(".weight")) not in expert_layers
        ],
        base_model=base_model,
        revision=revision,
        experts=AdaptedExperts(
            parts=parts,
            modules=bearing,
            untouched=[name for name in experts if name not in bearing],
            fused=[weights.stack_parameter(name) for name in adapters.fused],
            is_representable=weights.config.experts is None
            or weights.config.experts.names.known_to_peft,
        ),
    )
    block = module = ""
    if (mixtures := weights.config.experts) and not mixtures.is_stacked:
        # Layers beside experts are in a module that transformers may name otherwise than files.
        block, module = f".{mixtures.names.block}.", f".{mixtures.names.module}."
    for field in ("target_modules", "target_parameters"):
        if field in config:
            names = (name.replace(block, module) if block else name for name in config[field])
            config[field] = sorted(map(rename, names))
    write_json(out / "adapter_config.json", config)
    return {
        "rank": adapters.strength.rank,
        "alpha": adapters.strength.alpha,
        "target_modules": config["target_modules"],
        "parameters": adapters.num_parameters,
    }


def _with_stacks(adapters: Adapters) -> Adapters:
    """The same, where adapters of each expert's layers are those of the tensors in which
    transformers stacks them."""
    pairs, fused, weights = dict(adapters.pairs), dict(adapters.fused), adapters.weights
    assert weights.config.experts is not None
    for number in weights.config.experts.layers:
        layer_name = f"{LAYERS}{number}"
        for matrix in weights.expert_matrices:
            for layer in weights.expert_layers(matrix, layer_name):
                if pair := pairs.pop(layer, None):
                    fused[f"{layer_name}.mlp.experts.{matrix}"] = replace(pair, expert=None)
    return replace(adapters, pairs=pairs, fused=fused)


def _peft_tensors(adapters: Adapters, is_expert: Iterable[str]) -> dict[str, torch.Tensor]:
    """All factors by PEFT's names. `is_expert` are linear layers that always get a pair."""
    read = adapters.reader.read(adapters.names)
    factors = {layer: pair.read_from(read) for layer, pair in adapters.pairs.items()}
    shapes, rank = adapters.weights.hf_shapes(), adapters.strength.rank
    for layer in is_expert:
        if layer not in factors:
            rows, columns = shapes[f"{layer}.weight"]
            factors[layer] = torch.zeros(rank, columns), torch.zeros(rows, rank)
    tensors = {
        peft_name(native_name(layer, side)): factor
        for layer, pair in factors.items()
        for side, factor in zip(SIDES, pair, strict=True)
    }
    for layer, pair in adapters.pairs.items():
        if pair.magnitude:
            tensors[peft_name(native_name(layer, MAGNITUDE))] = read[pair.magnitude]
    tensors |= {peft_bias(name, adapters.pairs.keys()): read[name] for name in adapters.biases}
    if adapters.fused:
        pairs = {
            adapters.weights.stack_parameter(name): pair.read_from(read)
            for name, pair in adapters.fused.items()
        }
        tensors |= fused_factors(pairs, adapters.weights.num_experts)
    return tensors


def _expert_layers(weights: WeightMap) -> dict[str, list[str]]:
    """The linear layers of experts in a checkpoint, by transformers' module that contains them."""
    experts = weights.config.experts
    if experts is None or experts.is_stacked:
        return {}
    return {
        f"{LAYERS}{number}.{experts.names.module}.experts": [
            layer
            for matrix in weights.expert_matrices
            for layer in weights.expert_layers(matrix, f"{LAYERS}{number}")
        ]
        for number in experts.layers
    }
