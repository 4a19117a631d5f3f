"""The same bits each time, where the settings ask for them."""

import torch


def use_only_deterministic_kernels() -> None:
    """Let this process compute with kernels alone that give the same bits each time.

    What has no such kernel raises RuntimeError when it is called. On a GPU, CUBLAS_WORKSPACE_CONFIG
    must have been set before the first product.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
