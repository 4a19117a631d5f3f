"""Read boxes of tensors ahead: a thread reads the next one while the caller copies and sends."""

from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import torch

from penstock.engine.quantization.quantized_reader import TensorReader


class BoxToRead(NamedTuple):
    """A box of a tensor in a folder."""

    name: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


def read_ahead(
    reader: TensorReader, boxes: Iterable[BoxToRead], device: torch.device
) -> Iterator[torch.Tensor]:
    """The boxes in order, on the CPU. Raises CapabilityError where the reader does."""
    # One thread: readers cache what they compute, and need no locks so. It has the rank's device,
    # as a new thread's is 0.
    uses_cuda = device.type == "cuda"
    set_device = partial(torch.cuda.set_device, device) if uses_cuda else None
    with ThreadPoolExecutor(1, "penstock-read-ahead", initializer=set_device) as thread:
        ready: Future[torch.Tensor] | None = None
        for box in boxes:
            # No further ahead: each block takes host memory on every rank of the machine.
            following = thread.submit(reader.box, *box)
            if ready:
                yield ready.result()
            ready = following
        if ready:
            yield ready.result()
