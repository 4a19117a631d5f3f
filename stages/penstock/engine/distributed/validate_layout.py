"""Layout validation: whether the layout fits the model, the sequences and the schedule.

Errors suggest a valid layout. Runs before any process starts, from the numbers in the model's
config.json. No torch here.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from penstock.config.rules.run import rule_violations
from penstock.config.schema.data import DataConfig
from penstock.config.schema.parallelism import INTERLEAVED, V_SHAPED, PipelineSchedule
from penstock.config.schema.quantization import cut_at
from penstock.config.schema.run import RunConfig
from penstock.config.schema.train import TrainConfig
from penstock.core.errors import ConfigError
from penstock.engine.distributed.parallel_dims import (
    LayoutError,
    ParallelDims,
    accumulation_steps,
    compute_dims,
    fallback_dims,
    sizes_near,
)
from penstock.engine.distributed.pipeline_stages import (
    layers_of_stages,
    schedule_accepts,
    virtual_stages,
)
from penstock.engine.distributed.suggest_layout import (
    LayoutSuggestion,
    Values,
    format_suggestion,
    suggest_change,
)
from penstock.models.decoder_config import DecoderConfig, HeadSizes
from penstock.models.hf_config import HfConfig, config_get, config_require
from penstock.models.multimodal import language_config
from penstock.models.quantization_config import QuantizationConfig, parse_quantization_config
from penstock.models.state_layer_config import MODEL_TYPES as HYBRID
from penstock.models.state_layer_config import StateLayerConfig

SCHEDULES: tuple[PipelineSchedule, ...] = ("1F1B", "GPipe", *INTERLEAVED, *V_SHAPED)


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""The config.json keys of families for the number of experts."""


@dataclass(frozen=True)
class ModelDims:
    """The dimensions of a model that limit a layout. Names are those of config.json."""

    num_attention_heads: int
    num_key_value_heads: int
    num_hidden_layers: int
    intermediate_size: int
    vocab_size: int
    num_experts: int = 0
    value_dim: int = 0
    """Features of a head's values."""
    full_attention_heads: HeadSizes | None = None
    """Those of layers without a sliding window, where they differ."""
    linear: StateLayerConfig | None = None
    """The sizes of layers with a state; None: there are none."""
    published: QuantizationConfig | None = None

    @classmethod
    def of(cls, hf: HfConfig) -> "ModelDims":
        """Read the dimensions. Raises ConfigError if one is missing, and CapabilityError for a
        quantization format that is not supported."""
        hf = language_config(hf)
        full_heads: HeadSizes | None = None
        hybrid: DecoderConfig | None = None
        # Imported here: a finished run needs no families.
        if hf.get("model_type") == "gemma4_text":
            from penstock.models.families.gemma import full_attention_heads  # noqa: PLC0415

            full_heads = full_attention_heads(hf)
        elif hf.get("model_type") in HYBRID:
            from penstock.models.families.layers import hybrid_config  # noqa: PLC0415

            hybrid = hybrid_config(hf)
        heads, hidden = (
            config_require(hf, name) for name in ("num_attention_heads", "hidden_size")
        )
        return cls(
            heads,
            config_get(hf, "num_key_value_heads", heads),
            hybrid.num_hidden_layers if hybrid else config_require(hf, "num_hidden_layers"),
            # With experts in all layers a config.json may have no size of a dense one.
            (hybrid and hybrid.intermediate_size)
            or config_get(hf, "intermediate_size", hf.get("moe_intermediate_size"))
            or config_require(hf, "intermediate_size"),
            config_require(hf, "vocab_size"),
            next((hf[name] for name in EXPERTS if hf.get(name)), 0),
            config_get(hf, "v_head_dim", config_get(hf, "head_dim", hidden // heads)),
            full_heads,
            hybrid and hybrid.linear,
            parse_quantization_config(hf),
        )


def is_model_parallel(train: TrainConfig) -> bool:
    """Whether the layout splits the model itself, so that its dimensions matter."""
    context = max(train.ringattn_parallel_size, train.ulysses_parallel_size)
    cuts = train.tensor_parallel_size, train.pipeline_parallel_size, train.expert_parallel_size
    return max(*cuts, context) > 1


def tokens_multiple(train: TrainConfig) -> int:
    """What the tokens of a micro-batch, with padding, must be a multiple of.

    Ring attention cuts a packed sequence into two chunks per rank, an early one and a late one, to
    balance causal attention; Ulysses and sequence parallelism cut these further.
    """
    ring = train.ringattn_parallel_size
    split = train.tensor_parallel_size if train.sequence_parallel else 1
    return (2 * ring if ring > 1 else 1) * train.ulysses_parallel_size * split


def micro_batch_padding(data: DataConfig, train: TrainConfig) -> int:
    """`data.pad_to_multiple_of`, rounded up to what the layout needs."""
    return math.lcm(data.pad_to_multiple_of, tokens_multiple(train))


def validate_layout(
    run: RunConfig,
    get_world_size: Callable[[RunConfig], int],
    dims: ModelDims | None,
    other_launches: Iterable[LayoutSuggestion],
) -> ParallelDims:
    """Return the valid layout of a run. Raises ConfigError with every violation and the nearest
    valid layout.

    `get_world_size` returns how many processes a run would start, `dims` may be None if the layout
    does not split the model, and `other_launches` are other numbers of processes to suggest.
    """
    world = get_world_size(run)
    errors = layout_errors(run, world, dims)
    if not errors:
        parallel_dims = compute_dims(run.train, world)
        assert isinstance(parallel_dims, ParallelDims)
        return parallel_dims

    def accepted(values: Values) -> bool:
        changed = _with_values(run, values)
        if dims is None and is_model_parallel(changed.train):
            return False
        return not layout_errors(changed, get_world_size(changed), dims) and not any(
            rule_violations(changed)
        )

    settings = [name for error in errors for name in error.settings]
    fallback = fallback_dims(run.train)
    if run.train.sequence_parallel:
        fallback["train.sequence_parallel"] = False
    change = suggest_change(_nearby_settings(run, world), accepted, settings, fallback)
    relaunch = suggest_change(other_launches, accepted, settings)
    reasons = "\n".join(f"{error.reason}." for error in errors)
    proposal = format_suggestion(change) + format_suggestion(
        relaunch, "\n  Or write " if change else "\n  Write "
    )
    raise ConfigError(f"{reasons}{proposal}")


def layout_errors(run: RunConfig, world: int, dims: ModelDims | None) -> list[LayoutError]:
    """Every reason why a run cannot be laid out on `world` ranks."""
    train = run.train
    errors: list[LayoutError] = []
    parallel_dims = compute_dims(train, world)
    if isinstance(parallel_dims, LayoutError):
        errors.append(parallel_dims)
    else:
        errors += _batch_errors(train, parallel_dims)
    if dims:
        errors += [*_tensor_errors(train, dims), *_expert_errors(train, dims)]
        errors += [*_stage_errors(train, dims), *_quant_group_errors(run, dims)]
    return [*errors, *_padding_errors(run)]


def _error(train: TrainConfig, name: str, reason: str) -> LayoutError:
    return LayoutError(f"train.{name} is {getattr(train, name)}, {reason}", (f"train.{name}",))


def _tensor_errors(train: TrainConfig, dims: ModelDims) -> Iterable[LayoutError]:
    heads, keys = dims.num_attention_heads, [dims.num_key_value_heads]
    if own := dims.full_attention_heads:
        keys.append(own.num_key_value_heads)
    tensor, ulysses = train.tensor_parallel_size, train.ulysses_parallel_size
    reasons: list[str] = []
    if heads % tensor:
        reasons.append(
            f"num_attention_heads is {heads}: every rank must get equally many whole heads"
        )
    elif uneven := [count for count in keys if count % tensor and tensor % count]:
        reasons.append(
            f"num_key_value_heads is {uneven[0]}: neither do ranks get equally many of them, nor "
            "does each lie on equally many ranks"
        )
    elif heads // tensor % ulysses:
        heads_on_rank = f"a rank has {heads // tensor} of the" if tensor > 1 else "there are"
        owned = f" (tensor_parallel_size {tensor})" if tensor > 1 else ""
        yield _error(
            train,
            "ulysses_parallel_size",
            f"and {heads_on_rank} {heads} num_attention_heads{owned}: they are shared out whole, "
            "equally many to each rank",
        )
    if dims.linear and (why := dims.linear.why_unsplit(tensor)):
        reasons.append(why)
    for name in ("intermediate_size", "vocab_size"):
        if (size := getattr(dims, name)) < tensor:
            reasons.append(f"{name} is {size}: some rank would get nothing of it")
    for reason in reasons:
        yield _error(train, "tensor_parallel_size", f"and the model's {reason}")


def _quant_group_errors(run: RunConfig, dims: ModelDims) -> Iterable[LayoutError]:
    # Quantized columns that share a scale must stay on one rank.
    lora, tensor = run.lora, run.train.tensor_parallel_size
    if not lora.enable_qlora or tensor == 1:
        return
    # The quantization of base weights, and the multiple at which their columns can be cut.
    quantization = f"lora.quant_format {lora.quant_format}"
    if (published := dims.published) and run.model.model_path:
        quantization = f"as published, {published.format}"
        # bitsandbytes stores the block size with each matrix; it is hardly ever larger.
        usual = cut_at("nf4", None) if published.quant_method == "bitsandbytes" else 1
        unit = published.group_size or usual
    else:
        unit = cut_at(lora.quant_format, lora.quant_group_size)
    columns = [("o_proj", dims.num_attention_heads * dims.value_dim)]
    if dims.linear:
        columns.append(dims.linear.output_layer)
    if own := dims.full_attention_heads:
        columns.append(("o_proj", dims.num_attention_heads * own.head_dim))
    if not dims.num_experts:
        columns.append(("down_proj", dims.intermediate_size))
    for layer, count in columns:
        cuts = [index * count // tensor for index in range(tensor)]
        if any(cut % unit for cut in cuts) and layer not in (lora.exclude_modules or ()):
            yield _error(
                run.train,
                "tensor_parallel_size",
                f"and cuts the {count} columns of {layer} within groups of {unit} that share a "
                f"scale ({quantization})",
            )


def _expert_errors(train: TrainConfig, dims: ModelDims) -> Iterable[LayoutError]:
    size, experts = train.expert_parallel_size, dims.num_experts
    if size > 1 and not experts:
        reason = "and the model has no experts to share out"
        yield _error(train, "expert_parallel_size", reason)
    elif experts % size:
        reason = f"and a layer has {experts} experts: every rank must get equally many"
        yield _error(train, "expert_parallel_size", reason)


def _stage_errors(train: TrainConfig, dims: ModelDims) -> Iterable[LayoutError]:
    if train.pipeline_parallel_size == 1:
        return
    try:
        virtual_stages(train)
    except ConfigError as error:
        yield LayoutError(
            _first_line(error),
            ("train.pipeline_parallel_virtual_stages", "train.pipeline_parallel_schedule"),
        )
        return
    try:
        # Equal costs: those of the layers do not follow from these dimensions.
        layers_of_stages(train, [1] * dims.num_hidden_layers)
    except ConfigError as error:
        settings = "size" if train.pipeline_parallel_split == "uniform" else "split"
        yield LayoutError(_first_line(error), (f"train.pipeline_parallel_{settings}",))


def _batch_errors(train: TrainConfig, parallel_dims: ParallelDims) -> Iterable[LayoutError]:
    try:
        micro_batches = accumulation_steps(train, parallel_dims.num_replicas)
    except ConfigError as error:
        written = train.is_non_default("gradient_accumulation_steps")
        settings = "gradient_accumulation_steps" if written else "global_batch_size"
        yield LayoutError(_first_line(error), (f"train.{settings}",))
        return
    schedule, ranks = train.pipeline_parallel_schedule, train.pipeline_parallel_size
    if ranks > 1 and not schedule_accepts(schedule, ranks, micro_batches):
        made_of = "gradient_accumulation_steps"
        if train.global_batch_size is not None:
            made_of = f"global_batch_size {train.global_batch_size}"
        yield LayoutError(
            f"train.pipeline_parallel_schedule is {schedule}, and a step has {micro_batches} "
            f"micro-batch{'es' if micro_batches > 1 else ''} ({made_of}), which it cannot run on "
            f"pipeline_parallel_size {ranks}",
            ("train.gradient_accumulation_steps", "train.micro_batch_size"),
        )


def _padding_errors(run: RunConfig) -> Iterable[LayoutError]:
    data, train = run.data, run.train
    multiple = tokens_multiple(train)
    if data.is_non_default("pad_to_multiple_of") and data.pad_to_multiple_of % multiple:
        ring = train.ringattn_parallel_size
        ulysses, tensor = train.ulysses_parallel_size, train.tensor_parallel_size
        factors = [
            (ring > 1, f"2 x ringattn_parallel_size {ring}"),
            (ulysses > 1, f"ulysses_parallel_size {ulysses}"),
            (train.sequence_parallel, f"tensor_parallel_size {tensor}"),
        ]
        product = " x ".join(factor for applies, factor in factors if applies)
        yield LayoutError(
            f"data.pad_to_multiple_of is {data.pad_to_multiple_of}, and rows are cut into "
            f"{multiple} equal pieces ({product}); left out, it is rounded up as needed",
            ("data.pad_to_multiple_of",),
        )


def _nearby_settings(run: RunConfig, world: int) -> list[LayoutSuggestion]:
    """Other values of every setting that a layout depends on, except the number of processes."""
    train = run.train

    def suggest(name: str, distance: float, value: object) -> LayoutSuggestion:
        return LayoutSuggestion(f"train.{name}", value, distance, name in train.model_fields_set)

    suggestions = sizes_near(train, world)
    if train.sequence_parallel:
        suggestions.append(suggest("sequence_parallel", 1, False))
    if train.pipeline_parallel_size > 1:
        suggestions += [
            # Another schedule is the last resort: it has a larger bubble or needs more memory.
            suggest("pipeline_parallel_schedule", 8 + distance, schedule)
            for distance, schedule in enumerate(SCHEDULES)
            if schedule != train.pipeline_parallel_schedule
        ]
        now = train.pipeline_parallel_virtual_stages or 1
        suggestions += [
            suggest("pipeline_parallel_virtual_stages", abs(math.log2(stages / now)), stages)
            for stages in (1, 2, 3, 4)
            if stages != now
        ]
        if train.pipeline_parallel_split != "uniform":
            suggestions.append(suggest("pipeline_parallel_split", 1, "uniform"))
    for name, sizes in _nearby_batch_sizes(train, world).items():
        now = getattr(train, name)
        # Another batch size changes the training result, unlike every other suggestion.
        costs = 0 if name == "micro_batch_size" and train.global_batch_size else 1
        suggestions += [
            suggest(name, costs + abs(math.log2(size / now)), size)
            for size in sorted(sizes - {0, now})
        ]
    data, needed = run.data, tokens_multiple(train)
    if data.is_non_default("pad_to_multiple_of"):
        now, row = data.pad_to_multiple_of, data.row_length
        suggestions += [
            LayoutSuggestion("data.pad_to_multiple_of", size, abs(math.log2(size / now)), True)
            for size in range(needed, 2 * max(now, needed) + 1, needed)
            if row % size == 0
        ]
    return suggestions


def _nearby_batch_sizes(train: TrainConfig, world: int) -> dict[str, set[int]]:
    """Other batch sizes on any divisor of `world` ranks."""
    micro, several = train.rows_at_once, train.gradient_accumulation_steps
    at_once = {micro * ranks for ranks in range(1, world + 1) if world % ranks == 0}
    near = {
        "micro_batch_size": {size for size in range(1, micro) if micro % size == 0},
        "gradient_accumulation_steps": {
            *range(1, 9),
            *(times * train.pipeline_parallel_size for times in (1, 2, 3, 4)),
        },
    }
    if rows := train.global_batch_size:
        near["gradient_accumulation_steps"] |= {rows // size for size in at_once}
        units = at_once
        if train.is_non_default("gradient_accumulation_steps"):
            units = {size * several for size in at_once}
        near["global_batch_size"] = {
            rows // unit * unit + more for unit in units for more in (0, unit)
        }
    return near


def _with_values(run: RunConfig, values: Values) -> RunConfig:
    """The run with other values, as if the user had written them."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in values.items():
        section, _, field = name.partition(".")
        sections.setdefault(section, {})[field] = value
    changed = {
        section: getattr(run, section).model_copy(update=fields)
        for section, fields in sections.items()
    }
    return run.model_copy(update=changed)


def _first_line(error: ConfigError) -> str:
    return str(error).partition("\n")[0].rstrip(".")
