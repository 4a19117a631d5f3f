"""What a checkpoint holds of a run: tensors by the names they have in a Hugging Face checkpoint.

`model.<tensor>` are parameters, `optimizer.<tensor>.<state>` what the optimizer keeps of each.
Adapters have the names they have where nothing is fused. So neither the layout nor `merge_qkv`
shows in a checkpoint, and any layout reads what any other wrote.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.engine.checkpoint.async_staging import PreUpdateHooks
from penstock.engine.checkpoint.dcp_io import Boxes, ShardView, read_boxes, whole_box
from penstock.engine.checkpoint.quantized_states import (
    QuantizedStates,
    compressed_boxes,
    parse_tensor_name,
)
from penstock.engine.checkpoint.safe_dcp_reader import CheckpointFiles
from penstock.engine.distributed.param_shards import LocalParam, local
from penstock.engine.optim.tensor_norms import numbers_of
from penstock.optim.groups import set_lr
from penstock.optim.novograd import OF_TENSORS
from penstock.optim.quantized_states import Form

MODEL = "model."
OPTIMIZER = "optimizer."

States = Literal["read", "passed over"]
"""What becomes of a checkpoint's states of the optimizer."""


def _all_of_them(boxes: Boxes) -> Boxes:
    return boxes


@dataclass(frozen=True)
class TrainState:
    """The model's parameters and the optimizer's state, as this rank holds them."""

    held: Sequence[LocalParam]
    optimizer: torch.optim.Optimizer
    only_trained: bool
    """Leave out frozen parameters; they are the base model's and are found there."""
    stepped: Sequence[LocalParam] | None = None
    """What the optimizer steps, where that is copies of the parameters; None: these."""
    states: Literal["saved", "left out"] = "saved"
    """What becomes of the optimizer's states; those that a checkpoint has are always read."""
    changes: PreUpdateHooks = field(default_factory=PreUpdateHooks)
    """Whoever changes any of it says so here before."""
    rounded_to: torch.dtype | None = None
    """What weights are saved in; None: as they are kept."""
    exact: Set[int] = frozenset()
    """The identities of parameters that are not rounded."""
    compressed_to: Form | None = None
    """What AdamW's moments are saved in; None: as they are."""
    cut: Callable[[Boxes], Boxes] = _all_of_them
    """What of the boxes a checkpoint has."""

    @property
    def has_states(self) -> bool:
        """Whether the optimizer keeps anything on this rank."""
        return any(True for _ in self._states())

    @property
    def compresses_states(self) -> bool:
        """Whether a checkpoint has less of the states than the optimizer."""
        return self.states == "saved" and self.compressed_to is not None

    @torch.no_grad()
    def boxes(self) -> Boxes:
        """Views of all that is saved of it."""
        if self.states == "left out":
            return self.cut(_gathered(self._parameters()))
        saved = self._all() if self.compressed_to is None else self._compressed()
        return self.cut(_gathered(saved))

    @torch.no_grad()
    def restore(self, files: CheckpointFiles, *, states: States = "read") -> None:
        """Read parameters in place, and the optimizer's states where the checkpoint has them.

        Raises ArtifactError when the checkpoint is damaged or of another model.
        """
        if states == "read":
            self._make_states(files)
        boxes = self.cut(_gathered(self._all() if states == "read" else self._parameters()))
        read_boxes(QuantizedStates(files).read(boxes), files)

    def _kept(self) -> Iterator[LocalParam]:
        for held in self.held:
            if held.parameter.requires_grad or not self.only_trained:
                yield held

    def _stepped(self) -> Sequence[LocalParam]:
        return self.held if self.stepped is None else self.stepped

    def _all(self) -> Iterator[tuple[str, ShardView]]:
        yield from self._parameters()
        yield from self._states()

    def _compressed(self) -> Iterator[tuple[str, ShardView]]:
        yield from self._parameters()
        assert self.compressed_to is not None
        for name, box in self._states():
            yield from compressed_boxes(name, box, self.compressed_to)

    def _parameters(self) -> Iterator[tuple[str, ShardView]]:
        for held in self._kept():
            part = local(held.parameter.detach())
            is_rounded = part.is_floating_point() and id(held.parameter) not in self.exact
            yield from _boxes(held, part, MODEL, "", self.rounded_to if is_rounded else None)

    def _states(self) -> Iterator[tuple[str, ShardView]]:
        for held in self._stepped():
            part = local(held.parameter.detach())
            for name, value in self.optimizer.state.get(held.parameter, {}).items():
                if name in OF_TENSORS:
                    yield from _boxes_of_tensors(held, f".{name}", value)
                elif isinstance(value, torch.Tensor):
                    yield from _state_boxes(held, f".{name}", local(value), part)

    def _make_states(self, files: CheckpointFiles) -> None:
        """Let the optimizer, which makes its state at its first step, take one along nothing at a
        rate of nothing: only it knows what its state is like. All of it is then read over."""
        there = _states(files)
        for held in self._stepped():
            if held.pieces and there.get(held.pieces[0].tensor):
                parameter = held.parameter
                parameter.grad = torch.zeros_like(parameter, dtype=parameter.grad_dtype)
        rates = [deepcopy(group["lr"]) for group in self.optimizer.param_groups]
        set_lr(self.optimizer, 0.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


def _gathered(boxes: Iterable[tuple[str, ShardView]]) -> Boxes:
    """By the names, in one order, whichever the optimizer made its states in."""
    found: dict[str, list[ShardView]] = {}
    for name, box in boxes:
        found.setdefault(name, []).append(box)
    return dict(sorted(found.items()))


def _state_boxes(
    held: LocalParam, end: str, value: torch.Tensor, like: torch.Tensor
) -> Iterator[tuple[str, ShardView]]:
    """What the optimizer keeps for a parameter: as that is, one number, or for all of it at once.

    The last goes by the name of the parameter's first tensor. Optimizers that keep such are refused
    where ranks hold parts of parameters.
    """
    flatten = getattr(value, "__tensor_flatten__", None)
    if flatten is not None:
        for part in flatten()[0]:
            yield from _state_boxes(held, f"{end}_{part}", getattr(value, part), like[:0])
    elif value.shape == like.shape:
        yield from _boxes(held, value, OPTIMIZER, end)
    elif value.dim():
        for piece in held.pieces[:1]:
            yield f"{OPTIMIZER}{piece.tensor}{end}", whole_box(value)
    else:
        for piece in held.pieces:
            yield f"{OPTIMIZER}{piece.tensor}{end}", whole_box(value)


def _boxes_of_tensors(
    held: LocalParam, end: str, value: torch.Tensor
) -> Iterator[tuple[str, ShardView]]:
    """Of a state with a number for each tensor: of a stack as many, else one."""
    start = 0
    for piece in held.pieces:
        numbers = numbers_of(piece)
        own, start = value[start : start + len(numbers)], start + len(numbers)
        is_stack = len(piece.whole) == 3
        box = ShardView(piece.whole[:1], (numbers.start,), own) if is_stack else whole_box(own[0])
        yield f"{OPTIMIZER}{piece.tensor}{end}", box


def _boxes(
    held: LocalParam,
    part: torch.Tensor,
    begin: str,
    end: str,
    rounded_to: torch.dtype | None = None,
) -> Iterator[tuple[str, ShardView]]:
    for piece in held.pieces:
        box = ShardView(piece.whole, piece.offsets, piece.of(part), rounded_to)
        yield f"{begin}{piece.tensor}{end}", box


def _states(files: CheckpointFiles) -> dict[str, dict[str, TensorStorageMetadata]]:
    """What is kept of each tensor, by the tensor's name and the state's."""
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, entry in files.read_metadata().state_dict_metadata.items():
        if key.startswith(OPTIMIZER) and isinstance(entry, TensorStorageMetadata):
            tensor, _, name = parse_tensor_name(key).removeprefix(OPTIMIZER).rpartition(".")
            found.setdefault(tensor, {})[name] = entry
    return found
