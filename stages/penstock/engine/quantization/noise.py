"""Adaptive quantization noise (AQN) on quantized weights during training.

The noise has the size of one quantization step.

A rounded weight could have been any value within a step of its current one; noise exposes training
to the others. It is drawn once per step, is the same for all micro-batches of the step, and depends
only on run, step and position in the checkpoint, not on the layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.distributed.param_shards import TensorShard
from penstock.models.causal_lm import CausalLM
from penstock.models.layers.dropout import current_dropout_rng
from penstock.models.layers.quantized_linear import QuantizedMatrix
from penstock_kernels.noise import RowKeys, add_noise_
from penstock_kernels.quant import QuantizedTensor


@dataclass(frozen=True)
class QuantNoise:
    """Adds noise to one matrix: the hook `QuantizedMatrix.transform`."""

    alpha: float
    codes: Sequence[TensorShard]
    """The shards of the codes, before FSDP."""
    first_column: int

    def __call__(self, value: QuantizedTensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """The function that adds this step's noise to the weight of `value`; None without noise."""
        noise = current_dropout_rng()
        if noise is None:
            return None
        runs = [
            RowKeys(shard.num_rows, noise.key(shard.tensor), shard.offsets[0])
            for shard in self.codes
        ]
        return lambda weight: add_noise_(weight, value, self.alpha, runs, self.first_column)


def add_noise(model: CausalLM, pieces: Mapping[str, tuple[TensorShard, ...]], alpha: float) -> None:
    """Register noise on every quantized matrix of a model, or of a part of one; in place. `pieces`
    are the shards of its parameters on this rank, before FSDP."""
    for name, module in model.named_modules():
        if isinstance(module, QuantizedMatrix):
            codes = pieces[f"{name}.codes"]
            # Codes of four bits are stored in pairs, and offsets of the shard count bytes.
            in_a_byte = 2 if module.format.codes == "levels" else 1
            module.transform = QuantNoise(alpha, codes, codes[0].offsets[1] * in_a_byte)
