"""`torch.cuda` without a GPU: a device of a named machine, whose streams and events are traced."""

import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch.nn import functional

from penstock.core.machine.device_specs import Device
from penstock.estimate.dryrun.cuda_stub import register_cuda_device
from penstock.estimate.dryrun.pinned_memory import is_pinned, pin_memory
from penstock.estimate.dryrun.trace import RecordEvent, Trace, WaitEvent

DEFAULT_STREAM = 0

# As NVIDIA lists them: https://developer.nvidia.com/cuda-gpus.
COMPUTE_CAPABILITY = {
    "v100": (7, 0),
    "t4": (7, 5),
    "a100": (8, 0),
    "a800": (8, 0),
    "a30": (8, 0),
    "a40": (8, 6),
    "a10": (8, 6),
    "rtx 3090": (8, 6),
    "l4": (8, 9),
    "l40": (8, 9),
    "l40s": (8, 9),
    "rtx 4090": (8, 9),
    "h100": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
    "gb200": (10, 0),
    "b300": (10, 3),
    "rtx 5090": (12, 0),
}
"""Compute capability by device name."""

# CUDA C++ Programming Guide: 96 KB on 7.0, 163 on 8.0, 227 on 9.0 and 10.0, else 99.
SHARED_MEMORY: Mapping[int | tuple[int, int], int] = {
    **{7: 98_304, 8: 166_912, 9: 232_448, 10: 232_448, 12: 101_376},
    **{(8, 6): 101_376, (8, 9): 101_376},
}
"""Opt-in shared memory of a block, in bytes, by compute capability or its major number."""

_numbers = itertools.count(1)


class Stream:
    """A CUDA stream that records what waits for what."""

    trace: Trace

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.number = next(_numbers)
        self.device = torch.device("cuda", 0)
        self.cuda_stream, self.stream_id, self.device_index = self.number, self.number, 0
        self.priority = priority

    def record_event(self, event: "Event | None" = None) -> "Event":
        """Record an event on this stream."""
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: "Event") -> None:
        """Make this stream wait for an event."""
        event.wait(self)

    def wait_stream(self, stream: "Stream") -> None:
        """Make this stream wait for all work of another stream so far."""
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        """Make the host wait for this stream."""
        self.trace.sync("Stream.synchronize", self.number)

    def query(self) -> bool:
        """True: nothing runs."""
        return True

    def is_capturing(self) -> bool:
        """False: no CUDA graph is captured. `torch.optim` asks."""
        return False


class Event:
    """A CUDA event."""

    trace: Trace

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self.number = next(_numbers)
        self._recorded = False

    def record(self, stream: Stream | None = None) -> "Event":
        """Record this event on a stream, the current one by default."""
        self._recorded = True
        self.trace.add(RecordEvent((stream or current_stream()).number, self.number))
        return self

    def wait(self, stream: Stream | None = None) -> None:
        """Make a stream wait for this event."""
        if self._recorded:
            self.trace.add(WaitEvent((stream or current_stream()).number, self.number))

    def synchronize(self) -> None:
        """Make the host wait for this event."""
        self.trace.sync("Event.synchronize", None, self.number)

    def query(self) -> bool:
        """True: nothing runs."""
        return True

    def elapsed_time(self, other: "Event") -> float:
        """Milliseconds; there is no clock."""
        return 1.0


class _CurrentStream(threading.local):
    def __init__(self) -> None:
        self.stream: Stream = _default


_default = Stream()
_default.number = DEFAULT_STREAM
_current = _CurrentStream()


def current_stream(device: Any = None) -> Stream:
    """The current stream of this thread."""
    return _current.stream


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Context manager: make a stream the current one."""
    before = _current.stream
    _current.stream = stream or before
    try:
        yield
    finally:
        _current.stream = before


def install(name: str, device: Device, trace: Trace, *, local_ranks: int = 8) -> None:
    """Replace `torch.cuda` by a device of this kind, for the rest of this process."""
    register_cuda_device()
    Stream.trace = Event.trace = trace
    capability = COMPUTE_CAPABILITY.get(name, (9, 0))
    memory = int(device.memory)
    properties = SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        total_memory=memory,
        # Those of an H100, from here on, on every device: kernels choose their grids by them.
        multi_processor_count=132,
        shared_memory_per_block_optin=SHARED_MEMORY.get(capability, SHARED_MEMORY[capability[0]]),
        shared_memory_per_block=49_152,
        warp_size=32,
        L2_cache_size=50 << 20,
        regs_per_multiprocessor=65_536,
        max_threads_per_multi_processor=2048,
        gcnArchName="",
    )
    without_effect = (
        *("_lazy_init", "init", "set_device", "set_rng_state"),
        *("reset_peak_memory_stats", "empty_cache"),
    )
    # Memory is followed by storages (`memory.py`), without PyTorch's allocator.
    allocator_bytes = (
        *("memory_allocated", "max_memory_allocated"),
        *("memory_reserved", "max_memory_reserved"),
    )
    replaced: dict[str, Any] = {
        # Each a function of its own: Dynamo has one rule for each object (torch 2.13).
        **{attribute: _constant(None) for attribute in without_effect},
        **{attribute: _constant(0) for attribute in allocator_bytes},
        "is_available": _constant(True),
        "is_initialized": _constant(True),
        "device_count": _constant(local_ranks),
        "current_device": _constant(0),
        "get_device_capability": _constant(capability),
        "get_device_name": _constant(name),
        "get_device_properties": _constant(properties),
        "is_bf16_supported": _constant(capability >= (8, 0)),
        # Kernels are not measured during capture.
        "is_current_stream_capturing": _constant(True),
        "synchronize": lambda device=None: trace.sync("torch.cuda.synchronize", None),
        "current_stream": current_stream,
        "default_stream": lambda device=None: _default,
        "stream": use_stream,
        "Stream": Stream,
        "Event": Event,
        "get_rng_state": lambda device=None: torch.zeros(16, dtype=torch.uint8),
    }
    for attribute, value in replaced.items():
        setattr(torch.cuda, attribute, value)
    torch.accelerator.current_stream = current_stream  # pyright: ignore[reportAttributeAccessIssue]
    torch.backends.cuda.is_built = _constant(True)
    torch.version.cuda = torch.version.cuda or "12.8"
    # What FakeTensorMode does itself where the driver is missing.
    fake_tensor.FakeTensorMode.avoid_device_init = property(lambda self: True)  # pyright: ignore[reportAttributeAccessIssue]
    fake_tensor.init_gpu_context = _constant(None)
    torch._C._set_only_lift_cpu_tensors(True)
    if "cu" not in torch.__version__.partition("+")[2]:
        functional.scaled_dot_product_attention = _scaled_dot_product_attention
    # These reach C++ with a stream or an allocator that does not exist.
    torch.Tensor.record_stream = _constant(None)
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: pin_memory(self)
    torch.Tensor.is_pinned = lambda self, *args, **kwargs: is_pinned(self)


def _scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The fused kernels of a CUDA build; a CPU build computes with matmuls and a softmax."""
    if enable_gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(groups, -3) for x in (key, value))
    if query.dtype is torch.float32 or attn_mask is not None:
        run = torch.ops.aten._scaled_dot_product_efficient_attention
        return run(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]
    run = torch.ops.aten._scaled_dot_product_flash_attention
    return run(query, key, value, dropout_p, is_causal, False, scale=scale)[0]


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value
