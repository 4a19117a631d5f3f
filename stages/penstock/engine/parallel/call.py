"""What a model is called with for one micro-batch of one rank."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from penstock.models.decoder import Reduce
from penstock.models.layers.dropout import Noise
from penstock.models.layers.watch import Watch
from penstock_kernels.attention import Segments

Casting = Callable[[], AbstractContextManager[object]]
"""What is entered around a forward pass, to compute it in another precision."""


@dataclass(frozen=True)
class Call:
    """The tensors are on the device, and hold this rank's tokens alone."""

    input_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    position_ids_T: torch.Tensor  # noqa: N815 - T names the dimension
    segments: Segments
    """What attention needs to know of the documents, in the words of this rank's own attention."""
    reduce: Reduce
    """Hidden states and head to the summed loss of this rank's tokens."""
    noise: Noise | None = None
    """What the model draws from; None: it drops nothing."""
    watch: Watch | None = None
    """Who looks on while routers choose."""
