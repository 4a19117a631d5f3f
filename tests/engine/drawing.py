"""Layouts drawn at random: how ranks and passes share a step, and what one process is asked for.

Draws are not made valid: `penstock check` refuses those that are not.
"""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.cli.check import _validate_model
from penstock.config.schema.run import needs_reference
from penstock.core.errors import CapabilityError, ConfigError
from penstock.train.launch.job import Job
from tests.engine import runs
from tests.engine.inputs import DOCUMENTS, MODELS, write_rows
from tests.engine.laid import BALANCES, LORA_FORMS, SHORT, Layout, laid
from tests.engine.losses.answering import random_samples, write_answers, write_reference

WORLDS = (2, 3, 4)
STEPS = 3
GLOBAL_BATCHES = (4, 6, 8)
NUM_ROWS = STEPS * max(GLOBAL_BATCHES)
ROW_LENGTH = 480
"""A multiple of whatever a layout on so few ranks cuts rows into."""
DROPOUT = 0.1

Choices = Mapping[str, tuple[Any, ...]]

PASSES: Choices = {
    "micro_batch_size": (2, 3),
    "enable_gradient_checkpointing": (False,),
    "enable_reentrant": (True,),
    "recompute_modules": (["mlp"], ["self_attn"], ["core_attn"], ["core_attn", "mlp"]),
    "load_weights_mode": ("all_ranks",),
    "init_device": ("cpu",),
    "model.merge_qkv": (False,),
}
OF_AXES: Mapping[str, Choices] = {
    "shard": {
        "zero_stage": (1, 2, 3),
        "reshard_after_forward": (True, False),
        "enable_full_shard": (False,),
        "enable_forward_prefetch": (False,),
        "enable_fsdp_offload": (True,),
        "fsdp_gradient_sync": ("micro_batch", "step"),
        "cp_fsdp_mode": ("none", "ring_only", "ulysses_only"),
    },
    "replicate": {"data_parallel_mode": ("ddp",), "comm_bucket_mb": (1,)},
    "tp": {
        "sequence_parallel": (True,),
        "tp_vocab_parallel_loss": (False,),
        "tp_reduce_dtype": ("fp32",),
    },
    "pp": {
        "pipeline_parallel_schedule": (
            *("GPipe", "Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV"),
        ),
        "pipeline_parallel_virtual_stages": (2, 3),
        "pipeline_parallel_split": ([0, 1], [0, 3], [0, 0], [0, 1, 2], [0, 1, 2, 3]),
        "pipeline_parallel_input_weight": (0, 2),
        "pipeline_parallel_output_weight": (0, 2),
        "pp_variable_seq_lengths": (False,),
    },
    "ring": {"cp_fsdp_mode": ("none", "ring_only", "ulysses_only")},
    "ulysses": {"cp_fsdp_mode": ("none", "ring_only", "ulysses_only")},
}
OF_EXPERTS: Choices = {
    "expert_parallel_size": (2, 3, 4),
    "ep_outside": (True,),
    "moe_checkpoint_method": ("moe_act",),
    "model.moe_implementation": ("eager",),
}
ROWS = ("packed", "weighted", "documents", "preference", "kto")
"""The first words of the names of folders that hold rows."""
LOSSES = (
    *("sigmoid", "hinge", "ipo", "kto_pair", "kto", "sppo_hard", "nca_pair", "dpop"),
    *("simpo", "cpo", "or", "orpo"),
)


@dataclass(frozen=True)
class Drawn:
    """A layout and its rows."""

    layout: Layout
    content: Mapping[str, Any]
    """Settings that the result depends on, besides those of `Layout.alone`."""
    rows: str
    """A folder that `write_drawn_rows` writes."""

    @property
    def is_quantized(self) -> bool:
        """Whether adapters are on quantized weights."""
        return "enable_qlora" in LORA_FORMS.get(self.layout.lora, {})

    def job(self, folder: Path, out: str) -> Job:
        """The run of this layout."""
        launch = {"nproc_per_node": self.layout.world}
        return self._job(self.layout, folder, out, launch=launch)

    def job_alone(self, folder: Path, out: str) -> Job:
        """The same result, asked of one process."""
        one = self.layout.alone
        return self._job(replace(one, more={**one.more, **self.content}), folder, out)

    def _job(self, layout: Layout, folder: Path, out: str, **more: Any) -> Job:
        job = layout.job(folder, out, max_steps=STEPS, **more)
        # Of a loss without a reference model, log-probs minus scores would be no log-probs: ORPO
        # would take the odds of probabilities above 1.
        scores = folder / f"{self.rows} scores" if needs_reference(job.config) else None
        return replace(job, packed_dir=folder / self.rows, ref_logprobs=scores)

    def __str__(self) -> str:
        layout = self.layout
        words = [layout.kind, f"rows {self.rows}", *(f"{n} {s}" for n, s in layout.sizes.items())]
        words += [f"{name}: {value}" for name, value in layout.more.items()]
        named = {"lora": layout.lora, "dropout": layout.drops, "balance": layout.balance}
        return ", ".join([*words, *(f"{name} {value}" for name, value in named.items() if value)])


def drawn(rng: random.Random, kinds: Sequence[str] = tuple(MODELS)) -> Drawn:
    """A layout on one of WORLDS, of one of these MODELS, valid or not."""
    kind = rng.choice(kinds)
    world = rng.choice(WORLDS)
    sizes = _sizes(rng, world)
    content, rows = _content(rng, kind)
    split: dict[str, Any] = {}
    for axis, choices in OF_AXES.items():
        # What an axis alone reads is refused without it.
        for name, values in choices.items():
            if rng.random() < (0.25 if axis in sizes else 0.003):
                split[name] = rng.choice(values)
    for choices, odds in ((PASSES, 0.15), (OF_EXPERTS, 0.4 if _has_experts(kind) else 0.003)):
        split |= {n: rng.choice(values) for n, values in choices.items() if rng.random() < odds}
    if rng.random() < 0.6:
        split["data.pad_to_multiple_of"] = rng.choice((1, 2, 4, 6, 16, 24))
    if "replicate" in sizes and "shard" not in sizes and rng.random() < 0.5:
        split["data_parallel_mode"] = "ddp"
    if not {"replicate", "shard"} & sizes.keys() and rng.random() < 0.3:
        split["data_parallel_mode"] = "none"
    layout = laid(
        "drawn",
        kind=kind,
        lora=rng.choice([*LORA_FORMS]) if rng.random() < 0.3 else rng.random() < 0.2,
        drops=DROPOUT if rng.random() < 0.1 else 0.0,
        balance=rng.choice([*BALANCES]) if _has_experts(kind) and rng.random() < 0.3 else "",
        **sizes,
        **_nested(content, split),
    )
    return Drawn(layout, _nested(content), rows)


def accepted(
    folder: Path,
    seed: int,
    name: str,
    kinds: Sequence[str] = tuple(MODELS),
    *,
    is_quantized: bool | None = None,
) -> tuple[Drawn, Job]:
    """The first draw of this name that `penstock check` accepts, quantized or not."""
    rng = random.Random(f"{seed}: {name}")
    while True:
        draw = drawn(rng, kinds)
        if is_quantized not in (None, draw.is_quantized):
            continue
        try:
            job = draw.job(folder, name)
        except (ConfigError, CapabilityError):
            continue
        if refusal(job) is None:
            return draw, job


def _sizes(rng: random.Random, world: int) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for factor in (2, 2) if world == 4 else (world,):
        axis = rng.choice([*SHORT])
        sizes[axis] = sizes.get(axis, 1) * factor
    assert math.prod(sizes.values()) == world
    return sizes


def _content(rng: random.Random, kind: str) -> tuple[dict[str, Any], str]:
    """What is learned, by the names of settings, and from which rows."""
    found: dict[str, Any] = {"global_batch_size": rng.choice(GLOBAL_BATCHES)}
    if _has_experts(kind) and rng.random() < 0.1:
        found["model.freeze_router"] = True
    if rng.random() < 0.05:
        found["model.backend"] = "transformers"
    if rng.random() < 0.75:
        if rng.random() < 0.1:
            found["data.isolate_samples"] = False
        return found, rng.choice(["packed", "packed", "weighted", "documents"])
    loss, shares = rng.choice(LOSSES), rng.random() < 0.5
    of_data = "kto" if loss == "kto" else "preference"
    found |= {
        "objective": "preference",
        "preference.loss_type": loss,
        "data.share_prompts": shares,
        "data.datasets": [{"path": "dummy", "type": of_data}],
    }
    return found, of_data if shares else f"{of_data} apart"


def _has_experts(kind: str) -> bool:
    return any("expert" in name for name in MODELS[kind])


def _nested(*settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by section; those without one are of `train`."""
    found: dict[str, Any] = {"data": {"sample_packing_sequence_len": ROW_LENGTH}}
    for name, value in {name: value for some in settings for name, value in some.items()}.items():
        section, _, field = name.rpartition(".")
        (found.setdefault(section, {}) if section else found)[field] = value
    return found


def refusal(job: Job) -> ConfigError | CapabilityError | None:
    """What `penstock check` says of the run's model and layout, or None."""
    try:
        _validate_model(job.config)
    except (ConfigError, CapabilityError) as error:
        return error
    return None


def write_drawn_rows(folder: Path) -> None:
    """All kinds of rows that draws name, as many as the steps of any take."""
    write_rows(folder / "packed", NUM_ROWS)
    write_rows(folder / "weighted", NUM_ROWS, is_weighted=True)
    each = tuple([length] for lengths in DOCUMENTS for length in lengths)
    write_rows(folder / "documents", NUM_ROWS, documents=each)
    for kind in ("preference", "kto"):
        samples = random_samples(4 * NUM_ROWS, runs.VOCAB, judged=kind == "kto")
        for name, shares in ((kind, True), (f"{kind} apart", False)):
            write_answers(folder / name, samples, shares_prompts=shares)
            write_reference(folder / f"{name} scores", samples)


def link_rows(source: Path, folder: Path) -> None:
    """All rows that `write_drawn_rows` wrote into `source`."""
    for path in source.iterdir():
        if path.name.partition(" ")[0] in ROWS:
            (folder / path.name).symlink_to(path)
