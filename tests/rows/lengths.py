"""Lengths of samples as data sets have them, for tests and benchmarks of packing."""

import numpy as np
import numpy.typing as npt

NAMES = ("lognormal", "bimodal", "heavy tail", "hard", "pretrain")


def lengths_of(name: str, count: int, capacity: int, seed: int = 0) -> npt.NDArray[np.int64]:
    """`count` lengths from 1 to `capacity`.

    lognormal: conversations, 600 tokens in the mean. bimodal: seven in ten short questions, the
    others documents of just under half a row. heavy tail: Pareto from 100 tokens, a few very long.
    hard: evenly 0.2 to 0.7 of a row, nothing short to fill gaps with. pretrain: half of them cut at
    a row's length, the others of any length.
    """
    rng = np.random.Generator(np.random.PCG64([seed, count, capacity]))
    if name == "lognormal":
        found = rng.lognormal(np.log(600) - 0.5, 1.0, count)
    elif name == "bimodal":
        short = rng.lognormal(np.log(300) - 0.125, 0.5, count)
        documents = rng.normal(0.45 * capacity, 0.06 * capacity, count)
        found = np.where(rng.random(count) < 0.7, short, documents)
    elif name == "heavy tail":
        found = 100 * (1 + rng.pareto(1.1, count))
    elif name == "hard":
        found = rng.uniform(0.2 * capacity, 0.7 * capacity, count)
    elif name == "pretrain":
        found = np.where(rng.random(count) < 0.5, capacity, rng.uniform(1, capacity, count))
    else:
        raise ValueError(f"{name} is none of {', '.join(NAMES)}")
    return np.clip(found, 1, capacity).astype(np.int64)
