"""What to ask of a loss whose logits are divided over ranks."""

from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.losses.cross_entropy import Loss
from penstock_kernels.cross_entropy import LossOptions

MORE = LossOptions(smoothing=0.1, z=0.01, soft_cap=3.0)
RTOL = 2e-6


class Products(TorchDispatchMode):
    """The shapes of what matrices are multiplied to."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            self.shapes.append(tuple(made.shape))
        return made


def check_terms(compute: Callable[[Loss, str], torch.Tensor], head: torch.Tensor) -> None:
    """Divided or gathered, by chunks or at once, a loss with everything in it is the same.

    With smoothing the ranks tell each other a third number of each token.
    """
    found = [
        compute(Loss(MORE, mode=mode, chunk=5), logits)
        for mode in ("chunked", "eager")
        for logits in ("divided", "gathered")
    ]
    torch.testing.assert_close(found, found[-1:] * 4, rtol=RTOL, atol=0)
    if head.requires_grad:
        slopes = [torch.autograd.grad(loss, head, retain_graph=True)[0] for loss in found]
        torch.testing.assert_close(slopes, slopes[-1:] * 4, rtol=1e-4, atol=1e-6)
