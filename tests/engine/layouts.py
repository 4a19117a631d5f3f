"""Ways to cut one small model over ranks, and rows to train it on.

Rows hold documents of one token, of prime lengths, and longer than any rank's share.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
import transformers

from penstock.rows.schema import PACKED
from penstock.train.job import Job
from tests.engine import runs

STEPS, ROWS_PER_STEP = 3, 4
MAX_NORM, LR = 0.5, 0.5
"""Every step is clipped, and moves weights by far more than rounding does."""

DOCUMENTS = (
    [1, 2, 3, 5, 7, 11, 13, 17, 1],
    [97],
    [1],
    [31, 1, 41],
    [2, 83],
    [19, 23, 29],
    [1, 1, 1, 53],
    [61, 37, 1],
)
"""Lengths of the documents in a row; a rank's share of one is at most half of it."""

MODELS: Mapping[str, dict[str, Any]] = {
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "two key heads": {"tie_word_embeddings": True, "num_key_value_heads": 2},
    "experts": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "tie_word_embeddings": False,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
}
SHAPE = {
    "vocab_size": runs.VOCAB + 11,  # a prime: no two ranks hold as much of it
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
SHORT = {
    "pp": "pipeline_parallel_size",
    "replicate": "data_parallel_replicate_size",
    "shard": "data_parallel_shard_size",
    "ring": "ringattn_parallel_size",
    "ulysses": "ulysses_parallel_size",
    "tp": "tensor_parallel_size",
}
"""Sizes of axes are written by these names, outermost first."""


@dataclass(frozen=True)
class Layout:
    """Sizes of axes, and other settings."""

    name: str
    sizes: Mapping[str, int]
    more: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "tied"
    """One of MODELS."""
    lora: bool = False

    @property
    def world(self) -> int:
        """Ranks."""
        return math.prod(self.sizes.values())

    def job(self, folder: Path, out: str, *, optimizer: str = "sgd", **train: Any) -> Job:
        """A run of this layout over the rows in `folder`."""
        settings: dict[str, Any] = {
            "optimizer": optimizer,
            "lr": LR,
            "max_grad_norm": MAX_NORM,
            "global_batch_size": ROWS_PER_STEP,
            "lora": {"enable_lora": self.lora, "lora_rank": 4},
            "data": {"pad_to_multiple_of": 1},
            **{SHORT[axis]: size for axis, size in self.sizes.items()},
            **self.more,
            **train,
        }
        model = {"model_path": str(folder / self.kind), **settings.pop("model", {})}
        run = runs.run_config(folder / out, folder / self.kind, model=model, **settings)
        return runs.job_of(run, folder / "packed")


def _laid(name: str, /, kind: str = "tied", lora: bool = False, **settings: Any) -> Layout:
    sizes = {axis: settings.pop(axis) for axis in SHORT if axis in settings}
    return Layout(name, sizes, settings, kind, lora)


def alone(kind: str, *, lora: bool = False) -> Layout:
    """One process: what every other layout is compared with."""
    return Layout("one process", {}, {"data_parallel_mode": "none"}, kind, lora)


FORMS = (
    _laid("one process, two rows at once", data_parallel_mode="none", micro_batch_size=2),
    _laid("one process, all kept", data_parallel_mode="none", enable_gradient_checkpointing=False),
    _laid("one process, reentrant", data_parallel_mode="none", enable_reentrant=True),
    _laid(
        "one process, parts recomputed",
        data_parallel_mode="none",
        recompute_modules=["mlp", "self_attn"],
    ),
    _laid("one process, begun on the cpu", data_parallel_mode="none", init_device="cpu"),
    _laid("one process, sharded", shard=1),
)
"""One process, which computes in other ways."""

SINGLE = (
    _laid("shard 2", shard=2),
    _laid("shard 4", shard=4, kind="untied"),
    _laid("shard 2, two rows at once", shard=2, micro_batch_size=2),
    _laid("shard 2, zero 1", shard=2, zero_stage=1),
    _laid("shard 2, zero 2", shard=2, zero_stage=2, enable_forward_prefetch=False),
    _laid("shard 2, reentrant", shard=2, enable_reentrant=True),
    _laid(
        "shard 2, each reads", shard=2, load_weights_mode="all_ranks", model={"merge_qkv": False}
    ),
    _laid("shard 2, adapters", shard=2, lora=True),
    _laid("replicate 2", replicate=2),
    _laid("replicate 2, ddp", replicate=2, data_parallel_mode="ddp"),
    _laid("replicate 4, ddp", replicate=4, data_parallel_mode="ddp", kind="untied"),
    _laid("ring 2", ring=2),
    _laid("ring 4", ring=4, kind="untied"),
    _laid("ulysses 2", ulysses=2),
    _laid("ulysses 4, two key heads", ulysses=4, kind="two key heads"),
    _laid("tp 2", tp=2),
    _laid("tp 2, sequence parallel", tp=2, sequence_parallel=True, kind="untied"),
    _laid("tp 2, not fused", tp=2, model={"merge_qkv": False}, load_weights_mode="all_ranks"),
    _laid("tp 2, logits gathered", tp=2, tp_vocab_parallel_loss=False),
    _laid("tp 2, adapters", tp=2, lora=True),
    _laid("tp 4, two key heads", tp=4, kind="two key heads"),
    _laid("pp 2", pp=2),
    _laid("pp 2, untied", pp=2, kind="untied", load_weights_mode="all_ranks"),
    _laid("pp 2, GPipe", pp=2, pipeline_parallel_schedule="GPipe"),
    _laid("pp 2, interleaved", pp=2, pipeline_parallel_schedule="Interleaved1F1B"),
    _laid(
        "pp 2, interleaved zero bubble", pp=2, pipeline_parallel_schedule="InterleavedZeroBubble"
    ),
    _laid("pp 2, ZBV", pp=2, pipeline_parallel_schedule="ZBVZeroBubble"),
    _laid("pp 2, DualPipeV", pp=2, pipeline_parallel_schedule="DualPipeV"),
    _laid("pp 2, adapters", pp=2, lora=True),
    _laid("pp 4", pp=4),
)
"""One axis, in every form."""

SPLIT: dict[str, Any] = {"sequence_parallel": True}
PAIRS = (
    _laid("pp 2 x replicate 2", pp=2, replicate=2),
    _laid("pp 2 x shard 2", pp=2, shard=2, kind="untied"),
    _laid("pp 2 x ring 2", pp=2, ring=2),
    _laid("pp 2 x ulysses 2", pp=2, ulysses=2),
    _laid("pp 2 x tp 2", pp=2, tp=2),
    _laid("pp 2 x tp 2, sequence parallel", pp=2, tp=2, **SPLIT),
    _laid("replicate 2 x shard 2", replicate=2, shard=2),
    _laid("replicate 2 x ring 2", replicate=2, ring=2, cp_fsdp_mode="none"),
    _laid("replicate 2 x ulysses 2", replicate=2, ulysses=2, data_parallel_mode="ddp"),
    _laid("replicate 2 x tp 2", replicate=2, tp=2),
    _laid("shard 2 x ring 2", shard=2, ring=2, kind="untied"),
    _laid("shard 2 x ulysses 2", shard=2, ulysses=2, cp_fsdp_mode="none"),
    _laid("shard 2 x tp 2", shard=2, tp=2, kind="untied"),
    _laid("ring 2 x ulysses 2", ring=2, ulysses=2, cp_fsdp_mode="ulysses_only"),
    _laid("ring 2 x tp 2", ring=2, tp=2, **SPLIT),
    _laid("ulysses 2 x tp 2", ulysses=2, tp=2, cp_fsdp_mode="ring_only"),
)
"""Every two axes, on four ranks."""

TRIPLES = (
    _laid("pp 2 x shard 2 x tp 2", pp=2, shard=2, tp=2),
    _laid("pp 2 x ring 2 x ulysses 2", pp=2, ring=2, ulysses=2),
    _laid("pp 2 x replicate 2 x ulysses 2", pp=2, replicate=2, ulysses=2),
    _laid("pp 2 x shard 2 x ring 2", pp=2, shard=2, ring=2, kind="untied"),
    _laid("replicate 2 x shard 2 x tp 2", replicate=2, shard=2, tp=2, **SPLIT),
    _laid("replicate 2 x ring 2 x ulysses 2", replicate=2, ring=2, ulysses=2),
    _laid("shard 2 x ring 2 x tp 2", shard=2, ring=2, tp=2),
    _laid("shard 2 x ulysses 2 x tp 2", shard=2, ulysses=2, tp=2, zero_stage=2),
    _laid("ring 2 x ulysses 2 x tp 2", ring=2, ulysses=2, tp=2, kind="untied"),
    _laid("shard 2 x tp 4, two key heads", shard=2, tp=4, kind="two key heads"),
    _laid("pp 4 x tp 2", pp=4, tp=2, kind="untied"),
    _laid("ring 4 x ulysses 2", ring=4, ulysses=2),
)
"""Three axes, or two of which one is larger, on eight ranks."""


def _sparse(name: str, expert: int, /, **settings: Any) -> Layout:
    return _laid(name, kind="experts", expert_parallel_size=expert, **settings)


EXPERTS = (
    _sparse("experts, tp 2", 1, tp=2),
    _sparse("ep 2 over shard 2", 2, shard=2),
    _sparse("ep 2 over replicate 2, ddp", 2, replicate=2, data_parallel_mode="ddp"),
    _sparse("ep 2 over tp 2", 2, tp=2),
    _sparse("ep 2 over tp 2, sequence parallel", 2, tp=2, **SPLIT),
    _sparse("ep 2 over ring 2", 2, ring=2),
    _sparse("ep 2 over ulysses 2", 2, ulysses=2),
    _sparse("ep 2 over shard 4", 2, shard=4),
    _sparse("ep 2 over shard 4, far apart", 2, shard=4, ep_outside=True),
    _sparse("ep 2 over replicate 2 x shard 2", 2, replicate=2, shard=2),
    _sparse("ep 2 over shard 2 x tp 2", 2, shard=2, tp=2),
    _sparse("ep 2 over pp 2 x shard 2", 2, pp=2, shard=2),
    _sparse("ep 4 over shard 4", 4, shard=4),
    _sparse("ep 4 over shard 2 x tp 2, ddp", 4, replicate=2, tp=2, data_parallel_mode="ddp"),
    _sparse("ep 4 over ring 2 x ulysses 2", 4, ring=2, ulysses=2),
    _sparse("ep 4 over pp 2 x shard 2 x tp 2", 4, pp=2, shard=2, tp=2),
    _sparse("ep 4 over pp 2 x ring 2 x ulysses 2", 4, pp=2, ring=2, ulysses=2),
    _sparse("ep 4 over shard 2 x ulysses 2 x tp 2", 4, shard=2, ulysses=2, tp=2, **SPLIT),
    _sparse("ep 2 over shard 2 x ring 2 x tp 2", 2, shard=2, ring=2, tp=2),
)
"""Experts shared out over ranks of every other axis."""

LAYOUTS = {layout.name: layout for layout in (*FORMS, *SINGLE, *PAIRS, *TRIPLES, *EXPERTS)}


def write_inputs(folder: Path, num_rows: int) -> None:
    """Packed rows, and a folder of random weights for each model."""
    write_rows(folder / "packed", num_rows)
    for name, changes in MODELS.items():
        config = transformers.AutoConfig.for_model(**{**runs.TINY, **SHAPE, **changes})
        config.dtype = torch.float32
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                # Not the usual start: norms must differ from 1 to be told apart.
                parameter.add_(0.1 * torch.randn_like(parameter))
        model.save_pretrained(folder / name)


def write_rows(folder: Path, num_rows: int) -> None:
    """Rows of these documents in turn, most of whose tokens are trained."""
    rng = np.random.default_rng(0)
    rows: dict[str, list[Any]] = {"input_ids": [], "labels": [], "lengths": []}
    for number in range(num_rows):
        lengths = DOCUMENTS[number % len(DOCUMENTS)]
        ids = rng.integers(0, runs.VOCAB, size=sum(lengths))
        labels = np.where(rng.random(len(ids)) < 0.8, np.roll(ids, -1), -100)
        labels[np.cumsum(lengths) - 1] = -100
        rows["input_ids"].append(ids.tolist())
        rows["labels"].append(labels.tolist())
        rows["lengths"].append(lengths)
    train = folder / "data" / "train"
    train.mkdir(parents=True)
    with pa.ipc.new_file(str(train / "rows-00000-of-00001.arrow"), PACKED) as writer:
        writer.write_table(pa.table(rows, schema=PACKED))
