"""Head and loss, ours and others': `python -m tests.bench.kernels.bench_loss [--tokens T] [--width
D] [--vocabulary V] [--peers] [--dry]`.

Forward and backward of random bfloat16 hidden states and a head, all tokens trained; medians of
five, in turns in one process, after one warm run each. Printed are seconds, the peak of memory over
what was there before as a share of the logits in float32, and ratios to the plain way: a product,
and PyTorch's cross-entropy of its float32 copy. On a GPU also the time of the three products alone,
below which nobody comes. Other ways are what `torch.compile` makes of the plain one, Liger-Kernel
and QuACK (on GPUs alone) and cut-cross-entropy, where they are installed; on a CPU with `--peers`.
With `--dry` all of it runs at a shape that says nothing.

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
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from tests.bench import peers
from tests.bench.figures import record
from tests.bench.timing import CUDA, DEVICE, ROUNDS, Work, machine, verdict

from penstock_kernels.cross_entropy import Passes, linear_cross_entropies, linear_cross_entropy

Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""Hidden states [T, D], a head [V, D] and labels [T] to a summed loss."""

OF_LIGER, OF_PRODUCTS = 1.0, 1 / 1.35
LIGER = "liger, fp32 sums"
"""Whose gradients are added up as ours are."""


def plain(x: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As it is written most often."""
    return F.cross_entropy((x @ head.t()).float(), labels, reduction="sum")


def ours(passes: Passes) -> Loss:
    """With gradients on the way."""
    return lambda x, head, labels: linear_cross_entropy([(x, head)], labels, passes=passes)


def each(x: torch.Tensor, head: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Ours where each token's loss is wanted: logits are made twice."""
    return linear_cross_entropies([(x, head)], labels).sum()


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


def cost(work: Work) -> tuple[float, int]:
    """Seconds, and bytes at the peak over those before."""
    before = forget_peak()
    start = time.perf_counter()
    work()
    if CUDA:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    return seconds, (torch.cuda.max_memory_allocated() if CUDA else host_peak()) - before


def compare(
    ways: Mapping[str, Loss],
    others: Mapping[str, Loss],
    tokens: int,
    width: int,
    vocabulary: int,
) -> None:
    """Print all ways to train a head and what comes before it, and then only the latter."""
    generator = torch.Generator(DEVICE).manual_seed(0)
    drawn = partial(torch.randn, generator=generator, device=DEVICE)
    x = drawn(tokens, width).to(torch.bfloat16).requires_grad_()
    head = (drawn(vocabulary, width) / width**0.5).to(torch.bfloat16)
    labels = torch.randint(0, vocabulary, (tokens,), generator=generator, device=DEVICE)
    for trained in (True, False):
        head.requires_grad_(trained)
        print(f"\n{tokens} tokens, {width} wide, {vocabulary} entries, head {trained=}")

        def run(loss: Loss) -> float:
            made = loss(x, head, labels)
            made.backward()
            x.grad = head.grad = None
            return made.item()

        losses = {name: run(loss) for name, loss in ways.items()}
        running = dict(ways)
        for name, loss in others.items():
            if (found := peers.result_of(name, lambda loss=loss: run(loss))) is not None:
                losses[name], running[name] = found, loss
        taken: dict[str, list[tuple[float, int]]] = {name: [] for name in running}
        for _ in range(ROUNDS):
            for name, loss in running.items():
                taken[name].append(cost(lambda loss=loss: run(loss)))
        seconds = {name: statistics.median(s for s, _ in costs) for name, costs in taken.items()}
        logits = 4 * tokens * vocabulary
        shares = {
            name: statistics.median(num_bytes for _, num_bytes in costs) / logits
            for name, costs in taken.items()
        }
        for name, share in shares.items():
            ratio = seconds["plain"] / seconds[name]
            off = losses[name] / losses["plain"] - 1
            record(f"{name}, head {trained=}", seconds[name] * 1e3, "ms")
            record(f"{name}, head {trained=}", share, "of the logits' memory")
            print(
                f"{name:28} {seconds[name]:8.4f} s  {ratio:5.2f} x plain's speed  "
                f"{share:5.2f} x the logits  loss off by {off:+.1e}"
            )
        if LIGER in running:
            with_head = f"head {trained=}"
            print(
                verdict(
                    f"liger's time / ours, {with_head}", seconds[LIGER] / seconds["ours"], OF_LIGER
                )
            )
            print(
                verdict(
                    f"liger's memory / ours, {with_head}", shares[LIGER] / shares["ours"], OF_LIGER
                )
            )
        if CUDA and trained:
            kept = x.new_empty(tokens, vocabulary)
            floor = statistics.median(
                cost(lambda kept=kept: products(x.detach(), head, kept))[0] for _ in range(ROUNDS)
            )
            print(verdict("three products' time / ours", floor / seconds["ours"], OF_PRODUCTS))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8192 if CUDA else 1024)
    parser.add_argument("--width", type=int, default=4096 if CUDA else 256)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--peers", action="store_true", default=CUDA)
    parser.add_argument("--dry", action="store_true")
    asked = parser.parse_args()
    print(machine())
    ways: dict[str, Loss] = {"plain": plain, "ours": ours("auto"), "ours, each token's": each}
    others: dict[str, Loss] = {}
    if asked.peers:
        peers.say_missing("liger", "quack", "cut-cross-entropy")
        ways |= {"ours, compiled": ours("compiled"), "plain, compiled": torch.compile(plain)}
        others = peers.losses()
    shape = (64, 32, 500) if asked.dry else (asked.tokens, asked.width, asked.vocabulary)
    compare(ways, others, *shape)


if __name__ == "__main__":
    main()
