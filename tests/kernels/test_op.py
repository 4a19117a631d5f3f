"""What an operation asks of its inputs' device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from penstock_kernels import op


def test_a_triton_kernel_is_refused_tensors_of_another_gpu_than_the_current_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(op, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with FakeTensorMode():
        first, second = (torch.empty(2, device=f"cuda:{index}") for index in (0, 1))
    assert op.needs_cuda(second, second) is None
    for tensors in ((first,), (first, second)):
        assert "cuda:0" in str(op.needs_cuda(*tensors))
        assert "cuda:1 is the current device" in str(op.needs_cuda(*tensors))


def test_an_operation_is_fast_for_what_a_backend_of_this_machine_supports() -> None:
    def run(number: int) -> int:
        return number

    def unsupported_reason(number: int) -> str | None:
        return "it is odd" if number % 2 else None

    some = op.Op("some", run, {"even": op.KernelImpl(run, unsupported_reason)})
    none = op.Op("none", run, {"gone": op.KernelImpl(run, unsupported_reason, missing_reason="x")})
    assert some.is_fast(2)
    assert not some.is_fast(1)
    assert not none.is_fast(2)
