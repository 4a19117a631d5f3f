"""What a checkpoint holds of a run: tensors by the names they have in a Hugging Face checkpoint.

`model.<tensor>` are parameters, `optimizer.<tensor>.<state>` what the optimizer keeps of each.
Adapters have the names they have where nothing is fused. So neither the layout nor `merge_qkv`
shows in a checkpoint, and any layout reads what any other wrote.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from penstock.engine.checkpoint_boxes import Box, Boxes, read_boxes, whole_box
from penstock.engine.checkpoint_files import CheckpointFiles
from penstock.engine.parallel.pieces import Held, local

MODEL = "model."
OPTIMIZER = "optimizer."


@dataclass(frozen=True)
class Trained:
    """The model's parameters and the optimizer's state, as this rank holds them."""

    held: Sequence[Held]
    optimizer: torch.optim.Optimizer
    only_trained: bool
    """Leave out frozen parameters; they are the base model's and are found there."""

    @torch.no_grad()
    def boxes(self) -> Boxes:
        """Views of all of it."""
        found: dict[str, list[Box]] = {}
        for name, box in self._each_box():
            found.setdefault(name, []).append(box)
        # In one order, whichever the optimizer made its state in.
        return dict(sorted(found.items()))

    @torch.no_grad()
    def restore(self, files: CheckpointFiles) -> None:
        """Read parameters and optimizer state in place.

        Raises ArtifactError when the checkpoint is damaged or of another model.
        """
        self._make_state(files)
        read_boxes(self.boxes(), files)

    def _kept(self) -> Iterator[Held]:
        for held in self.held:
            if held.parameter.requires_grad or not self.only_trained:
                yield held

    def _each_box(self) -> Iterator[tuple[str, Box]]:
        for held in self._kept():
            part = local(held.parameter.detach())
            yield from _boxes(held, part, MODEL, "")
            for name, value in self.optimizer.state.get(held.parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield from self._state_boxes(held, f".{name}", local(value), part)

    def _state_boxes(
        self, held: Held, end: str, value: torch.Tensor, like: torch.Tensor
    ) -> Iterator[tuple[str, Box]]:
        if value.shape == like.shape:
            yield from _boxes(held, value, OPTIMIZER, end)
            return
        assert not value.dim(), f"{held.name}{end} is neither a number nor as the parameter is"
        for piece in held.pieces:
            yield f"{OPTIMIZER}{piece.tensor}{end}", whole_box(value)

    def _make_state(self, files: CheckpointFiles) -> None:
        """Give the optimizer, which makes its state at its first step, memory to read into."""
        there = _states(files)
        state = self.optimizer.state_dict()
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        for held in self._kept():
            if not held.pieces or self.optimizer.state.get(held.parameter):
                continue
            states = there.get(held.pieces[0].tensor, {})
            if states and id(held.parameter) in numbers:
                state["state"][numbers[id(held.parameter)]] = {
                    name: torch.zeros_like(held.parameter, dtype=entry.properties.dtype)
                    if entry.size
                    else torch.zeros((), dtype=entry.properties.dtype)
                    for name, entry in states.items()
                }
        # The optimizer itself decides where a number lies.
        self.optimizer.load_state_dict(state)


def _boxes(held: Held, part: torch.Tensor, begin: str, end: str) -> Iterator[tuple[str, Box]]:
    for piece in held.pieces:
        yield f"{begin}{piece.tensor}{end}", Box(piece.whole, piece.offsets, piece.of(part))


def _states(files: CheckpointFiles) -> dict[str, dict[str, TensorStorageMetadata]]:
    """What is kept of each tensor, by the tensor's name and the state's."""
    found: dict[str, dict[str, TensorStorageMetadata]] = {}
    for key, entry in files.read_metadata().state_dict_metadata.items():
        if key.startswith(OPTIMIZER) and isinstance(entry, TensorStorageMetadata):
            tensor, _, name = key.removeprefix(OPTIMIZER).rpartition(".")
            found.setdefault(tensor, {})[name] = entry
    return found
