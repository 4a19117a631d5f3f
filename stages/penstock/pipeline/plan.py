"""Plans the stages of a run from its config. The only file that knows all stages.

Splits the config into the identity of each stage and other settings, and pins data and models to
their content, so that every cache key is known before any work. Imports no torch; modules that a
cached run does not need are imported where they are used.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from penstock.config.identity import (
    eval_identity_fields,
    identity_fields,
    part_identity,
    preference_identity,
)
from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.effect import used_part, without_unused
from penstock.config.schema.pipeline import STAGES, StageName
from penstock.config.schema.run import (
    RunConfig,
    has_target,
    is_explicitly_set,
    needs_reference,
)
from penstock.config.schema.train import TrainConfig
from penstock.core import env
from penstock.core.cache.input_digests import read_attempt
from penstock.core.cache.stage import Artifact, Source, short, stage_key
from penstock.core.cache.store import (
    Cache,
    PlannedStage,
    StageResult,
    fetch_cached,
    find_cached,
    find_complete,
    get_or_build,
)
from penstock.core.errors import ConfigError, StageError
from penstock.core.extensions import FORMATS
from penstock.core.process.timeout import Deadline
from penstock.core.remote.local_mirror import local_cache_dir
from penstock.core.remote.urls import is_url, url_join
from penstock.core.sources.local_files import detect_file_kind
from penstock.core.sources.pin import has_processor_files, pin_tokenizer
from penstock.core.sources.pin_remote import resolve_folder
from penstock.encode.settings import encode_settings
from penstock.encode.stage import Encode, no_encoding
from penstock.engine.model_source import ModelSource
from penstock.estimate.machine import (
    check_adapted_layers,
    check_hub,
    check_machine,
    check_model,
    resolve_rows_per_step,
    rows_per_step_to_pack,
    unmatched_no_decay,
    why_cannot_train,
    with_prompts_apart,
)
from penstock.estimate.media import check_media
from penstock.export.links import link_exported
from penstock.export.stage import Export, ExportSettings
from penstock.pack.stage import Pack, PackSettings
from penstock.pipeline.origins import (
    adapter_notes,
    resolve_init_checkpoint,
    resolve_model_source,
    with_adapter,
)
from penstock.pipeline.packages import split_stages, stage_order, with_package_steps
from penstock.pipeline.pins import (
    DATASET_FIELDS,
    pin_init_checkpoint,
    pin_load_checkpoint,
    pin_sources,
    resolve_dataset_types,
)
from penstock.prepare.chat_templates.resolve import resolve_chat_template
from penstock.prepare.settings import DatasetSettings, MixSettings, PrepareSettings
from penstock.prepare.stage import SLICES, Prepare
from penstock.prepare.user_prepared import (
    ExternalPrepared,
    artifacts_root,
    find_token_dataset,
    find_user_prepared,
    no_prepared_data,
    unused_settings,
    use_external,
)
from penstock.reference.settings import reference_settings
from penstock.reference.stage import Reference, no_reference
from penstock.train.launch.multi_node import DistributedStage, is_worker_node, run_worker_node
from penstock.train.stage import Train, TrainSettings

NO_SEED: int = TrainConfig.model_fields["seed"].default
"""The seed in keys of what is not random."""

BATCH = ("micro_batch_size", "gradient_accumulation_steps", "global_batch_size")


@dataclass(frozen=True)
class Plan:
    """The stages of a run, in order, each with the folder of its result."""

    run: RunConfig
    steps: tuple[PlannedStage, ...]
    notes: tuple[str, ...] = ()
    """Settings that were inferred from the data or the adapter, one per line."""
    composed: PlannedStage | None = None
    """What composed the model of a run with `model.encoders`: done, and not one of `steps`."""
    lists_push: bool = False
    """Whether push alone is wanted, with `push.dry_run`: no stage is built."""

    @property
    def used(self) -> tuple[PlannedStage, ...]:
        """The steps whose results must not be pruned while the run is going on."""
        return (self.composed, *self.steps) if self.composed else self.steps

    def step(self, name: str) -> PlannedStage:
        """The step of that stage. Raises ConfigError if the run leaves it out."""
        for step in self.steps:
            if step.stage.name == name:
                return step
        have = ", ".join(step.stage.name for step in self.steps)
        raise ConfigError(
            f"this run has no {name} stage; pipeline.stages has {have}.\n"
            f"  Add {name} to pipeline.stages (push also needs push.repo_id or push.url)."
        )


@dataclass(frozen=True)
class RebuildOptions:
    """Which stages to build again."""

    force: frozenset[str] = frozenset()
    """Stages to build again even if they are cached."""
    start: str | None = None
    """Build this stage and all after it again."""
    fresh: bool = False
    """Move another run's output folder aside instead of refusing it."""


def plan(
    run: RunConfig,
    targets: tuple[str, ...] | None = None,
    *,
    ranks: Literal["torchrun", "this_process"] = "torchrun",
    for_this_machine: bool = True,
) -> Plan:
    """The steps that lead to the stages `targets` (default: all that the run has), in order.
    Where `for_this_machine`, the precision that is not written is one that this machine computes
    in.

    Raises ConfigError or CapabilityError for settings that cannot be met.
    """
    check_hub(run)
    composed = None
    if run.model.encoders:
        from penstock.pipeline.composing import compose_step, use_composed_model

        composed = compose_step(run)
        run = use_composed_model(composed, run)
    run, notes = (run, ()) if run.data.skip_prepare_dataset else resolve_dataset_types(run)
    written, run = run, with_adapter(resolve_init_checkpoint(run))
    notes += adapter_notes(written, run)
    stage_names, package_stages = split_stages(run, targets)
    lists_push = run.push.dry_run and tuple(stage_names) == ("push",)
    if includes_stage(stage_names, "pack"):
        run, apart = with_prompts_apart(run)
        notes += apart
    steps = [user_prepared_step(run) if run.data.skip_prepare_dataset else prepare_step(run)]
    notes += tuple(unused_settings(run.data, steps[0].stage))
    steps += encode_steps(run, steps[0].artifact, stage_names)
    if includes_stage(stage_names, "pack"):
        steps.append(pack_step(run, *(step.artifact for step in steps)))
    if includes_stage(stage_names, "reference"):
        origin = resolve_model_source(run)
        training = _training_steps(run, steps, stage_names, origin, ranks)
        # A run that was begun in bfloat16 goes on in it, whatever machine it continues on.
        is_open = for_this_machine and not _is_begun(training[-1])
        if is_open and (in_float32 := float32_by_default(run)):
            run, notes = in_float32, (*notes, FLOAT32_NOTE)
            training = _training_steps(run, steps, stage_names, origin, ranks)
        steps += training
        if includes_stage(stage_names, "train"):
            notes += precision_notes(run, steps[-1])
        if find_cached(steps[-1]) is None:
            if not lists_push and (refusal := why_cannot_train(run)):
                raise refusal
            check_model(run)
            notes += unmatched_no_decay(run)
            if run.lora.missing_targets == "skip":
                notes += check_adapted_layers(run)
        if includes_stage(stage_names, "export"):
            steps.append(export_step(run, steps[-1].artifact, origin))
    if includes_stage(stage_names, "push"):
        steps.append(push_step(run, steps[-1].artifact))
    _check_media(run, steps, stage_names)
    steps = with_package_steps(run, steps, package_stages)
    return Plan(run, tuple(steps), notes, composed, lists_push)


def _check_media(
    run: RunConfig, steps: Sequence[PlannedStage], stage_names: tuple[str, ...]
) -> None:
    """Refuse images and audio that the run cannot take, unless what is made of them is there."""
    stage, *later = (step.stage for step in steps)
    media_steps = [step for step in steps if step.stage.name in ("prepare", "pack", "train")]
    if isinstance(stage, Prepare) and find_cached(media_steps[-1]) is None:
        packs, trains = bool(later), includes_stage(stage_names, "train")
        check_media(run, stage, packs=packs, trains=trains)


FLOAT32_NOTE = (
    "train: float32, as this CPU has no units for bfloat16, which is many times slower on it; "
    "train.enable_mixed_precision: true computes in it all the same"
)


PRECISION_FIELDS = ("precision", "enable_mixed_precision", "master_weights")
"""Settings of train; without any of them the precision is chosen for the machine."""


def float32_by_default(run: RunConfig) -> RunConfig | None:
    """The run in float32, if its precision is not written and this machine has no units for
    bfloat16; None for others."""
    written = any(is_explicitly_set(run, f"train.{name}") for name in PRECISION_FIELDS)
    # Features of images are stored in the precision that they are trained in.
    if run.data.encode_images or written:
        return None
    from penstock.config.rules.run import rule_violations
    from penstock.estimate.costs.device_speed import has_bfloat16_units

    changed = run.with_fields("train", enable_mixed_precision=False)
    return None if has_bfloat16_units() or any(rule_violations(changed)) else changed


def _is_begun(step: PlannedStage) -> bool:
    """Whether the step has a result, or an attempt, of its key."""
    attempt = read_attempt(step.path)
    has_attempt = attempt is not None and attempt["key"] == step.artifact.key
    return has_attempt or find_complete(step) is not None


def precision_notes(run: RunConfig, train: PlannedStage) -> tuple[str, ...]:
    """A note if training would be faster in float32, as measured on this machine."""
    if run.train.computes_in != "bfloat16" or find_cached(train) is not None:
        return ()
    from penstock.estimate.costs.device_speed import slow_bfloat16

    note = slow_bfloat16()
    return (f"train: {note}",) if note else ()


def includes_stage(stage_names: tuple[str, ...], name: str) -> bool:
    """Whether a run of the `stage_names` stages contains stage `name` or one that reads it."""
    return any(later in stage_names for later in STAGES[STAGES.index(name) :])


def execute_stage(
    step: PlannedStage, run: RunConfig, rebuild: RebuildOptions, notify: Callable[[str], None]
) -> StageResult:
    """Run one step, or reuse its result, as the config and `rebuild` say.

    Raises StageError if it takes longer than `pipeline.timeouts` allows.
    """
    name = step.stage.name
    limit = run.pipeline.timeouts.get(name)
    step = with_chosen_settings(step, notify)
    deadline = Deadline(limit)
    with deadline.enforce(
        f"{name} was ended after {limit} s (pipeline.timeouts.{name}).\n"
        f"  What it wrote is kept in {step.where}: run it again to go on, with more time if that "
        "is what it needs."
    ):
        return _execute(step, run, rebuild, notify, deadline)


def with_chosen_settings(step: PlannedStage, notify: Callable[[str], None]) -> PlannedStage:
    """The train step with the settings that suit this machine, where the config leaves them open
    and it is not cached. Requires the packed rows."""
    stage = step.stage
    if not isinstance(stage, Train) or find_cached(step):
        return step
    from penstock.estimate.costs.chosen_settings import choose_settings

    run = stage.run_config
    length = stage.packed.facts.get("row_length", {}).get("train")
    if length and run.data.sample_packing_sequence_len is None:
        run = run.with_row_length(length)
    chosen = choose_settings(run)
    if chosen.note is None:
        return step
    notify(f"train: {chosen.note}")
    return replace(step, stage=replace(stage, run_config=chosen.run, leaner=chosen.leaner))


def _execute(
    step: PlannedStage,
    run: RunConfig,
    rebuild: RebuildOptions,
    notify: Callable[[str], None],
    deadline: Deadline,
) -> StageResult:
    cache = resolve_cache(step, run, rebuild)

    def claimed(step: PlannedStage) -> None:
        # Under the step's lock: waiting for another run that holds it takes no time of the limit.
        deadline.start()
        if step.stage.name == "train":
            from penstock.train.claim import claim

            claim(step, notify, fresh=rebuild.fresh, resumes=cache == "reuse")

    if isinstance(step.stage, ExternalPrepared):
        if step.stage.name in rebuild.force:
            raise ConfigError(
                "prepare cannot be forced with data.skip_prepare_dataset: true, which takes its "
                "result as it is.\n  Leave out --force prepare, or set it to false."
            )
        outcome = use_external(step, run.pipeline.verify)
    else:
        if isinstance(step.stage, DistributedStage) and cache != "reuse":
            check_machine(run)
        if is_worker_node(step):
            outcome = run_worker_node(step, cache, notify)
        else:
            verify = run.pipeline.verify
            outcome = get_or_build(step, cache=cache, verify=verify, claim=claimed, notify=notify)
    if outcome.status not in ("cached", "skipped"):
        for line in _notices(step, run, outcome):
            notify(f"{step.stage.name}: {line}")
    if step.stage.name == "export":
        link_exported(outcome, run)
    if step.stage.name == "prepare" and run.data.push_dataset_to_hub:
        outcome = push_prepared_to_hub(step, outcome, run.data.push_dataset_to_hub, notify)
    return outcome


def _notices(step: PlannedStage, run: RunConfig, outcome: StageResult) -> Iterable[str]:
    """Log lines about a new result."""
    if step.stage.name == "prepare":
        from penstock.prepare.notices import data_warnings, long_sample_warnings

        data = run.data
        packs = includes_stage(run.stages, "pack") and not data.splits_samples
        warnings = data_warnings(outcome.facts)
        return [*warnings, *(long_sample_warnings(step.path, data.row_length) if packs else ())]
    if step.stage.name == "pack" and "row_length" in outcome.facts:
        from penstock.rows.sizing import row_length_line

        line = row_length_line(run, outcome.facts["row_length"]["train"])
        notices = [line] if line else []
        untrained = outcome.facts.get("untrained_rows", {})
        notices += (
            f"warning: {count:,} of {outcome.facts['rows'][split]:,} {split} rows have no "
            "trained token, and a step that has only such rows has no loss; penstock plan says "
            "which settings mend it"
            for split, count in untrained.items()
            if count
        )
        return notices
    return []


def push_prepared_to_hub(
    step: PlannedStage, outcome: StageResult, repo: str, notify: Callable[[str], None]
) -> StageResult:
    """Push complete prepared data to the hub. The receipt is returned with the facts but not stored
    in the manifest."""
    from penstock.push.stage import push_prepared

    receipt = push_prepared(step.artifact, repo)
    notify(f"prepare: {receipt['status']}: configuration {receipt['config']} of {repo} on the hub")
    return replace(outcome, facts={**outcome.facts, "hub": receipt})


def resolve_cache(step: PlannedStage, run: RunConfig, rebuild: RebuildOptions) -> Cache:
    """The cache mode of this step."""
    name = step.stage.name
    order = stage_order(run)
    if rebuild.start in order and order.index(name) >= order.index(rebuild.start):
        return "refresh"
    if name in rebuild.force:
        return "refresh"
    return run.pipeline.cache


def require_upstream(plan: Plan, name: str) -> None:
    """Raise StageError if an input of stage `name` is missing, ArtifactError if one is damaged."""
    for step in plan.steps:
        if step.stage.name == name:
            return
        if fetch_cached(step, plan.run.pipeline.verify) is None:
            raise StageError(
                f"{name} needs {step.stage.name} {short(stage_key(step.stage))}, which is not in "
                f"{step.where}.\n"
                f"  Leave out --no-upstream, or run penstock {step.stage.name} first."
            )


def prepare_step(run: RunConfig) -> PlannedStage:
    """The prepare step: tokenizes the data."""
    data = without_unused(run).data
    root = data.dataset_prepared_path
    tokenizer = pin_tokenizer(run.model.tokenizer_source)
    sources = {field: pin_sources(run, field) for field in DATASET_FIELDS}
    settings = PrepareSettings(
        **{field: _read_settings(run, field, pins, tokenizer) for field, pins in sources.items()},
        mix=tuple(_mix(d) for d in data.datasets),
        test_mix=tuple(_mix(d) for d in data.test_datasets),
        mix_strategy=data.mix_strategy,
        weight_unit=data.weight_unit,
        samples_per_epoch=data.samples_per_epoch,
        epochs=math.ceil(run.train.num_train_epochs) if data.mix_strategy == "random" else 1,
        deduplicate=data.deduplicate,
        near_duplicate_threshold=data.near_duplicate_threshold,
        decontaminate_ngram=data.decontaminate_ngram,
        select_columns=tuple(data.select_columns) if data.select_columns else None,
        val_set_size=data.val_set_size,
        split_by=data.split_by,
        shuffle_merged_datasets=data.shuffle_merged_datasets,
        shuffle_before_merging_datasets=data.shuffle_before_merging_datasets,
        num_dataset_shards_to_save=data.num_dataset_shards_to_save,
        bad_rows_allowed=data.bad_rows_allowed,
        seed=run.train.seed if data.draws_samples else NO_SEED,
    )
    if has_processor_files(tokenizer):
        sources = {field: _pin_images(run, field, sources[field], settings) for field in sources}
    stage = Prepare(
        settings=settings,
        sources=sources["datasets"],
        test_sources=sources["test_datasets"],
        decontaminate_sources=sources["decontaminate_datasets"],
        tokenizer=tokenizer,
        tokenizer_path=resolve_folder(run.model.tokenizer_source, tokenizer),
        slices_url=url_join(root, SLICES) if is_url(root) else None,
        num_proc=data.dataset_num_proc or env.num_processors(),
        hub_token=data.hf_use_auth_token,
    )
    return PlannedStage.in_root(stage, root)


def _read_settings(
    run: RunConfig, field: str, sources: Sequence[Source], tokenizer: Source
) -> tuple[DatasetSettings, ...]:
    """Settings of the data sets in a field of the section `data`, without those that say what the
    names of the pinned files do, and without those of images if the model takes none. One that is
    not read has none: it only keeps its place, by which the others are shuffled."""
    unread = {} if has_processor_files(tokenizer) else {"allow_private_urls": False}
    all_settings: list[DatasetSettings] = []
    for dataset, source in zip(getattr(run.data, field), sources, strict=True):
        if not dataset.is_read:
            all_settings.append(DatasetSettings())
            continue
        settings = dataset_settings(run, dataset, "train" if field == "datasets" else "test")
        kinds = {detect_file_kind(str(file["name"])) for file in source.pin.get("files", ())}
        implied = {"ds_type": None} if kinds <= {settings.ds_type} else {}
        all_settings.append(settings.model_copy(update={**implied, **unread}))
    return tuple(all_settings)


def _pin_images(
    run: RunConfig, field: str, sources: Sequence[Source], settings: PrepareSettings
) -> tuple[Source, ...]:
    """The sources in a field of the section `data`, with the images that they name by path."""
    from penstock.prepare.readers.image_pins import with_image_pin

    datasets: tuple[DatasetSettings, ...] = getattr(settings, field)
    return tuple(
        with_image_pin(source, dataset, settings.select_columns, run.data.hf_use_auth_token)
        for source, dataset in zip(sources, datasets, strict=True)
    )


def user_prepared_step(run: RunConfig) -> PlannedStage:
    """The step for existing prepared data with data.skip_prepare_dataset.

    Tokens that another program has written are converted to slices without tokenizing.
    """
    folder = Path(run.data.dataset_prepared_path)
    if tokens := find_token_dataset(folder):
        return prepare_step(_with_sources(run, tokens))
    tokenizer = pin_tokenizer(run.model.tokenizer_source)
    step = find_user_prepared(
        folder, lambda: stage_key(prepare_step(run).stage), tokenizer, Prepare.version
    )
    if step is None:
        raise no_prepared_data(folder)
    return step


def encode_steps(
    run: RunConfig, prepared: Artifact, stage_names: tuple[StageName, ...]
) -> list[PlannedStage]:
    """The encode step, which computes the features of all images with the frozen vision tower; none
    where no images are encoded. Raises ConfigError if it is wanted nevertheless."""
    if not run.data.encode_images:
        if "encode" in stage_names:
            raise no_encoding()
        return []
    if not includes_stage(stage_names, "encode"):
        return []
    if pin_init_checkpoint(run) is not None:
        raise ConfigError(
            "data.encode_images is true, and the vision tower of train.init_checkpoint_path may be "
            "another than that of model.model_path.\n"
            "  Export the checkpoint and write its folder, or write encode_images: false."
        )
    root = data_root(run)
    stage = Encode(
        settings=encode_settings(run),
        prepared=prepared,
        origin=resolve_model_source(run),
        run_config=run,
        root=local_cache_dir(root),
    )
    return [PlannedStage.in_root(stage, root)]


def _training_steps(
    run: RunConfig,
    earlier: Sequence[PlannedStage],
    stage_names: tuple[StageName, ...],
    origin: ModelSource,
    ranks: Literal["torchrun", "this_process"],
) -> list[PlannedStage]:
    """The reference and train steps, as far as they are wanted. Raises ConfigError for a reference
    step that the run does not have."""
    prepared, packed = earlier[0].artifact, earlier[-1].artifact
    steps: list[PlannedStage] = []
    if needs_reference(run):
        steps.append(reference_step(run, packed, origin, ranks))
    elif "reference" in stage_names:
        raise no_reference(run)
    if includes_stage(stage_names, "train"):
        reference = steps[-1].artifact if steps else None
        steps.append(train_step(run, packed, origin, ranks, prepared, reference))
    return steps


def pack_step(run: RunConfig, prepared: Artifact, encoded: Artifact | None = None) -> PlannedStage:
    """The pack step: packs tokenized samples into rows; `encoded` has the features of their
    images."""
    data = without_unused(run).data
    sizes: dict[str, Any] = {"row_length": "written"}
    if data.sample_packing_sequence_len is None:
        sizes = {
            "row_length": "fitted",
            "row_multiple": data.pad_to_multiple_of,
            "rows_per_step": rows_per_step_to_pack(run),
        }
    settings = PackSettings(
        sample_packing_method=data.packing_method,
        sample_packing_sequence_len=data.row_length,
        **sizes,
        sample_packing_group_size=data.sample_packing_group_size,
        eval_sample_packing=data.eval_sample_packing is not False,
        num_shards=data.num_dataset_shards_to_save,
        seed=run.train.seed if data.packing_method == "multipack" else NO_SEED,
        share_prompts=data.share_prompts is not False,
        **_kl_pairing(run),
    )
    stage = Pack(
        settings=settings,
        prepared=prepared,
        encoded=encoded,
        num_proc=data.dataset_num_proc or env.num_processors(),
        start_method=data.sample_packing_mp_start_method or "spawn",
    )
    return PlannedStage.in_root(stage, data_root(run))


def _kl_pairing(run: RunConfig) -> dict[str, Any]:
    """How KTO samples are paired to estimate the KL divergence; empty for other data."""
    entries = [*run.data.read_datasets, *run.data.test_datasets]
    if all(entry.kind != "kto" for entry in entries):
        return {}
    limits = [entry.max_seq_len for entry in entries if entry.max_seq_len is not None]
    return {
        "kl_pairing": run.preference.kl_pairing,
        "kl_rotation_size": run.preference.kl_rotation_size,
        "kl_max_len": max(limits, default=None),
    }


def reference_step(
    run: RunConfig,
    packed: Artifact,
    origin: ModelSource,
    ranks: Literal["torchrun", "this_process"],
) -> PlannedStage:
    """The reference step: computes log-probs of packed completions under the reference model."""
    root = data_root(run)
    initial = pin_init_checkpoint(run)
    stage = Reference(
        settings=reference_settings(
            run,
            origin,
            # With LoRA a checkpoint has the adapter.
            has_adapter=run.lora.enable_lora and bool(origin.adapter or initial),
        ),
        packed=packed,
        origin=origin,
        run_config=run,
        root=local_cache_dir(root),
        ranks=ranks,
        initial=initial,
    )
    return PlannedStage.in_root(stage, root)


def data_root(run: RunConfig) -> str:
    """The root folder of results that are made of data, or of data and a model."""
    root = run.data.dataset_prepared_path
    return str(artifacts_root(Path(root))) if run.data.skip_prepare_dataset else root


def train_step(
    run: RunConfig,
    packed: Artifact,
    origin: ModelSource,
    ranks: Literal["torchrun", "this_process"],
    prepared: Artifact,
    reference: Artifact | None,
) -> PlannedStage:
    """The train step: trains on packed rows and writes checkpoints."""
    data = without_unused(run).data
    settings = TrainSettings(
        model=identity_fields(run, "model"),
        train=identity_fields(run, "train"),
        lora=identity_fields(run, "lora") if run.lora.enable_lora else {},
        rows_per_step=resolve_rows_per_step(_with_keyed_batch(run)),
        last_batch=data.last_batch,
        isolate_samples=data.isolate_samples,
        judging=eval_identity_fields(run),
        preference=preference_identity(run),
        layer_versions=dict(origin.layer_versions),
        parts=part_identity(run),
    )
    stage = Train(
        settings=settings,
        packed=packed,
        origin=origin,
        checkpoint=pin_load_checkpoint(run),
        run_config=run,
        ranks=ranks,
        prepared=prepared,
        initial=pin_init_checkpoint(run),
        reference=reference,
    )
    typed = run.train.output_dir
    return PlannedStage(stage, local_cache_dir(typed), typed if is_url(typed) else None)


def _with_keyed_batch(run: RunConfig) -> RunConfig:
    """The run with the default batch where it decides no result: an evaluation's, unless it is of a
    number of batches that have as many rows."""
    train = run.train
    if not train.eval_only or (train.counts_batches and train.eval_rows_per_batch is None):
        return run
    return run.with_fields(
        "train", **{name: TrainConfig.model_fields[name].default for name in BATCH}
    )


def export_step(run: RunConfig, trained: Artifact, origin: ModelSource) -> PlannedStage:
    """The export step: writes the checkpoint as a Hugging Face folder. Raises ConfigError if the
    run trains nothing."""
    if run.train.eval_only:
        raise ConfigError(
            "train.eval_only is true, so nothing is trained, and there is nothing to export.\n"
            "  Leave eval_only out, or end with penstock train."
        )
    export = run.export
    stage = Export(
        settings=ExportSettings(
            format=export.format,
            dtype=export.dtype,
            max_shard_bytes=export.max_shard_bytes,
            merge_lora=export.merge_lora and not run.lora.save_lora_only,
            quantise=export.quantise,
            mtp=export.mtp,
            model_card=export.model_card,
        ),
        trained=trained,
        origin=origin,
        verify=export.verify,
    )
    return PlannedStage.in_root(stage, run.pipeline.artifacts_path)


def push_step(run: RunConfig, exported: Artifact) -> PlannedStage:
    """The push step: uploads the exported folder to the hub or copies it to a URL."""
    push = run.push
    if not has_target(run):
        raise ConfigError("push has nowhere to go.\n  Write push.repo_id or push.url.")
    from penstock.push.stage import Push, PushSettings

    settings = PushSettings(**push.model_dump())
    return PlannedStage.in_root(
        Push(settings=settings, exported=exported), run.pipeline.artifacts_path
    )


def _with_sources(run: RunConfig, tokens: DatasetConfig) -> RunConfig:
    """The run with `tokens` in place of its own sources. Raises ConfigError for test_datasets."""
    if run.data.test_datasets:
        raise ConfigError(
            f"data.test_datasets cannot be separated from the training data in {tokens.path}, "
            "which another program has written.\n  Write data.val_set_size in its place, or set "
            "data.skip_prepare_dataset to false and name both as sources."
        )
    return run.with_fields("data", datasets=[tokens])


def dataset_settings(
    run: RunConfig, dataset: DatasetConfig, role: Literal["train", "test"]
) -> DatasetSettings:
    """The fields of the data set, and those of the section `data` that decide its samples, without
    those that have no effect on them."""
    alone = run.with_fields("data", datasets=[dataset], test_datasets=[], decontaminate_datasets=[])
    data = used_part(alone.data, alone)
    [dataset] = data.datasets
    shared = set(DatasetSettings.model_fields)
    if role == "test":
        shared -= {"dataset_shard_num", "dataset_shard_idx"}
    values = {**data.model_dump(include=shared), **dataset.model_dump(), "type": dataset.format}
    values["part"] = FORMATS.record(dataset.format, dataset.type_kwargs)
    # The exported tokenizer has it whatever the data is, so it is no field without effect.
    template = resolve_chat_template(data)
    values["chat_template"] = None if dataset.type in ("text", "tokenized") else template
    if dataset.splits_string is not None:
        values["document_split"] = (dataset.splits_string, dataset.split or "train")
    return DatasetSettings(**{n: v for n, v in values.items() if n in DatasetSettings.model_fields})


def _mix(dataset: DatasetConfig) -> MixSettings:
    if not dataset.is_read:
        return MixSettings(weight=0)
    return MixSettings(
        weight=dataset.weight,
        max_samples=dataset.max_samples,
        loss_weight=dataset.loss_weight,
    )
