"""Which device is chosen for an answer of `torch.accelerator`, and what runs there."""

import pytest
import torch
from torch._subclasses import FakeTensorMode

from penstock.engine import device
from penstock_kernels import op
from penstock_kernels.attention.flash import unsupported_tensors


@pytest.mark.parametrize("kind", ["cpu", "cuda", "mps", "xpu"])
def test_ranks_compute_with_cuda_or_on_the_cpu_and_models_of_transformers_anywhere(
    kind, monkeypatch
):
    answer = None if kind == "cpu" else torch.device(kind)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: answer)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device.accelerator() == torch.device(kind)
    ranks = [str(device.rank_device(rank)) for rank in range(3)]
    assert ranks == (["cuda:0", "cuda:1", "cuda:0"] if kind == "cuda" else ["cpu"] * 3)


def test_no_kernel_for_cuda_takes_tensors_of_mps_or_of_rocm(monkeypatch):
    monkeypatch.setattr(op, "INTERPRETED", False)
    with FakeTensorMode():
        heads = torch.empty(6, 2, 16, dtype=torch.bfloat16, device="mps")
    assert op.needs_cuda(heads) == "its tensors are on mps, and it needs cuda"
    assert unsupported_tensors(heads, heads, heads) == "its tensors are on mps, and it needs cuda"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert "built for ROCm" in (unsupported_tensors(heads, heads, heads) or "")
