"""Norms, gates and rotary embedding, ours and others': `python tests/bench/bench_elementwise.py
[--tokens T] [--width D]`.

Forward and backward in bfloat16; medians of five, in turns in one process, after one warm run each.
Printed are milliseconds, how many times as long plain PyTorch, `torch.compile` of it and, on a GPU,
Liger-Kernel take, and there also the share of the speed at which memory is copied: of the bytes
that have to be read and written at least.

Goals on a GPU: at least 0.85 of copying, and nobody faster. On a CPU, where it is one thread's time
that counts, norms have a gradient of their own, and the other lines say what a compiler would gain.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

from penstock_kernels.clamped_gate import clamped_gate
from penstock_kernels.glu import geglu_tanh, swiglu
from penstock_kernels.rms_norm import add_rms_norm, rms_norm
from penstock_kernels.rope import rope

Function = Callable[..., Any]
REPEATS = 5
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
EPS, ALPHA, LIMIT, HEAD = 1e-6, 1.702, 7.0, 128


class Case(NamedTuple):
    """One operation."""

    ours: Function
    plain: Function
    shapes: Sequence[tuple[int, ...]]
    """Of what learns."""
    passes: int
    """How often the first of them, or as many bytes, is read or written at least."""
    liger: Function | None = None


def cases(tokens: int, width: int) -> dict[str, Case]:
    """By name. Widths are those of a model: hidden states, heads, and features half as many again
    as twice."""
    rows, features = (tokens, width), (tokens, 3 * width)
    q, k = (tokens, width // HEAD, HEAD), (tokens, max(width // HEAD // 4, 1), HEAD)
    angle = torch.rand(tokens, HEAD // 2, device=DEVICE).repeat(1, 2)
    cos, sin = angle.cos().bfloat16(), angle.sin().bfloat16()
    liger = import_module("liger_kernel.transformers.functional") if _has_liger() else None

    def plain_of(op: Any, *more: object) -> tuple[Function, Function]:
        return lambda *x: op(*x, *more), lambda *x: op.reference(*x, *more)

    def turned(q_TNH: torch.Tensor, k_TKH: torch.Tensor) -> Any:
        heads_first = (x[None].transpose(1, 2) for x in (q_TNH, k_TKH))
        return getattr(liger, "liger_rope")(*heads_first, cos[None], sin[None])  # noqa: B009

    def of_liger(name: str, *more: object) -> Function | None:
        return liger and (lambda *x: getattr(liger, name)(*x, *more))

    norm = (EPS, 0.0, "llama", False)
    return {
        "rms_norm": Case(
            *plain_of(rms_norm, EPS), (rows, (width,)), 5, of_liger("liger_rms_norm", *norm)
        ),
        "rms_norm of heads": Case(
            *plain_of(rms_norm, EPS), (q, (HEAD,)), 5, of_liger("liger_rms_norm", *norm)
        ),
        "add_rms_norm": Case(
            *plain_of(add_rms_norm, EPS),
            (rows, rows, (width,)),
            8,
            of_liger("liger_fused_add_rms_norm", *norm),
        ),
        "swiglu": Case(*plain_of(swiglu), (features, features), 8, of_liger("liger_swiglu")),
        "geglu_tanh": Case(*plain_of(geglu_tanh), (features, features), 8, of_liger("liger_geglu")),
        "clamped_gate": Case(*plain_of(clamped_gate, ALPHA, LIMIT), ((tokens, 6 * width),), 4),
        "rope": Case(*plain_of(rope, cos, sin), (q, k), 5, turned if liger else None),
    }


def _has_liger() -> bool:
    return CUDA and find_spec("liger_kernel") is not None


def seconds(work: Callable[[], object]) -> float:
    """Of one run; on a GPU of one of ten in a row, after its caches held something else."""
    if not CUDA:
        start = time.process_time()
        work()
        return time.process_time() - start
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.empty(256 * 2**20, dtype=torch.int8, device="cuda").zero_()
    first.record()
    for _ in range(10):
        work()
    last.record()
    last.synchronize()
    return first.elapsed_time(last) / 10e3


def medians(works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Of each, in turns."""
    for work in works.values():
        work()
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            taken[name].append(seconds(work))
    return {name: statistics.median(each) for name, each in taken.items()}


def there_and_back(function: Function, inputs: Sequence[torch.Tensor]) -> Callable[[], object]:
    """Forward and backward, for slopes as they come."""
    found = function(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    slopes = [torch.randn_like(y) for y in found]

    def work() -> object:
        again = function(*inputs)
        again = again if isinstance(again, tuple) else (again,)
        return torch.autograd.grad(again, inputs, slopes)

    return work


def compare(name: str, case: Case) -> None:
    """Print one line."""
    inputs = [
        torch.randn(shape, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
        for shape in case.shapes
    ]
    num_bytes = case.passes * inputs[0].numel() * inputs[0].element_size()
    source = torch.empty(num_bytes // 2, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    functions = {"ours": case.ours, "plain": case.plain, "compiled": torch.compile(case.plain)}
    functions |= {"liger": case.liger} if case.liger else {}
    works = {who: there_and_back(function, inputs) for who, function in functions.items()}
    found = medians({**works, "copy": lambda: target.copy_(source)})
    ratios = [f"{who}/ours {found[who] / found['ours']:.2f}" for who in functions if who != "ours"]
    share = f"{found['copy'] / found['ours']:.2f} of copying" if CUDA else "copying: not measured"
    print(f"{name:18} {found['ours'] * 1e3:8.3f} ms, {', '.join(ratios)}; {share}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=16_384 if CUDA else 1024)
    parser.add_argument("--width", type=int, default=4096 if CUDA else 1024)
    given = parser.parse_args()
    if not CUDA:
        torch.set_num_threads(1)
    name = torch.cuda.get_device_name() if CUDA else "CPU, one thread"
    print(f"{name}, torch {torch.__version__}, {given.tokens} tokens, width {given.width}")
    if not _has_liger():
        print("not measured: liger-kernel " + ("(not installed)" if CUDA else "(needs a GPU)"))
    for case_name, case in cases(given.tokens, given.width).items():
        compare(case_name, case)


if __name__ == "__main__":
    main()
