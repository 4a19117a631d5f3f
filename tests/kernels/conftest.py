"""What tests of kernels share."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from penstock_kernels.op import HAS_TRITON, INTERPRETED


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Whatever is allocated and not filled holds NaN, or the largest of integers: who reads it, or
    leaves a result unwritten, shows it."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@pytest.fixture(scope="session", autouse=True)
def _sums_in_fp32() -> None:
    """As in the engine: partial sums of a product are not rounded to 16 bits."""
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """For thousands of tiny products, for which threads wait longer than they compute."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session", autouse=True)
def _patched_once() -> Iterator[None]:
    """A kernel that another one calls finds the language as it is interpreted for that one.

    Triton's interpreter goes through all of its language at every such call, to find that there is
    nothing left to patch, and takes a third of its time for it.
    """
    if not (HAS_TRITON and INTERPRETED):
        yield
        return
    import triton.language as tl
    from triton.runtime import interpreter

    patch = interpreter._patch_lang

    @cache
    def languages(function):
        return [one for one in function.__globals__.values() if one is tl or one is tl.core]

    def patch_what_is_not(function):
        known = [tl.tensor.to, *(language.load for language in languages(function))]
        if any(tl.core.is_builtin(member) for member in known):
            return patch(function)
        return interpreter._LangPatchScope()

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(interpreter, "_patch_lang", patch_what_is_not)
        yield
