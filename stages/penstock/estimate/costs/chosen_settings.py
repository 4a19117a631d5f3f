"""Settings of memory and speed that a config leaves open, chosen by the estimated peak memory.

`train.data_parallel_mode` of one process on CPUs and activation checkpointing, where they are not
written, and `train.micro_batch_size: auto`. They save memory at the cost of time, and none of them
changes the result.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from penstock.config.rules.run import rule_violations
from penstock.config.schema.run import RunConfig, is_explicitly_set
from penstock.config.schema.train import AUTO
from penstock.core import env
from penstock.core.errors import PenstockError
from penstock.engine.distributed.parallel_dims import ParallelDims, compute_dims
from penstock.estimate.costs.device_speed import Machine, detect_machine
from penstock.estimate.costs.estimate import build_cost_model
from penstock.estimate.costs.memory import peak_memory
from penstock.estimate.costs.sharded_model import Kind, ShardedModel, UnshardedModel
from penstock.estimate.costs.token_counts import estimate_work
from penstock.estimate.machine import resolve_hf_config, world_size
from penstock.models.automodel.outline import AutoModelConfig
from penstock.models.flops import Part, forward_flops
from penstock.models.multimodal import language_config
from penstock.train.launch.leaner_starts import Settings, describe_settings
from penstock.train.launch.torchrun import num_local_ranks

ROOM: Mapping[Kind, float] = {"cpu": 0.5, "cuda": 0.75}
"""Maximum estimated share of the memory: estimates are not exact.

On CPUs other programs need some. On GPUs, what is measured (four steps on one H200,
docs/benchmarks/gpu.json) was read after the backward pass: weights, gradients and optimizer states,
which the estimate has within 2 %. Activations are known from dry runs alone: the estimate of the
peak is 0.91 to 1.05 of theirs (docs/benchmarks/dry.md), at worst 0.85
(tests/dryrun/test_dry_runs.py), and 0.75 / 0.85 = 0.88 is below `USABLE_MEMORY`."""

CHECKPOINTING_FIELDS = (
    *("enable_gradient_checkpointing", "recompute_modules", "moe_checkpoint_method"),
    *("enable_reentrant", "enable_activation_offload", "activation_gpu_limit"),
)
"""Settings that are about stored or recomputed activations: checkpointing is the user's choice."""

NOTHING: Settings = {"enable_gradient_checkpointing": False}
WHOLE_LAYERS: Settings = {"enable_gradient_checkpointing": True, "recompute_modules": None}
PARTS: Mapping[Part, Settings] = {
    "attention": {"enable_gradient_checkpointing": True, "recompute_modules": ["self_attn"]},
    "network": {"enable_gradient_checkpointing": True, "recompute_modules": ["mlp"]},
}
"""Selective activation checkpointing, by the part of each layer that is recomputed."""


@dataclass(frozen=True)
class ChosenSettings:
    """A run with settings in place of those that its config leaves open."""

    run: RunConfig
    note: str | None = None
    """What was chosen, and why; None if nothing was open."""
    leaner: tuple[Settings, ...] = ()
    """What to take instead if memory runs out, in the order to try them."""


def choose_settings(run: RunConfig, machine: Machine | None = None) -> ChosenSettings:
    """The run with the fastest settings whose estimated peak memory fits `machine` (default: this
    one), if it leaves any open. `run` has its row length."""
    written = any(is_explicitly_set(run, f"train.{name}") for name in CHECKPOINTING_FIELDS)
    is_auto = run.train.micro_batch_size == AUTO
    sets_mode = world_size(run) == 1 and not is_explicitly_set(run, "train.data_parallel_mode")
    if written and not is_auto and not sets_mode:
        return ChosenSettings(run)
    estimate = _Estimate.of(run, machine)
    if estimate is None:
        if not is_auto:
            return ChosenSettings(run)
        why = "as its memory, or this machine's, is not known; a number is used as it is"
        return ChosenSettings(run.with_fields("train", micro_batch_size=1), f"{AUTO} is 1, {why}")
    modes: list[Settings] = [{}]
    # A GPU has little memory to spare for whole weights.
    if sets_mode and estimate.machine.kind == "cpu":
        modes = [{"data_parallel_mode": mode} for mode in ("none", "fsdp2")]
    levels = [{}] if written else [NOTHING, *estimate.parts, WHOLE_LAYERS]
    options = [{**mode, **level} for mode in modes for level in levels]
    options = [settings for settings in options if estimate.is_valid(settings)]
    if not options:
        return ChosenSettings(run)
    fastest = next(filter(estimate.fits, options), options[-1])
    after = options[options.index(fastest) + 1 :]
    if not is_auto:
        return estimate.choice(fastest, options[0], estimate.leaner(fastest, after))
    sizes = [{"micro_batch_size": size} for size in estimate.micro_batch_sizes]
    largest = next((size for size in sizes if estimate.fits({**fastest, **size})), sizes[-1])
    leaner = [{**fastest, **size} for size in _halved(largest, sizes)]
    leaner += [{**settings, **sizes[-1]} for settings in estimate.leaner(fastest, after)]
    return estimate.choice({**fastest, **largest}, {**options[0], **sizes[0]}, leaner)


@dataclass(frozen=True)
class _Estimate:
    """Peak memory of a run with other settings."""

    run: RunConfig
    model: UnshardedModel
    dims: ParallelDims
    machine: Machine
    memory: float

    @classmethod
    def of(cls, run: RunConfig, machine: Machine | None) -> "_Estimate | None":
        """None if the memory of the machine or of the run is not known."""
        started = env.rank_variables()
        try:
            machine = machine or detect_machine(started[2] if started else num_local_ranks(run))
            hf_config = resolve_hf_config(run)
            model = build_cost_model(run, hf_config)
        except PenstockError:  # an unknown GPU, or a model without known shapes
            return None
        dims = compute_dims(run.train, world_size(run))
        if machine.memory is None or not isinstance(dims, ParallelDims):
            return None
        # Of images, and of scores of queries and keys, nothing is estimated.
        is_eager = run.model.attn_implementation == "eager" or run.train.dropout.attention
        if is_eager or language_config(hf_config) is not hf_config:
            return None
        config = model.config
        is_counted = not isinstance(config, AutoModelConfig) or bool(config.outline.saved)
        # What transformers' code saves was counted with its kernels for CPUs.
        if not is_counted or (isinstance(config, AutoModelConfig) and machine.kind != "cpu"):
            return None
        return cls(run, model, dims, machine, machine.memory)

    @cached_property
    def parts(self) -> list[Settings]:
        """Selective activation checkpointing, the part with fewer operations first; none of models
        that do not have it, or whose memory with it is not estimated."""
        config = self.model.config
        if isinstance(config, AutoModelConfig) or config.linear:
            return []
        work = estimate_work(config, self.run, None, 1)
        cheapest_first = sorted(PARTS, key=lambda part: forward_flops(config, work, parts=[part]))
        return [PARTS[part] for part in cheapest_first]

    @property
    def micro_batch_sizes(self) -> list[int]:
        """The micro-batch sizes that divide the rows of a step evenly, largest first."""
        assert self.run.train.global_batch_size is not None, "a rule refuses auto without it"
        rows = max(1, self.run.train.global_batch_size // self.dims.num_replicas)
        return [size for size in range(rows, 0, -1) if rows % size == 0]

    def is_valid(self, settings: Settings) -> bool:
        """Whether the run may have these settings."""
        # `auto` excludes other settings, which do not depend on what it is.
        changed = self.run.with_fields("train", **settings)
        return not any(rule_violations(changed))

    def needed(self, settings: Settings) -> float:
        """Estimated bytes of the rank with the highest peak."""
        changed = self.run.with_fields("train", **settings)
        memory = peak_memory(ShardedModel(changed, self.model, self.dims, self.machine.kind))
        # The estimate is of balanced experts; those of one rank may get twice as many tokens.
        return memory.total + (memory.activations if self.dims.expert > 1 else 0.0)

    def fits(self, settings: Settings) -> bool:
        """Whether there is room for these settings."""
        return self.needed(settings) <= ROOM[self.machine.kind] * self.memory

    def leaner(self, chosen: Settings, after: Sequence[Settings]) -> list[Settings]:
        """Of these, each that needs less memory than the chosen ones and all before it, and the
        last: whole layers, which store the least whatever the estimate says."""
        least, leaner = self.needed(chosen), list[Settings]()
        for settings in after:
            if (needed := self.needed(settings)) < least or settings is after[-1]:
                least = needed
                leaner.append(settings)
        return leaner

    def choice(
        self, chosen: Settings, fastest: Settings, leaner: Sequence[Settings]
    ) -> ChosenSettings:
        """The run with the chosen settings, in place of the fastest ones if these do not fit."""
        if not chosen:
            return ChosenSettings(self.run)
        needed, memory = self.needed(chosen) / 1e9, self.memory / 1e9
        note = (
            f"{describe_settings(chosen)}, as about {needed:.1f} of {memory:.0f} GB are needed by "
        )
        note += "one process" if self.dims.world_size == 1 else "each process"
        if chosen != fastest:
            note += f", and {self.needed(fastest) / 1e9:.1f} with {describe_settings(fastest)}"
        note += "; written values are used as they are"
        return ChosenSettings(self.run.with_fields("train", **chosen), note, tuple(leaner))


def _halved(largest: Settings, sizes: Sequence[Settings]) -> Iterator[Settings]:
    """Of these micro-batch sizes, the largest that is at most half of the one before, until 1."""
    now = largest["micro_batch_size"]
    for settings in sizes:
        if 2 * settings["micro_batch_size"] <= now:
            now = settings["micro_batch_size"]
            yield settings
