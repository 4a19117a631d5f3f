"""Ways to cut one small model over ranks."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.train.job import Job
from tests.engine import runs

STEPS, ROWS_PER_STEP = 3, 4
MAX_NORM, LR = 0.5, 0.5
"""Every step is clipped, and moves weights by far more than rounding does."""

SHORT = {
    "pp": "pipeline_parallel_size",
    "replicate": "data_parallel_replicate_size",
    "shard": "data_parallel_shard_size",
    "ring": "ringattn_parallel_size",
    "ulysses": "ulysses_parallel_size",
    "tp": "tensor_parallel_size",
}
"""Sizes of axes are written by these names, outermost first."""


LORA_FORMS: Mapping[bool | str, dict[str, Any]] = {
    "shared": {"moe_shared_lora": True},
    "half shared": {"moe_hybrid_shared_lora": True},
    "normed": {
        "use_dora": True,
        "use_rslora": True,
        # With the root of the rank an adapter would count eight times, and so would its rounding.
        "lora_alpha": 4,
        "lora_plus_ratio": 4.0,
        "lora_target_modules": ["all-linear", "embed_tokens", "lm_head"],
    },
    "biased": {"lora_bias": "lora_only", "lora_target_modules": ["*.self_attn.*"]},
}
"""What adapters may be besides the plain ones."""


BALANCES: Mapping[str, dict[str, Any]] = {
    "": {},
    "of rows": {"moe_aux_loss_coef": 0.5, "moe_z_loss_coef": 0.05},
    "of steps": {"moe_aux_loss_coef": 0.5, "moe_global_load_balancing": True},
}
"""What is asked of routers, of which gradients are as large as of the loss."""


@dataclass(frozen=True)
class Layout:
    """Sizes of axes, and other settings."""

    name: str
    sizes: Mapping[str, int]
    more: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "tied"
    """One of `inputs.MODELS`."""
    lora: bool | str = False
    """A text: one of LORA_FORMS."""
    drops: float = 0.0
    """The rate of every dropout there is."""
    balance: str = ""
    """One of BALANCES."""

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
            "dropout": {"hidden": self.drops},
            "lora": {
                "enable_lora": bool(self.lora),
                "lora_rank": 4,
                "lora_dropout": self.drops,
                **LORA_FORMS.get(self.lora, {}),
            },
            "data": {"pad_to_multiple_of": 1},
            **{SHORT[axis]: size for axis, size in self.sizes.items()},
            **BALANCES[self.balance],
            **self.more,
            **train,
        }
        model = {"model_path": str(folder / self.kind), **settings.pop("model", {})}
        run = runs.run_config(folder / out, folder / self.kind, model=model, **settings)
        return runs.job_of(run, folder / "packed")

    @property
    def alone(self) -> "Layout":
        """The same in one process: what every other layout is compared with."""
        return alone(self.kind, lora=self.lora, drops=self.drops, balance=self.balance)


def _laid(
    name: str,
    /,
    kind: str = "tied",
    lora: bool | str = False,
    drops: float = 0.0,
    balance: str = "",
    **settings: Any,
) -> Layout:
    sizes = {axis: settings.pop(axis) for axis in SHORT if axis in settings}
    return Layout(name, sizes, settings, kind, lora, drops, balance)


def alone(kind: str, *, lora: bool | str = False, drops: float = 0.0, balance: str = "") -> Layout:
    """One process."""
    adapters = f", adapters {lora}" if isinstance(lora, str) else ", adapters" * lora
    name = f"one process of {kind}{adapters}{', dropout' * (drops > 0)}"
    name += f", balance {balance}" if balance else ""
    return Layout(name, {}, {"data_parallel_mode": "none"}, kind, lora, drops, balance)


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
    _sparse("ep 2 over tp 2, gates recomputed", 2, tp=2, moe_checkpoint_method="moe_act"),
    _sparse(
        "experts, pp 2, ZBV, gates recomputed",
        1,
        pp=2,
        pipeline_parallel_schedule="ZBVZeroBubble",
        moe_checkpoint_method="moe_act",
    ),
    _sparse("ep 4 over shard 4", 4, shard=4),
    _sparse("ep 4 over shard 2 x tp 2, ddp", 4, replicate=2, tp=2, data_parallel_mode="ddp"),
    _sparse("ep 4 over ring 2 x ulysses 2", 4, ring=2, ulysses=2),
    _sparse("ep 4 over pp 2 x shard 2 x tp 2", 4, pp=2, shard=2, tp=2),
    _sparse("ep 4 over pp 2 x ring 2 x ulysses 2", 4, pp=2, ring=2, ulysses=2),
    _sparse("ep 4 over shard 2 x ulysses 2 x tp 2", 4, shard=2, ulysses=2, tp=2, **SPLIT),
    _sparse("ep 2 over shard 2 x ring 2 x tp 2", 2, shard=2, ring=2, tp=2),
)
"""Experts shared out over ranks of every other axis."""

ADAPTED = (
    _sparse("adapters of experts, ep 2 over shard 2", 2, shard=2, lora=True),
    _sparse("adapters of experts, pp 2", 1, pp=2, lora=True),
    _sparse(
        "shared adapters, ep 2 over replicate 2, ddp",
        2,
        replicate=2,
        lora="shared",
        data_parallel_mode="ddp",
    ),
    _sparse("shared adapters, tp 2", 1, tp=2, lora="shared"),
    _sparse("half shared adapters, ep 2 over tp 2", 2, tp=2, lora="half shared", **SPLIT),
    _sparse(
        "half shared adapters, ep 2 over shard 2, gates recomputed",
        2,
        shard=2,
        lora="half shared",
        moe_checkpoint_method="moe_act",
    ),
)
"""Experts with adapters, which lie where they do, or on all ranks if experts share them."""


def _sinks(name: str, /, **settings: Any) -> Layout:
    return _laid(f"gpt-oss, {name}", kind="sinks", **settings)


SINKS = (
    _sinks(
        "ep 2 over shard 2, gates recomputed",
        shard=2,
        expert_parallel_size=2,
        moe_checkpoint_method="moe_act",
    ),
    _sinks("ring 2", ring=2),
    _sinks("ulysses 2", ulysses=2),
    _sinks("tp 2, sequence parallel", tp=2, model={"merge_qkv": False}, **SPLIT),
    _sinks("tp 2, adapters", tp=2, lora=True),
    _sinks("pp 2", pp=2),
)
"""Windows and sinks in attention, and experts that are one tensor in a checkpoint."""

NORMED: dict[str, Any] = {"kind": "untied", "lora": "normed"}
FORMED = (
    _laid("normed adapters, shard 2", shard=2, load_weights_mode="all_ranks", **NORMED),
    _laid("normed adapters, tp 2", tp=2, **NORMED),
    _laid("normed adapters, tp 2, not fused", tp=2, model={"merge_qkv": False}, **SPLIT, **NORMED),
    _laid("normed adapters, pp 2", pp=2, **NORMED),
    _sinks("tp 2, adapters and biases", tp=2, lora="biased"),
)
"""Adapters with magnitudes, on the embedding and the head too, and with biases."""

RATE = 0.1


def _dropping(name: str, /, **settings: Any) -> Layout:
    return _laid(f"dropout, {name}", drops=RATE, **settings)


DROPPING = (
    _dropping("all kept", data_parallel_mode="none", enable_gradient_checkpointing=False),
    _dropping("two rows at once", data_parallel_mode="none", micro_batch_size=2),
    _dropping("shard 2", shard=2),
    _dropping("ring 2", ring=2),
    _dropping("ulysses 2", ulysses=2),
    _dropping("tp 2, sequence parallel", tp=2, **SPLIT),
    _dropping("pp 2, ZBV", pp=2, pipeline_parallel_schedule="ZBVZeroBubble"),
    _dropping("tp 2, adapters", tp=2, lora=True),
    _dropping(
        "tp 2, sequence parallel, adapters not fused",
        tp=2,
        lora=True,
        model={"merge_qkv": False},
        recompute_modules=["self_attn"],
        **SPLIT,
    ),
)
"""Layouts under which the same is dropped."""

TWO_AT_ONCE: dict[str, Any] = {"micro_batch_size": 2}
ZBV: dict[str, Any] = {"pipeline_parallel_schedule": "ZBVZeroBubble"}
BALANCED = (
    _sparse("balance of rows, two at once", 1, balance="of rows", shard=1, **TWO_AT_ONCE),
    _sparse("balance of rows, ep 2 over shard 2", 2, balance="of rows", shard=2),
    _sparse("balance of rows, ring 2", 1, balance="of rows", ring=2, **TWO_AT_ONCE),
    _sparse("balance of rows, ulysses 2", 1, balance="of rows", ulysses=2),
    _sparse("balance of rows, tp 2", 1, balance="of rows", tp=2),
    _sparse("balance of rows, ep 2 over tp 2, split", 2, balance="of rows", tp=2, **SPLIT),
    _sparse("balance of rows, pp 2, ZBV", 1, balance="of rows", pp=2, **ZBV),
    _sparse("balance of steps, shard 2", 1, balance="of steps", shard=2),
    _sparse("balance of steps, one pass, shard 2", 1, balance="of steps", shard=2, **TWO_AT_ONCE),
    _sparse("balance of steps, tp 2, split", 1, balance="of steps", tp=2, **SPLIT),
    _sparse("balance of steps, pp 2", 1, balance="of steps", pp=2),
    _sparse(
        "balance of steps, ep 4 over pp 2 x ring 2 x tp 2",
        4,
        balance="of steps",
        pp=2,
        ring=2,
        tp=2,
    ),
)
"""Losses of routers, of rows that are cut or several at once, and of steps of several passes."""

LAYOUTS = {
    layout.name: layout
    for layout in (
        *FORMS,
        *SINGLE,
        *PAIRS,
        *TRIPLES,
        *EXPERTS,
        *ADAPTED,
        *SINKS,
        *FORMED,
        *DROPPING,
        *BALANCED,
    )
}
