"""Where kernels run in tests: on a GPU where there is one, else in Triton's interpreter."""

import pytest
import torch

from penstock_kernels.op import INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAN_RUN_TRITON = INTERPRETED or torch.cuda.is_available()
needs_triton = pytest.mark.skipif(not CAN_RUN_TRITON, reason="needs CUDA or Triton's interpreter")
