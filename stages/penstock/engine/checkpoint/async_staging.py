"""Async checkpoint staging: copy what is saved to host memory while training continues.

Between two updates of the weights a step loads batches and runs forward and backward passes, which
only read the weights. So a thread copies meanwhile, on CUDA in its own stream, and training waits
for the rest of the copy before the next update.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from penstock.engine.checkpoint.dcp_io import Boxes, ShardView
from penstock.engine.device import uses_cuda


class PreUpdateHooks:
    """Pre-update hooks: called before weights or optimizer states are modified."""

    def __init__(self) -> None:
        self._readers: list[Callable[[], None]] = []

    def register(self, reader: Callable[[], None]) -> None:
        self._readers.append(reader)

    def run(self) -> None:
        """Call the hooks before writing to anything that a checkpoint saves. Cheap when no copy is
        in progress."""
        for reader in self._readers:
            reader()


class StagingBuffers:
    """Copies of tensors in reused host memory."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, tuple[int, ...]], torch.Tensor] = {}
        # Set unless a copy is in progress.
        self._copied = threading.Event()
        self._copied.set()
        self._on_cuda = uses_cuda()
        self._stream: torch.cuda.Stream | None = None

    def start(self) -> None:
        """Called by the training thread before a thread calls `stage`. The copy holds everything
        computed until now, and `wait` blocks from now on."""
        self._copied.clear()
        if self._on_cuda:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())

    def stage(self, boxes: Boxes) -> Boxes:
        """Return copies that do not change as training continues. Raises RuntimeError or
        MemoryError if host memory is insufficient; the staging memory is freed then."""
        try:
            with self._on_copy_stream():
                return self._copy(boxes)
        except (RuntimeError, MemoryError):
            self._memory.clear()
            raise
        finally:
            self._copied.set()

    def wait(self) -> None:
        self._copied.wait()

    def _copy(self, boxes: Boxes) -> Boxes:
        copied: dict[str, list[ShardView]] = {}
        for name, parts in boxes.items():
            for box in parts:
                key = name, box.offsets
                if key not in self._memory:
                    self._memory[key] = torch.empty(
                        box.data.shape, dtype=box.dtype, device="cpu", pin_memory=self._on_cuda
                    )
                view = ShardView(box.full_shape, box.offsets, self._memory[key])
                copied.setdefault(name, []).append(view)
        into = [box.data for parts in copied.values() for box in parts]
        data = [box.data for parts in boxes.values() for box in parts]
        if data:
            # One call for all tensors: separate calls would contend for the GIL with training.
            torch._foreach_copy_(into, data, non_blocking=self._on_cuda)
        return copied

    @contextmanager
    def _on_copy_stream(self) -> Iterator[None]:
        if self._stream:
            # A new thread's device is 0, where it would create a context.
            torch.cuda.set_device(self._stream.device)
        with torch.cuda.stream(self._stream):
            yield
            # Copies to pinned memory return before they are done.
            if self._stream:
                self._stream.synchronize()
