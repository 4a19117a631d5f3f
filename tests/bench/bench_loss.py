"""Head and loss, ours and others': `python tests/bench/bench_loss.py [--tokens T] [--width D]
[--vocabulary V] [--peers]`.

Forward and backward of random bfloat16 hidden states and a head, all tokens trained; medians of
five, in turns in one process, after one warm run each. Printed are seconds, the peak of memory over
what was there before as a share of the logits in float32, and ratios to the plain way: a product,
and PyTorch's cross-entropy of its float32 copy. On a GPU also the time of the three products alone,
below which nobody comes. Other ways are what `torch.compile` makes of the plain one, Liger-Kernel
(on GPUs alone) and cut-cross-entropy, where they are installed; on a CPU with `--peers`.

Goals: on a CPU, with 151,936 entries, at most 0.4 of the logits' memory at 1.2 times the plain
speed (better 1.5). On a GPU, Liger-Kernel's speed at no more memory, and at most 1.35 times the
products' time from 8192 tokens on.
"""

import argparse
import ctypes
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F

from penstock_kernels.cross_entropy import Passes, linear_cross_entropies, linear_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states [T, D], a head [V, D] and labels [T] to a summed loss."""

REPEATS = 5
CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def plain(x: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As it is written most often."""
    return F.cross_entropy((x @ head.t()).float(), labels, reduction="sum")


def ours(passes: Passes) -> Loss:
    """With gradients on the way."""
    return lambda x, head, labels: linear_cross_entropy([(x, head)], labels, passes=passes)


def each(x: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Ours where each token's loss is wanted: logits are made twice."""
    return linear_cross_entropies([(x, head)], labels).sum()


def peers() -> dict[str, Loss]:
    """Who else does it and is here; others are named."""
    found: dict[str, Loss] = {"plain, compiled": torch.compile(plain)}
    if CUDA and find_spec("liger_kernel"):
        function = import_module("liger_kernel.transformers.functional")
        fused = function.liger_fused_linear_cross_entropy
        found["liger"] = lambda x, w, labels: fused(x, w, labels, reduction="sum")
        found["liger, fp32 sums"] = lambda x, w, labels: fused(
            x, w, labels, reduction="sum", accum_dtype=torch.float32
        )
    else:
        print("not measured: liger-kernel" + ("" if CUDA else " (needs a GPU)"))
    if find_spec("cut_cross_entropy"):
        cut = import_module("cut_cross_entropy").linear_cross_entropy
        kind = "cce" if CUDA else "torch_compile"
        found["cut-cross-entropy"] = lambda x, w, labels: cut(
            x, w, labels, reduction="sum", impl=kind
        )
    else:
        print("not measured: cut-cross-entropy (not installed)")
    return found


def products(x: torch.Tensor, head: torch.Tensor, logits: torch.Tensor) -> None:
    """What no way can leave out."""
    torch.mm(x, head.t(), out=logits)
    torch.mm(logits, head)
    torch.mm(logits.t(), x)


def host_peak() -> int:
    """Bytes, since `forget_peak`."""
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) * 1024


def forget_peak() -> int:
    """The bytes there are now, from which the peak is told anew."""
    gc.collect()
    if CUDA:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    # Memory that is kept for the next to ask for it would count as nothing.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return host_peak()


def cost(work: Callable[[], object]) -> tuple[float, int]:
    """Seconds, and bytes at the peak over those before."""
    before = forget_peak()
    start = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated() if CUDA else host_peak()) - before


def compare(ways: Mapping[str, Loss], tokens: int, width: int, vocabulary: int) -> None:
    """Print all ways to train a head and what comes before it, and then only the latter."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=generator).to(DEVICE, torch.bfloat16).requires_grad_()
    head = torch.randn(vocabulary, width, generator=generator) / width**0.5
    head = head.to(DEVICE, torch.bfloat16)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator).to(DEVICE)
    for trained in (True, False):
        head.requires_grad_(trained)
        print(f"\n{tokens} tokens, {width} wide, {vocabulary} entries, head {trained=}")

        def run(loss: Loss) -> float:
            made = loss(x, head, labels)
            made.backward()
            x.grad = head.grad = None
            return made.item()

        losses = {name: run(loss) for name, loss in ways.items()}
        taken: dict[str, list[tuple[float, int]]] = {name: [] for name in ways}
        for _ in range(REPEATS):
            for name, loss in ways.items():
                taken[name].append(cost(lambda loss=loss: run(loss)))
        seconds = {name: statistics.median(s for s, _ in costs) for name, costs in taken.items()}
        logits = 4 * tokens * vocabulary
        for name, costs in taken.items():
            share = statistics.median(num_bytes for _, num_bytes in costs) / logits
            ratio = seconds["plain"] / seconds[name]
            off = losses[name] / losses["plain"] - 1
            print(
                f"{name:28} {seconds[name]:8.4f} s  {ratio:5.2f} x plain's speed  "
                f"{share:5.2f} x the logits  loss off by {off:+.1e}"
            )
    if CUDA:
        kept = x.new_empty(tokens, vocabulary)
        floor = statistics.median(
            cost(lambda: products(x.detach(), head, kept))[0] for _ in range(REPEATS)
        )
        print(f"{'three products':28} {floor:8.4f} s")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192 if CUDA else 1024)
    parser.add_argument("--width", type=int, default=4096 if CUDA else 256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--peers", action="store_true", default=CUDA)
    given = parser.parse_args()
    ways: dict[str, Loss] = {"plain": plain, "ours": ours("auto"), "ours, each token's": each}
    if given.peers:
        ways |= {"ours, compiled": ours("compiled"), **peers()}
    compare(ways, given.tokens, given.width, given.vocabulary)


if __name__ == "__main__":
    main()
