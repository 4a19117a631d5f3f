"""Noise of the size of a quantisation step on quantised weights, in training (AQN).

A weight that was rounded could have been any within a step of what it is now; noise makes training
meet the others too. It is drawn anew each step, is the same for all micro-batches of one, and is a
function of run, step and place in the checkpoint alone, whatever the layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from penstock.engine.distributed.param_shards import TensorShard
from penstock.models.decoder import Decoder
from penstock.models.layers.dropout import current_noise
from penstock.models.layers.quantized_linear import QuantisedMatrix
from penstock_kernels.noise import RowKeys, add_noise_
from penstock_kernels.quant import Quantised


@dataclass(frozen=True)
class QuantNoise:
    """What is added to one matrix: the socket `QuantisedMatrix.change`."""

    alpha: float
    """What a step is multiplied by."""
    codes: Sequence[TensorShard]
    """Which rows of which matrices of the checkpoint it is, before it is sharded."""
    first_column: int
    """Of theirs."""

    def __call__(self, value: Quantised) -> Callable[[torch.Tensor], torch.Tensor] | None:
        """What adds this step's noise to the weight of `value`; None where nothing is drawn."""
        noise = current_noise()
        if noise is None:
            return None
        runs = [RowKeys(one.rows, noise.key(one.tensor), one.offsets[0]) for one in self.codes]
        return lambda weight: add_noise_(weight, value, self.alpha, runs, self.first_column)


def add_noise(model: Decoder, pieces: Mapping[str, tuple[TensorShard, ...]], alpha: float) -> None:
    """Let every quantised matrix of a model, or of a part of one, bear noise; in place.

    `pieces` are those of its parameters as this rank has them, before they are sharded.
    """
    for name, module in model.named_modules():
        if isinstance(module, QuantisedMatrix):
            codes = pieces[f"{name}.codes"]
            in_a_byte = 2 if module.format.codes == "levels" else 1
            module.change = QuantNoise(alpha, codes, codes[0].offsets[1] * in_a_byte)
