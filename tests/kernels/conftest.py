"""What tests of kernels share."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Whatever is allocated and not filled holds NaN, or the largest of integers: who reads it, or
    leaves a result unwritten, shows it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """For thousands of tiny products, for which threads wait longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
