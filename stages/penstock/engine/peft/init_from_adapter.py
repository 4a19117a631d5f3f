"""Initialize from a PEFT adapter: convert its names and shapes to those of the run."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from penstock.adapters.names import EACH, MAGNITUDE, LoraParamName, parse_lora_name
from penstock.adapters.peft_format import (
    EMBEDDED,
    FUSED_EXPERTS,
    LINEAR,
    NORMS,
    is_inner_expert_stack,
    separate_factors,
)
from penstock.core.errors import CapabilityError, ConfigError
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.hf.load_weights import copy_shard
from penstock.engine.peft.read_adapter import PeftFolder
from penstock.models.weights import WeightMap


class AdapterStart:
    """The tensors of an adapter folder, by their names in training checkpoints."""

    def __init__(self, folder: Path, chosen: Sequence[str], names: WeightMap) -> None:
        """`chosen` are the layers that the run adapts, by checkpoint name. Raises ConfigError if
        the folder has other layers, and CapabilityError for content that is not trained here."""
        self._folder, self._names = PeftFolder(folder, names.hf_name), names
        self._check(chosen)

    def __call__(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The full tensor of this name, fp32. Raises ConfigError if its shape differs."""
        factor = parse_lora_name(name)
        assert factor is not None, f"{name} is no part of an adapter"
        if factor.is_expert:
            tensor = self._of_experts(factor, shape)
        elif factor.side == MAGNITUDE:
            norms = self._folder.part(factor.hf_module, NORMS)
            tensor = None if norms is None else norms.flatten()
        else:
            ends = EMBEDDED if factor.is_embedding else LINEAR
            tensor = self._folder.part(factor.hf_module, ends[factor.side == "lora_B"])
        if tensor is None or tuple(tensor.shape) != shape:
            stored = "absent" if tensor is None else tuple(tensor.shape)
            raise ConfigError(
                f"lora.init_adapter_path: {self._folder.folder} has {factor.side} of "
                f"{factor.hf_module} as {stored}, and the run makes it {shape}.\n"
                "  Name the base model that it was trained on, and write the lora section as then."
            )
        return tensor

    def load_biases(self, params: Sequence[LocalParam]) -> None:
        with torch.no_grad():
            for param in params:
                for piece in param.shards:
                    is_bias = piece.tensor.endswith(".bias")
                    if is_bias and self._folder.replacement(piece.tensor):
                        bias = self._folder.replacing(piece.tensor)
                        copy_shard(bias, piece, piece.view(local(param.parameter)))

    def _of_experts(self, factor: LoraParamName, shape: tuple[int, ...]) -> torch.Tensor | None:
        """The stacked factors of all experts, or the shared one; None if an expert has none."""
        mixture = factor.hf_module.partition(f".{EACH}.")[0]
        end = LINEAR[factor.side == "lora_B"]
        if self._names.has_stacked_adapters:
            factors = self._of_fused_experts(mixture, factor)
        else:
            layers = self._names.expert_layers(factor.part, mixture.removesuffix(".mlp"))
            factors = [self._folder.part(layer, end) for layer in layers]
        stored = [tensor for tensor in factors if tensor is not None]
        if len(stored) < len(factors) or not stored:
            return None
        if len(shape) > 2:
            return torch.stack(stored)
        if any(not torch.equal(stored[0], factor_of_expert) for factor_of_expert in stored):
            raise ConfigError(
                f"lora.init_adapter_path: experts in {self._folder.folder} have each their own "
                f"{factor.side} of {factor.hf_module}, which the run lets them share.\n"
                "  Leave lora.moe_shared_lora and lora.moe_hybrid_shared_lora out."
            )
        return stored[0]

    def _of_fused_experts(self, mixture: str, factor: LoraParamName) -> list[torch.Tensor | None]:
        """PEFT's factors of an expert stack."""
        outer = self._names.hf_name(self._names.stack_parameter(f"{mixture}.experts"))
        # PEFT wraps the second such parameter outermost.
        inner = f"{outer}.base_layer"
        has_inner = inner in self._folder.modules()
        module = inner if is_inner_expert_stack(factor.part, has_inner) else outer
        pair = [self._folder.part(module, end) for end in LINEAR]
        if pair[0] is None or pair[1] is None or not self._names.num_experts:
            return []
        factors = separate_factors(pair[0], pair[1], self._names.num_experts)
        return list(factors[factor.side == "lora_B"])

    def _check(self, chosen: Sequence[str]) -> None:
        folder = self._folder
        for target in folder.targets():
            if folder.is_replaced(target) and not target.endswith(".bias"):
                raise CapabilityError(
                    f"lora.init_adapter_path: {folder.folder} brings {target} of its own "
                    "(modules_to_save), which is not trained on.\n"
                    "  Merge it with penstock merge, and start from the merged model."
                )
        stored, expected = set(folder.modules()), set(self._modules(chosen))
        if lacking := sorted(expected - stored):
            raise ConfigError(
                f"lora.init_adapter_path: {folder.folder} does not adapt {lacking[0]}, which "
                "lora.lora_target_modules names.\n"
                "  Leave lora_target_modules out to train what it adapts."
            )
        more: list[str] = []
        for module in sorted(stored - expected):
            second = folder.part(module, LINEAR[1])
            # Zeros are of layers that all experts have though only some of them were trained.
            if second is None or second.any():
                more.append(module)
        if more:
            raise ConfigError(
                f"lora.init_adapter_path: {folder.folder} adapts {more[0]} as well, which "
                "lora.lora_target_modules does not name, or this model does not have.\n"
                "  Leave lora_target_modules out to train what it adapts."
            )

    def _modules(self, chosen: Sequence[str]) -> Iterator[str]:
        for layer in chosen:
            before, is_expert_layer, matrix = layer.partition(f".{EACH}.")
            if not is_expert_layer or not self._names.num_experts:
                yield layer
            elif self._names.has_stacked_adapters:
                down = f"{before}.{EACH}.{FUSED_EXPERTS[1]}"
                inner = is_inner_expert_stack(matrix, down in chosen)
                yield f"{before}.experts{'.base_layer' * inner}"
            else:
                for number in range(self._names.num_experts):
                    yield f"{before}.experts.{number}.{matrix}"
