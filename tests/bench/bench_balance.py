"""How evenly ranks are loaded: `python -m tests.bench.bench_balance [SAMPLES]`.

For each distribution of lengths: samples are packed, rows are laid into steps and dealt to ranks,
and the work of the slowest rank is put over the mean, averaged over the steps of an epoch. Work is
Qwen3-8B's. Beside it the same rows in a random order, as other trainers deal them.
"""

import sys
import time

import numpy as np
import numpy.typing as npt

from penstock.models.decoder_config import DecoderConfig
from penstock.models.flops import pairs_per_token
from penstock.rows.batches import Integers, StepSampler, assign_micro_batches
from penstock.rows.bin_plan import PackingPlan
from penstock.rows.packing.multipack import multipack

QWEN3_8B = DecoderConfig(
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    qk_norm=True,
)
LAYOUTS = [(8, 1, 1), (8, 1, 4), (64, 1, 1), (64, 2, 2)]
GOALS = {8: 1.01, 64: 1.02}


def lognormal(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Instruction data: mean 600 tokens."""
    return rng.lognormal(np.log(600) - 0.5, 1.0, count)


def heavy_tail(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Documents: a few hold most of the tokens."""
    return (rng.pareto(1.1, count) + 1) * 200


def half_full(rng: np.random.Generator, count: int) -> npt.NDArray[np.float64]:
    """Pretraining: half of the samples are as long as a row."""
    return np.where(rng.random(count) < 0.5, 1e9, lognormal(rng, count))


SETS = {
    "lognormal, 8k": (lognormal, 8192, 14),
    "lognormal, 32k": (lognormal, 32_768, 56),
    "heavy tail, 8k": (heavy_tail, 8192, 11),
    "heavy tail, 32k": (heavy_tail, 32_768, 32),
    "half full, 8k": (half_full, 8192, 2),
}
"""With about how many samples make a row, so that all sets have as many rows."""


def work_of(bins: PackingPlan, sizes: Integers) -> Integers:
    """What each row costs."""
    placed = sizes[bins.samples]
    totals = [np.concatenate([[0], np.cumsum(each)]) for each in (placed, placed * placed)]
    ends = np.concatenate([[0], bins.ends])
    tokens, squares = (np.diff(total[ends]) for total in totals)
    return (pairs_per_token(QWEN3_8B) * tokens + squares).astype(np.int64)


def slowest(work: Integers) -> float:
    """Time of a step over that of an even one; work is [ranks, micro-batches]."""
    return float(work.max(axis=0).sum() / work.mean(axis=0).sum())


def main() -> None:
    num_rows = int(sys.argv[1]) if len(sys.argv) > 1 else 30_000
    print(f"pairs per token of Qwen3-8B: {pairs_per_token(QWEN3_8B)}")
    print(f"{'':16} rows  ranks x micro x passes   random    ours   worst 1 %   goal  order, s")
    for name, (draw, capacity, samples_per_row) in SETS.items():
        rng = np.random.default_rng(0)
        sizes = np.clip(draw(rng, num_rows * samples_per_row).astype(np.int64), 1, capacity)
        costs = work_of(multipack(sizes, capacity, 100_000, rng), sizes)
        plain = rng.permutation(len(costs))
        for ranks, size, passes in LAYOUTS:
            at_once = ranks * size * passes
            batches = StepSampler(costs, rows_per_step=at_once, seed=1, last_batch="drop")
            cursor = batches.start()
            started = time.perf_counter()
            batches.rows(cursor)
            seconds = time.perf_counter() - started
            ours: list[float] = []
            random: list[float] = []
            for step in range(batches.steps_until(1, cursor)):
                rows = batches.rows(cursor)
                dealt = assign_micro_batches(
                    rows.tolist(),
                    costs[rows].tolist(),
                    num_replicas=ranks,
                    size=size,
                    count=passes,
                )
                ours.append(slowest(np.array([[costs[g].sum() for g in mine] for mine in dealt])))
                there = plain[step * at_once : (step + 1) * at_once]
                random.append(slowest(costs[there].reshape(ranks, passes, size).sum(axis=2)))
                cursor = batches.advance(cursor)
            print(
                f"{name:16} {len(costs):6} {ranks:5} x {size} x {passes}             "
                f"{np.mean(random):.4f}  {np.mean(ours):.4f}      {np.quantile(ours, 0.99):.4f}"
                f"   {GOALS[ranks]}   {seconds:.3f}"
            )


if __name__ == "__main__":
    main()
