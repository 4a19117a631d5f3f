"""Copies of what is saved, made while training goes on to where it would change that.

From one change of the weights to the next lie reading rows, a forward and a backward pass, and all
of these only read. So a thread copies meanwhile, on CUDA in a stream of its own, and training waits
for what is left of that before the next change.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.engine.checkpoint.dcp_io import Boxes, ShardView


class PreUpdateHooks:
    """Those of weights and of what the optimizer keeps. Whoever makes one says so before."""

    def __init__(self) -> None:
        self._readers: list[Callable[[], None]] = []

    def wait_for(self, reader: Callable[[], None]) -> None:
        """Let changes wait until `reader`, which is called before each of them, returns."""
        self._readers.append(reader)

    def begin(self) -> None:
        """To be called before anything that a checkpoint holds is written to; where one reader
        after another has nothing to read it costs nothing."""
        for reader in self._readers:
            reader()


class StagingBuffers:
    """Copies of tensors in host memory that is used again each time."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        self._made = threading.Event()
        self._made.set()
        self._on_cuda = torch.cuda.is_available()
        self._stream: torch.cuda.Stream | None = None

    def begin(self) -> None:
        """Called where training is, before a thread calls `of`: what has been computed until now
        is what is copied, and from now on `wait` waits."""
        self._made.clear()
        if self._on_cuda:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def of(self, boxes: Boxes) -> Boxes:
        """Boxes that do not change when training goes on.

        Raises RuntimeError or MemoryError where the host has no room; then what there was is given
        back.
        """
        try:
            with self._beside():
                return self._copied(boxes)
        except (RuntimeError, MemoryError):
            self._memory.clear()
            raise
        finally:
            self._made.set()

    def wait(self) -> None:
        """Return once all is copied, or nothing more will be."""
        self._made.wait()

    def _copied(self, boxes: Boxes) -> Boxes:
        copied = {
            name: [ShardView(box.whole, box.offsets, self._room(name, box)) for box in parts]
            for name, parts in boxes.items()
        }
        into = [box.data for parts in copied.values() for box in parts]
        data = [box.data for parts in boxes.values() for box in parts]
        if data:
            # One call for all: in between, threads would take turns at being Python's only one.
            torch._foreach_copy_(into, data, non_blocking=self._on_cuda)
        return copied

    @contextmanager
    def _beside(self) -> Iterator[None]:
        """Beside what training computes; at the end all is done."""
        with torch.cuda.stream(self._stream):
            yield
            if self._stream:
                self._stream.synchronize()

    def _room(self, name: str, box: ShardView) -> torch.Tensor:
        key = name, box.offsets
        if key not in self._memory:
            self._memory[key] = torch.empty(
                box.data.shape, dtype=box.dtype, device="cpu", pin_memory=self._on_cuda
            )
        return self._memory[key]
