"""Size of optimizer states, in bytes. No torch."""

from penstock.config.schema.train import TrainConfig
from penstock.estimate.costs.param_sizes import Tensor

WIDTHS = {"fp32": 4, "bf16": 2}

BYTES_8BIT, BYTES_4BIT = 1 + 4 / 256, 0.5 + 4 / 128
"""Bytes per element of torchao's quantized states, including the block scale."""

QUANTIZED_CHECKPOINT_BYTES = {"int8": 1 + 8 / 128, "int4": 0.5 + 8 / 128}
"""Bytes per element of a quantized moment in a checkpoint, including the block's two scales."""


def saved_bytes(train: TrainConfig, tensor: Tensor) -> float:
    """Bytes of one tensor's optimizer states in a checkpoint."""
    states = state_bytes(train, tensor)
    if train.ckpt_quant == "none":
        return states
    moments = 2 * WIDTHS["fp32" if train.optimizer == "adamw" else train.optimizer_dtype]
    quantized = 2 * QUANTIZED_CHECKPOINT_BYTES[train.ckpt_quant]
    return states + tensor.num_local_elements * (quantized - moments)


def state_bytes(train: TrainConfig, tensor: Tensor) -> float:
    """Bytes of optimizer states of this rank's shard of a tensor."""
    return tensor.num_local_elements * _bytes_per_element(train, tensor)


def _bytes_per_element(train: TrainConfig, tensor: Tensor) -> float:
    optimizer, arguments = train.optimizer, train.optimizer_kwargs
    state_width, param_width = WIDTHS[train.optimizer_dtype], tensor.width
    if optimizer == "adamw":
        return 2 * WIDTHS["fp32"]
    if optimizer == "anyprecision_adamw":
        # Kahan summation stores the rounding error of weights below fp32.
        is_compensated = arguments.get("use_kahan_summation") and param_width < 4
        return 2 * state_width + (param_width if is_compensated else 0)
    # Muon keeps a momentum for matrices (Jordan 2024) and is AdamW for the rest.
    if optimizer == "muon":
        return state_width if tensor.is_hidden_matrix else 2 * state_width
    # Its second moment is one number for each tensor (Ginsburg et al. 2019).
    if optimizer == "novograd":
        return state_width
    # The others are torch's and torchao's by name, whose states have the dtype of the weights.
    name = optimizer.rpartition(".")[2]
    if name in ("sgd", "SGD"):
        return param_width if arguments.get("momentum") else 0.0
    if "8bit" in name:
        return 2 * BYTES_8BIT
    if "4bit" in name:
        return 2 * BYTES_4BIT
    if name in ("RMSprop", "Adagrad"):
        return param_width
    # The second moment of a matrix is a row and a column (Shazeer and Stern 2018).
    if name == "Adafactor":
        return param_width * (tensor.rows + tensor.columns) / tensor.num_elements
    return 2 * param_width
