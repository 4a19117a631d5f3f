"""One run config -> the stages, in order. The only file that knows all stages.

A pure projection: it parts the config into each stage's identity and the rest, pins outside data to
its content, and so knows every key before any work starts. No torch is imported.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from penstock.config.run import RunConfig, has_target
from penstock.core import env
from penstock.core.errors import CapabilityError, ConfigError, StageError
from penstock.core.source import pin_checkpoint, pin_config, pin_data, pin_model, pin_tokenizer
from penstock.core.stage import Artifact, Source, key_of, short
from penstock.core.store import Cache, Outcome, Step, find, realize
from penstock.engine.origin import Origin
from penstock.engine.parallel.degrees import accumulation_steps, degrees_of, rows_per_step
from penstock.export.stage import Export, ExportSettings
from penstock.identity import IDENTITY
from penstock.pack.stage import Pack, PackSettings
from penstock.prepare.settings import DatasetSettings, PrepareSettings
from penstock.prepare.stage import Prepare
from penstock.push.stage import Push, PushSettings
from penstock.train.stage import Train, TrainSettings, claim
from penstock.train.torchrun import num_local_ranks

StageName = Literal["prepare", "pack", "train", "export", "push"]


@dataclass(frozen=True)
class Plan:
    """Every stage of a run with the folder of its result, in order."""

    run: RunConfig
    steps: tuple[Step, ...]

    def step(self, name: str) -> Step:
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
class Wishes:
    """What the command line says about building again."""

    force: frozenset[str] = frozenset()
    """Stages to build again even if they are there."""
    start: str | None = None
    """Build this stage and all after it again."""
    fresh: bool = False
    """Move another run's output folder aside instead of refusing it."""


def plan(
    run: RunConfig,
    wanted: tuple[StageName, ...] | None = None,
    *,
    ranks: Literal["torchrun", "this_process"] = "torchrun",
) -> Plan:
    """The steps that lead to the `wanted` stages (default: those the run lists), in order.

    Raises ConfigError or CapabilityError for what cannot be honoured.
    """
    check_machine(run)
    wanted = wanted or run.stages
    steps = [prepare_step(run)]
    if needs(wanted, "pack"):
        steps.append(pack_step(run, steps[0].artifact))
    if needs(wanted, "train"):
        origin = origin_of(run)
        steps.append(train_step(run, steps[1].artifact, origin, ranks))
        if needs(wanted, "export"):
            steps.append(export_step(run, steps[2].artifact, origin))
    if needs(wanted, "push"):
        steps.append(push_step(run, steps[3].artifact))
    return Plan(run, tuple(steps))


ORDER: tuple[StageName, ...] = ("prepare", "pack", "train", "export", "push")


def needs(wanted: tuple[str, ...], name: str) -> bool:
    """Whether a run of the `wanted` stages contains stage `name` or one that reads it."""
    return any(later in wanted for later in ORDER[ORDER.index(name) :])


def bring_up(step: Step, run: RunConfig, wishes: Wishes, notify: Callable[[str], None]) -> Outcome:
    """Realise one step as the run and the command line wish."""

    def claimed(step: Step) -> None:
        if step.stage.name == "train":
            claim(step, fresh=wishes.fresh)

    outcome = realize(step, cache=cache_for(step, run, wishes), claim=claimed, notify=notify)
    if step.stage.name == "export":
        link_exported(outcome, run)
    return outcome


def cache_for(step: Step, run: RunConfig, wishes: Wishes) -> Cache:
    """How this step treats what is already there."""
    name = step.stage.name
    started = wishes.start is not None and ORDER.index(name) >= ORDER.index(wishes.start)
    if name in wishes.force or started:
        return "refresh"
    return run.pipeline.cache


def require_upstream(plan: Plan, name: str) -> None:
    """Raise StageError unless everything stage `name` reads is there."""
    for step in plan.steps:
        if step.stage.name == name:
            return
        if find(step) is None:
            raise StageError(
                f"{name} needs {step.stage.name} {short(key_of(step.stage))}, which is not in "
                f"{step.path}.\n  Leave out --no-upstream, or run penstock {step.stage.name} first."
            )


def link_exported(outcome: Outcome, run: RunConfig) -> None:
    """Let `<output_dir>/hf` (and `adapter`) lead to what was exported last."""
    for name in ("hf", "adapter"):
        link = Path(run.train.output_dir) / name
        target = outcome.path / name
        if link.exists() and not link.is_symlink():
            raise StageError(
                f"{link} is in the way: it is not a link of ours.\n"
                "  Move it elsewhere and run again."
            )
        wanted = target.resolve() if target.is_dir() else None
        if link.is_symlink() and (wanted is None or link.resolve() != wanted):
            link.unlink()
        if wanted and not link.is_symlink():
            link.symlink_to(wanted)


def world_size(run: RunConfig) -> int:
    """Processes that will train: torchrun's, where it runs already, else what `launch` asks for."""
    started = env.rank_variables()
    return started[2] if started else num_local_ranks(run) * run.launch.nnodes


def check_machine(run: RunConfig) -> None:
    """Refuse, before any work, what this machine cannot do or this world cannot be cut into."""
    gpus = env.num_gpus()
    if not gpus and run.model.attn_implementation == "native":
        raise CapabilityError(
            "model.attn_implementation is native, which needs a CUDA device, and there is none.\n"
            "  Write sdpa, or leave it out to get the best there is."
        )
    if not gpus and run.train.init_device == "cuda":
        raise CapabilityError(
            "train.init_device is cuda, and there is no CUDA device.\n"
            "  Write cpu, or leave it out: weights are then made where they are needed."
        )
    asked = run.launch.nproc_per_node
    if gpus and asked != "auto" and asked > gpus:
        raise CapabilityError(
            f"launch.nproc_per_node is {asked}, and {gpus} CUDA devices are visible.\n"
            f"  Write {gpus} or auto."
        )
    degrees = degrees_of(run.train, world_size(run))
    accumulation_steps(run.train, degrees.num_replicas)


def prepare_step(run: RunConfig) -> Step:
    """Data and tokenizer in, tokenised slices out."""
    data = run.data
    stage = Prepare(
        settings=PrepareSettings(
            datasets=tuple(_dataset(d) for d in data.datasets),
            test_datasets=tuple(_dataset(d) for d in data.test_datasets),
            select_columns=tuple(data.select_columns) if data.select_columns else None,
            val_set_size=data.val_set_size,
            shuffle_merged_datasets=data.shuffle_merged_datasets,
            shuffle_before_merging_datasets=data.shuffle_before_merging_datasets,
            num_dataset_shards_to_save=data.num_dataset_shards_to_save,
            bad_rows_allowed=data.bad_rows_allowed,
            seed=run.train.seed,
        ),
        sources=tuple(_pin(d) for d in data.datasets),
        test_sources=tuple(_pin(d) for d in data.test_datasets),
        tokenizer=pin_tokenizer(run.model.tokenizer_source),
        tokenizer_path=run.model.tokenizer_source,
        num_proc=data.dataset_num_proc or env.num_processors(),
    )
    return _keyed(stage, Path(data.dataset_prepared_path))


def pack_step(run: RunConfig, prepared: Artifact) -> Step:
    """Tokenised slices in, packed rows out."""
    data = run.data
    method = "sequential" if data.sample_packing_sequentially else data.sample_packing_method
    settings = PackSettings(
        sample_packing_method=method,
        sample_packing_sequence_len=data.sample_packing_sequence_len,
        sample_packing_group_size=data.sample_packing_group_size,
        eval_sample_packing=data.eval_sample_packing is not False,
        num_shards=data.num_dataset_shards_to_save,
        seed=run.train.seed,
    )
    return _keyed(Pack(settings=settings, prepared=prepared), Path(data.dataset_prepared_path))


def train_step(
    run: RunConfig,
    packed: Artifact,
    origin: Origin,
    ranks: Literal["torchrun", "this_process"],
) -> Step:
    """Packed rows in, a checkpoint out."""
    degrees = degrees_of(run.train, world_size(run))
    settings = TrainSettings(
        model=_project(run, "model"),
        train=_project(run, "train"),
        lora=_project(run, "lora") if run.lora.enable_lora else {},
        rows_per_step=rows_per_step(run.train, degrees.num_replicas),
        last_batch="drop" if run.data.dataloader_drop_last else "keep",
    )
    stage = Train(
        settings=settings,
        packed=packed,
        origin=origin,
        checkpoint=_pin_checkpoint(run),
        run_config=run,
        ranks=ranks,
    )
    return Step(stage, Path(run.train.output_dir))


def export_step(run: RunConfig, trained: Artifact, origin: Origin) -> Step:
    """A checkpoint in, a Hugging Face folder out."""
    export = run.export
    stage = Export(
        settings=ExportSettings(
            format=export.format,
            dtype=export.dtype,
            max_shard_bytes=export.max_shard_bytes,
            merge_lora=export.merge_lora and not run.lora.save_lora_only,
        ),
        trained=trained,
        origin=origin,
    )
    return _keyed(stage, Path(run.pipeline.artifacts_path))


def push_step(run: RunConfig, exported: Artifact) -> Step:
    """A Hugging Face folder in, a repository or a copy out."""
    push = run.push
    if not has_target(run):
        raise ConfigError("push has nowhere to go.\n  Write push.repo_id or push.url.")
    settings = PushSettings(**push.model_dump())
    return _keyed(Push(settings=settings, exported=exported), Path(run.pipeline.artifacts_path))


def origin_of(run: RunConfig) -> Origin:
    """The base model, its tokenizer, and what was made of them."""
    model = run.model
    return Origin(
        config=pin_config(model.config_source),
        config_path=model.config_source,
        weights=pin_model(model.model_path) if model.model_path else None,
        model_path=model.model_path,
        tokenizer=pin_tokenizer(model.tokenizer_source),
        tokenizer_path=model.tokenizer_source,
        foundation=model.foundation,
        seed=run.train.seed,
        lora_alpha=run.lora.lora_alpha if run.lora.enable_lora else None,
    )


def _keyed(stage: Any, root: Path) -> Step:
    return Step(stage, root / stage.name / short(key_of(stage)))


def _project(run: RunConfig, section: str) -> dict[str, Any]:
    values = getattr(run, section).model_dump(mode="json")
    return {name: values[name] for name in sorted(IDENTITY[section])}


def _dataset(dataset: Any) -> DatasetSettings:
    names = DatasetSettings.model_fields
    return DatasetSettings(**{n: v for n, v in dataset.model_dump().items() if n in names})


def _pin(dataset: Any) -> Source:
    return pin_data(
        dataset.path,
        name=dataset.name,
        split=dataset.split,
        revision=dataset.revision,
        data_files=dataset.data_files,
        ds_type=dataset.ds_type,
    )


def _pin_checkpoint(run: RunConfig) -> Source | None:
    path = run.train.load_checkpoint_path
    return None if path in (None, "auto") else pin_checkpoint(path)
