"""RNG state of a rank, as text for checkpoints, and deterministic algorithms."""

import base64

import torch

from penstock.engine.device import uses_cuda


def use_deterministic_algorithms() -> None:
    """Use deterministic kernels only, so that results are bitwise reproducible.

    Operations without such a kernel raise RuntimeError. On a GPU, CUBLAS_WORKSPACE_CONFIG must be
    set before the first matmul.
    """
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    # It times algorithms and takes the fastest, which need not be the same in each run.
    torch.backends.cudnn.benchmark = False


def start(seed: int, rank: int) -> None:
    """Seed every generator of this rank, each rank differently."""
    # More than any number of ranks, so that no two pairs of seed and rank give the same number.
    torch.manual_seed(seed * 1_000_003 + rank)


def get_rng_state() -> dict[str, str]:
    """The state of every generator that this rank uses."""
    state = {"cpu": _text(torch.get_rng_state())}
    if uses_cuda():
        state["cuda"] = _text(torch.cuda.get_rng_state())
    return state


def set_rng_state(state: dict[str, str]) -> None:
    """Restore every generator from a saved state."""
    torch.set_rng_state(_tensor(state["cpu"]))
    if "cuda" in state and uses_cuda():
        torch.cuda.set_rng_state(_tensor(state["cuda"]))


def _text(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.tolist())).decode()


def _tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
