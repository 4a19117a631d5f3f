"""How bytes get to the host's memory and back."""

from typing import Any, Protocol

import torch


class Copies(Protocol):
    """Copies flat tensors of bytes, uint8.

    A copy may be read, and what it was made of given away, by whoever has waited for what came with
    it.
    """

    def away(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy in the host's memory."""
        ...

    def back(self, data: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A copy of such a copy, on the device."""
        ...

    def wait(self, copied: Any) -> None:
        """Let nothing that is computed from here on begin before a copy is made."""
        ...


class BesideComputation:
    """Copies on streams of their own, one in each direction, while the device computes.

    Memory on the device is always that of the stream that computes: a copy begins only when that
    has come to where it was asked for, and nothing is given away before that has waited.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._leaving = torch.cuda.Stream(device)
        self._coming = torch.cuda.Stream(device)

    def away(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        # Memory that is not pinned is copied in turn. Torch keeps pinned memory for the next step.
        copy = torch.empty(data.shape, dtype=torch.uint8, pin_memory=True)
        return copy, self._copied(copy, data, self._leaving)

    def back(self, data: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event]:
        copy = torch.empty(data.shape, dtype=torch.uint8, device=self._device)
        return copy, self._copied(copy, data, self._coming)

    def wait(self, copied: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self._device).wait_event(copied)

    def _copied(
        self, copy: torch.Tensor, data: torch.Tensor, stream: torch.cuda.Stream
    ) -> torch.cuda.Event:
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            copy.copy_(data, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record(stream)
        return copied


class InTurn:
    """Copies at once. On a device whose memory is the host's it saves none, and shows what is moved
    where."""

    def away(self, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return data.to("cpu", copy=True), None

    def back(self, data: torch.Tensor) -> tuple[torch.Tensor, None]:
        return data.clone(), None

    def wait(self, copied: None) -> None:
        del copied
