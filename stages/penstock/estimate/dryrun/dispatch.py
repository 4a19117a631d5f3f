"""A dispatch mode that runs tensors on CUDA as fakes and tensors on the host as they are.

Host tensors stay real, so that control flow on them is the true one. Everything that would reach
the device is recorded in a trace: kernels, copies, collectives, host syncs, memory.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._tools.fake_collectives  # registers c10d's operators for fake tensors
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from penstock.estimate.dryrun.fake_cuda import Event, Stream, current_stream
from penstock.estimate.dryrun.flex_attention import record_flex_attention
from penstock.estimate.dryrun.memory import Allocation, MemoryTracker
from penstock.estimate.dryrun.pinned_memory import is_pinned, mark_pinned, pin_memory
from penstock.estimate.dryrun.roofline import Roofline
from penstock.estimate.dryrun.trace import Collective, Trace, is_forward, place, places
from penstock.estimate.dryrun.triton_launches import record_triton_launches

aten = torch.ops.aten

_EXPLICIT = torch._C.DispatchKey.CompositeExplicitAutograd

NONZERO_SHARE = 0.6
"""Share of elements that `nonzero` finds."""

NO_KERNEL = {
    f"aten::{name}"
    for names in (
        "detach alias view t as_strided split slice unsqueeze transpose expand select permute",
        "unbind chunk narrow squeeze set_ unfold view_as diagonal split_with_sizes lift_fresh",
        "movedim real mT flatten",
        "view_as_real view_as_complex view_dtype _unsafe_view _reshape_alias",
        "empty new_empty empty_like empty_strided new_empty_strided resize_",
    )
    for name in names.split()
} | {"prim::device"}
"""Operators that only make views or allocate."""


class DryRunMode(TorchDispatchMode):
    """Fake CUDA tensors, real host tensors; see the module."""

    def __init__(self, trace: Trace, roofline: Roofline) -> None:
        super().__init__()
        self.trace, self.roofline = trace, roofline
        # Host tensors are real, and take part in operators on the device as scalars and indices.
        self.fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.is_paused = False
        self._group_streams: dict[tuple[str, int | None], Stream] = {}
        self._works: list[_Work] = []
        """Python objects that C++ holds without a reference."""
        self.memory = MemoryTracker(self._describe)
        record_triton_launches(trace, roofline, lambda: self.is_paused)
        record_flex_attention(self._attend)
        self._show_free_memory()
        self._follow_resizes()
        self._ignore_sharding_propagation()
        FakeTensor.tolist = lambda tensor: self._tolist(tensor)  # pyright: ignore[reportAttributeAccessIssue]

    def _tolist(self, tensor: torch.Tensor) -> Any:
        """One sync; element by element it would be one for each."""
        self._sync("tolist")
        return torch.ones(tensor.shape, dtype=tensor.dtype).tolist()

    def _show_free_memory(self) -> None:
        total = int(self.roofline.device.memory)
        torch.cuda.mem_get_info = lambda device=None: (total - self.memory.now, total)

    def _follow_resizes(self) -> None:
        # FSDP2 frees and restores gathered weights by the storage, which no operator sees.
        resize = torch.UntypedStorage.resize_

        def resize_and_follow(storage: torch.UntypedStorage, size: int) -> Any:
            out = resize(storage, size)
            self.memory.resized(storage)
            return out

        torch.UntypedStorage.resize_ = resize_and_follow  # pyright: ignore[reportAttributeAccessIssue]

    def _ignore_sharding_propagation(self) -> None:
        """DTensor runs each operator once on fake tensors of global shape, which use no memory."""
        for name in ("_propagate_tensor_meta_non_cached", "_propagate_tensor_meta"):
            if plain := getattr(ShardingPropagator, name, None):
                setattr(ShardingPropagator, name, self._unrecorded(plain))

    def _unrecorded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            before, self.is_paused = self.is_paused, True
            try:
                return function(*args, **kwargs)
            finally:
                self.is_paused = before

        return call

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # A DTensor calls operators of its local tensors, which come here in turn.
        if any(_is_foreign(kind) for kind in types):
            return NotImplemented
        kwargs = dict(kwargs or {})
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        # Fakes of c10d's operators would neither order streams nor return a work to wait for.
        if func.namespace in ("c10d", "_c10d_functional"):
            return self._collective(func, args, kwargs, tensors)
        if func is aten.is_pinned.default:
            return is_pinned(args[0])
        if func is aten._pin_memory.default:
            return pin_memory(args[0])
        if kwargs.pop("pin_memory", None):  # would need a driver
            return mark_pinned(func(*args, **kwargs))
        device = kwargs.get("device")
        device = torch.device(device) if device is not None else None
        on_cuda = any(map(_is_on_cuda, tensors))
        if not on_cuda and (device is None or device.type != "cuda"):
            return func(*args, **kwargs)
        args = self._integer_indices(func, args)
        special = self._special(func, args, kwargs, device, on_cuda)
        if special is not NotImplemented:
            return special
        if func.namespace == "penstock":
            # Its implementation instead of its fake one: it launches kernels and uses memory.
            # A mode is off while it handles an operator, and those within are to be recorded.
            with self:
                return func._op_dk(_EXPLICIT, *args, **kwargs)
        self._check_devices(func, tensors)
        with self.fake:
            out = func(*args, **kwargs)
        if self.is_paused:
            return out
        self.memory.track(x for x in tree_leaves(out) if isinstance(x, torch.Tensor))
        if func._schema.name not in NO_KERNEL:
            self._launch(func, args, kwargs, out)
        return out

    # Operators that move data between host and device, or need a value.

    def _special(
        self,
        func: Any,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        device: torch.device | None,
        on_cuda: bool,
    ) -> Any:
        if func in (aten._local_scalar_dense.default, aten.is_nonzero.default, aten.equal.default):
            return self._value(func, args[0])
        if func is aten.nonzero.default:
            # CUDA's nonzero returns the count to the host, to allocate its output.
            self._sync("nonzero")
            count = int(args[0].numel() * NONZERO_SHARE)
            return self._empty((count, args[0].dim()), torch.int64, args[0].device)
        if func is aten.addmm.dtype_out:
            # It has no fake implementation; what it writes is there already.
            self._launch(func, args, kwargs, kwargs["out"])
            return kwargs["out"]
        if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is None:
            self._sync("repeat_interleave without output_size")
            return self._empty((args[0].numel(),), torch.int64, args[0].device)
        if func is aten._to_copy.default and on_cuda and device and device.type == "cpu":
            return self._to_host(args[0], kwargs)
        if func is aten._to_copy.default and not on_cuda:
            self._from_host(args[0], is_async=bool(kwargs.get("non_blocking")))
            dtype = kwargs.get("dtype") or args[0].dtype
            return self._empty(tuple(args[0].shape), dtype, device)
        if func is aten.copy_.default:
            is_async = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
            if not _is_on_cuda(args[0]):
                self._copy("copy to host", args[1], is_async=is_async and is_pinned(args[0]))
                return args[0]
            if not _is_on_cuda(args[1]) and args[1].dim():
                self._from_host(args[1], is_async=is_async)
                return args[0]
        if func is aten._foreach_copy_.default and not _is_on_cuda(args[0][0]):
            is_async = len(args) > 2 and bool(args[2])
            for target, source in zip(args[0], args[1], strict=True):
                self._copy("copy to host", source, is_async=is_async and is_pinned(target))
            return None
        return NotImplemented

    def _integer_indices(self, func: Any, args: Sequence[Any]) -> Sequence[Any]:
        """Masks as indices cost a sync and have an unknown size: replace them by positions."""
        if func not in (aten.index.Tensor, aten.index_put_.default, aten.index_put.default):
            return args
        indices: list[Any] = []
        for index in args[1]:
            if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
                self._sync("mask as index")
                count = int(index.numel() * NONZERO_SHARE)
                positions = self._empty((count,), torch.int64, args[0].device)
                indices += [positions] * index.dim()
            else:
                indices.append(index)
        return [args[0], indices, *args[2:]]

    def _value(self, func: Any, tensor: torch.Tensor) -> Any:
        name = _short_name(func)
        self._sync("item" if name == "_local_scalar_dense" else name)
        if func is not aten._local_scalar_dense.default or tensor.dtype is torch.bool:
            return True
        return 1.0 if tensor.dtype.is_floating_point else 1

    def _to_host(self, tensor: torch.Tensor, kwargs: Mapping[str, Any]) -> torch.Tensor:
        # With `non_blocking` PyTorch allocates pinned memory for the result.
        is_async = bool(kwargs.get("non_blocking"))
        self._copy("copy to host", tensor, is_async=is_async)
        host = torch.ones(tensor.shape, dtype=kwargs.get("dtype") or tensor.dtype)
        return mark_pinned(host) if is_async else host

    def _from_host(self, tensor: torch.Tensor, *, is_async: bool) -> None:
        name = "copy from host" if is_pinned(tensor) else "copy from pageable host memory"
        self._copy(name, tensor, is_async=is_async and is_pinned(tensor))

    def _copy(self, name: str, tensor: torch.Tensor, *, is_async: bool) -> None:
        seconds = self.roofline.host_copy(_nbytes(tensor))
        self.trace.copy(current_stream().number, name, seconds)
        if not is_async:
            self._sync(f"blocking {name}")

    def _empty(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | None
    ) -> torch.Tensor:
        with self.fake:
            out = torch.empty(shape, dtype=dtype, device=device)
        self.memory.track([out])
        return out

    # Records.

    def _launch(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        work = self.roofline.kernel(func, args, kwargs, out)
        self.trace.launch(current_stream().number, _short_name(func), work, "kernel")

    def _attend(self, name: str, tensors: Sequence[torch.Tensor]) -> None:
        work = self.roofline.attention(name, tensors)
        self.trace.launch(current_stream().number, name, work, "kernel")

    def _sync(self, reason: str) -> None:
        self.trace.sync(reason, current_stream().number)

    def _check_devices(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        """Count operators that mix devices, which fake tensors allow more often than real ones."""
        allowed = (aten.copy_.default, aten._foreach_copy_.default, aten._to_copy.default)
        host = [t for t in tensors if not _is_on_cuda(t) and t.device.type == "cpu" and t.dim()]
        if host and func not in allowed and func._schema.name != "aten::set_":
            self.trace.fault(f"{func._schema.name} mixes host and device tensors")

    def _describe(self, tensor: torch.Tensor) -> Allocation:
        node = torch._C._current_autograd_node()
        return Allocation(
            tuple(tensor.shape),
            tensor.dtype,
            self.trace.phase,
            *places(),
            type(node).__name__ if node is not None else "",
            current_stream().number,
            is_forward(),
        )

    # Collectives.

    def _collective(
        self, func: Any, args: Sequence[Any], kwargs: Any, tensors: Sequence[torch.Tensor]
    ) -> Any:
        name = func._schema.name.partition("::")[2].strip("_")
        group = _process_group(args, kwargs)
        ranks = tuple(dist.get_process_group_ranks(group)) if group is not None else ()
        largest = max(tensors, key=_nbytes, default=None)
        for tensor in tensors if name != "barrier" else ():
            if tensor.device.type == "cpu":
                self.trace.fault(f"host tensor in {name}")
            elif not tensor.is_contiguous():
                self.trace.fault(f"non-contiguous tensor in {name}")
            if not tensor.numel():
                self.trace.fault(f"empty tensor in {name}")
        is_async = _is_async(name, func, args, kwargs)
        peer = int(args[2]) if name in ("send", "recv") else None
        stream, group_name = current_stream(), group.group_name if group is not None else ""
        if is_async:
            # NCCL has a stream for each communicator, and one for each pair of ranks.
            own = self._group_streams.setdefault((group_name, peer), Stream())
            own.wait_stream(stream)
            stream = own
        dtype, num_bytes, shape = "", 0, ()
        if largest is not None:
            dtype = str(largest.dtype).removeprefix("torch.")
            num_bytes, shape = _nbytes(largest), tuple(largest.shape)
        self.trace.add(
            Collective(
                stream.number,
                name,
                group_name,
                ranks,
                dtype,
                num_bytes,
                shape,
                self.roofline.collective(name, num_bytes, ranks),
                self.trace.phase,
                place(),
                None if peer is None else ranks[peer],
            )
        )
        work = _Work(stream.record_event() if is_async else None)
        self._works.append(work)
        return _collective_result(func, args, work)


class _Work(dist.Work):
    """A collective under way; waiting makes the current stream wait for it."""

    def __init__(self, end: Event | None) -> None:
        super().__init__()
        self._end = end

    def wait(self, timeout: timedelta | None = None) -> bool:
        if self._end:
            self._end.wait()
        return True


def _is_async(name: str, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it runs on its group's stream; otherwise NCCL uses the current one."""
    if name in ("send", "recv"):
        return True
    for argument, value in zip(func._schema.arguments, args, strict=False):
        if argument.name in ("async_op", "asyncOp"):
            return bool(value)
    return bool(kwargs.get("async_op", kwargs.get("asyncOp", True)))


def _is_foreign(kind: type) -> bool:
    """Whether a tensor subclass handles its own operators, as DTensor does."""
    is_plain = kind in (torch.Tensor, FakeTensor) or issubclass(kind, torch.nn.Parameter)
    return issubclass(kind, torch.Tensor) and not is_plain


def _short_name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::")


def _is_on_cuda(x: Any) -> bool:
    return isinstance(x, FakeTensor) and x.device.type == "cuda"


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _process_group(args: Any, kwargs: Any) -> dist.ProcessGroup | None:
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            return dist.ProcessGroup.unbox(value)  # pyright: ignore[reportAttributeAccessIssue]
    return None


def _collective_result(func: Any, args: Sequence[Any], work: _Work) -> Any:
    """What the operator returns: its tensors and the work."""
    returns = func._schema.returns
    outputs = [work.boxed() if "Work" in str(value.type) else args[0] for value in returns]
    return outputs[0] if len(outputs) == 1 else tuple(outputs)
