"""Train state in a checkpoint: parameters and optimizer states by Hugging Face tensor names.

`model.<tensor>` are parameters, `optimizer.<tensor>.<state>` the optimizer states of each. Adapters
have the names of a model without fused projections. So a checkpoint does not depend on the layout
or `merge_qkv`, and any layout can read it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.checkpoint.dcp_io import Boxes, ShardView, read_boxes, whole_box
from penstock.engine.checkpoint.quantized_boxes import (
    QuantizedStates,
    compressed_boxes,
    parse_tensor_name,
)
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.optim.novograd_norms import numbers_of
from penstock.models.vision.types import is_vision
from penstock.optim.groups import set_lr
from penstock.optim.novograd import PER_TENSOR_STATES
from penstock.optim.quantized_states import Form

MODEL = "model."
OPTIMIZER = "optimizer."

States = Literal["read", "passed over"]
"""What to do with a checkpoint's optimizer states."""


@dataclass(frozen=True)
class TrainState:
    """The model's parameters and the optimizer's state, as this rank holds them."""

    params: Sequence[LocalParam]
    optimizer: torch.optim.Optimizer
    only_trained: bool
    """Leave out frozen parameters: they are loaded from the base model."""
    left_to_base: set[int] = field(default_factory=set[int])
    """The ids of frozen parameters of a vision part, which are left out as well; those that a
    checkpoint brings are no longer the base model's, and are saved from then on."""
    stepped: Sequence[LocalParam] | None = None
    """The parameters that the optimizer steps, if they are CPU copies; None: `params`."""
    states: Literal["saved", "left out"] = "saved"
    """Whether optimizer states are saved; those in a checkpoint are always read."""
    pre_update_hooks: PreUpdateHooks = field(default_factory=PreUpdateHooks)
    rounded_to: torch.dtype | None = None
    """The dtype in which weights are saved, but those with ids in `exact`; None: their own."""
    exact: Set[int] = frozenset()
    compressed_to: Form | None = None
    """The format in which AdamW's moments are saved; None: unquantized."""
    cut: Callable[[Boxes], Boxes] = lambda boxes: boxes
    """Selects which of the boxes a checkpoint has."""

    @property
    def has_states(self) -> bool:
        return any(True for _ in self._states())

    @property
    def compresses_states(self) -> bool:
        return self.states == "saved" and self.compressed_to is not None

    @torch.no_grad()
    def boxes(self) -> Boxes:
        saved = [*self._parameters()]
        for name, box in self._states() if self.states == "saved" else ():
            saved += compressed_boxes(name, box, self.compressed_to)
        return self.cut(_by_name(saved))

    @torch.no_grad()
    def restore(self, files: CheckpointFiles, *, states: States = "read") -> None:
        """Read parameters in place, and the optimizer states that the checkpoint has. Raises
        ArtifactError if the checkpoint is damaged or of another model."""
        metadata = files.read_metadata().state_dict_metadata
        for param in self.params:
            if any(MODEL + piece.tensor in metadata for piece in param.shards):
                self.left_to_base.discard(id(param.parameter))
        if states == "read":
            self._make_states(files)
        saved = [*self._parameters(), *(self._states() if states == "read" else ())]
        boxes = self.cut(_by_name(saved))
        if states == "passed over":
            # A run that froze parts of the vision part has left these as they are in the base.
            boxes = {
                name: box
                for name, box in boxes.items()
                if name in metadata or not is_vision(name.removeprefix(MODEL))
            }
        read_boxes(QuantizedStates(files).read(boxes), files)

    def _optimizer_params(self) -> Sequence[LocalParam]:
        return self.params if self.stepped is None else self.stepped

    def _parameters(self) -> Iterator[tuple[str, ShardView]]:
        for local_param in self.params:
            number = id(local_param.parameter)
            is_left_out = self.only_trained or number in self.left_to_base
            if is_left_out and not local_param.parameter.requires_grad:
                continue
            part = local(local_param.parameter.detach())
            # Codes of quantized weights are integers.
            is_rounded = part.is_floating_point() and number not in self.exact
            yield from _boxes(local_param, part, MODEL, "", self.rounded_to if is_rounded else None)

    def _states(self) -> Iterator[tuple[str, ShardView]]:
        for local_param in self._optimizer_params():
            part = local(local_param.parameter.detach())
            for name, value in self.optimizer.state.get(local_param.parameter, {}).items():
                if name in PER_TENSOR_STATES:
                    yield from _boxes_of_tensors(local_param, f".{name}", value)
                elif isinstance(value, torch.Tensor):
                    yield from _state_boxes(local_param, f".{name}", local(value), part)

    def _make_states(self, files: CheckpointFiles) -> None:
        """Make the optimizer create its states with a step of zero gradients at learning rate 0."""
        # Only the optimizer knows their shapes. The checkpoint overwrites all of them afterwards.
        with_states = {
            parse_tensor_name(key).removeprefix(OPTIMIZER).rpartition(".")[0]
            for key, entry in files.read_metadata().state_dict_metadata.items()
            if key.startswith(OPTIMIZER) and isinstance(entry, TensorStorageMetadata)
        }
        for local_param in self._optimizer_params():
            if local_param.shards and local_param.shards[0].tensor in with_states:
                parameter = local_param.parameter
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        # Copies: `set_lr` fills a rate that is a tensor in place.
        rates = [deepcopy(group["lr"]) for group in self.optimizer.param_groups]
        set_lr(self.optimizer, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _by_name(boxes: Iterable[tuple[str, ShardView]]) -> Boxes:
    boxes_by_name: dict[str, list[ShardView]] = {}
    for name, box in boxes:
        boxes_by_name.setdefault(name, []).append(box)
    # Sorted, so that the order of optimizer states does not matter.
    return dict(sorted(boxes_by_name.items()))


def _state_boxes(
    local_param: LocalParam, end: str, value: torch.Tensor, like: torch.Tensor
) -> Iterator[tuple[str, ShardView]]:
    """The boxes of an optimizer state, which has the parameter's shape, is a scalar, or is one
    tensor for the whole parameter."""
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        for part in flatten()[0]:
            # `like` without rows: no inner tensor is laid out as the parameter, even of its shape.
            yield from _state_boxes(local_param, f"{end}_{part}", getattr(value, part), like[:0])
    elif value.shape == like.shape:
        yield from _boxes(local_param, value, OPTIMIZER, end)
    else:
        # One tensor goes by the name of the first. Optimizers with such states are rejected if
        # ranks hold parts of parameters.
        for piece in local_param.shards[:1] if value.dim() else local_param.shards:
            yield f"{OPTIMIZER}{piece.tensor}{end}", whole_box(value)


def _boxes_of_tensors(
    local_param: LocalParam, end: str, value: torch.Tensor
) -> Iterator[tuple[str, ShardView]]:
    """The boxes of a state with one number per tensor: per matrix of a stack, otherwise one."""
    start = 0
    for piece in local_param.shards:
        numbers = numbers_of(piece)
        own, start = value[start : start + len(numbers)], start + len(numbers)
        box = whole_box(own[0])
        if len(piece.full_shape) == 3:
            box = ShardView(piece.full_shape[:1], (numbers.start,), own)
        yield f"{OPTIMIZER}{piece.tensor}{end}", box


def _boxes(
    local_param: LocalParam,
    part: torch.Tensor,
    begin: str,
    end: str,
    rounded_to: torch.dtype | None = None,
) -> Iterator[tuple[str, ShardView]]:
    for piece in local_param.shards:
        box = ShardView(piece.full_shape, piece.offsets, piece.view(part), rounded_to)
        yield f"{begin}{piece.tensor}{end}", box
