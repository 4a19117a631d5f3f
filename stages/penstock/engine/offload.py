"""Activation offload: what layers keep for the backward pass waits in the host's memory.

Copies go beside the computation, in both directions. What a layer keeps leaves while the next one
is computed, and is gone by the time the one after that begins; on the way back it comes while the
layer behind it is computed. What is computed again is not kept, and so never moved.
"""

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from penstock.engine.keeping import kept_by
from penstock.engine.offload_copies import BesideComputation, Copies, InTurn
from penstock.engine.offload_store import Store
from penstock.models.decoder import Decoder
from penstock.models.layers.run import Run


def store_for(device: torch.device, gigabytes: float) -> Store:
    """Where the activations of this rank wait, but for so many gigabytes, the newest ones."""
    copies: Copies = BesideComputation(device) if device.type == "cuda" else InTurn()
    return Store(device, copies, room=int(gigabytes * 1e9))


def offload(parts: Iterable[Decoder], store: Store) -> None:
    """Let every layer of a model's parts keep in `store` what it keeps; in place.

    What was plugged into `run_layer` before is called within: recomputation, which then keeps the
    layer's input there. All parts on a rank, and all their micro-batches, share a store.
    """
    for part in parts:
        first = next(iter(part.model.layers.values()), None)
        part.run_layer = partial(_offloaded, store, first, part.run_layer)


def _offloaded(
    store: Store, first: nn.Module | None, run: Run, module: nn.Module, *args: Any
) -> torch.Tensor:
    if not torch.is_grad_enabled():
        return run(module, *args)
    group = store.begin("pass" if module is first else "layer")
    with kept_by(partial(store.keep, group)):
        return run(module, *args)
