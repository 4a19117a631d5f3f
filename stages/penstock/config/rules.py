"""Combinations of settings that cannot be honoured, each with the reason and what to write instead.

A rule reads a run whose single values are all valid, and yields faults. What depends on the number
of ranks or on a device is judged later, where those are known.
"""

from collections.abc import Callable

from penstock.config.data_rules import DATA_RULES, Faults
from penstock.config.faults import Fault
from penstock.config.layout_rules import LAYOUT_RULES
from penstock.config.pipeline import STAGES
from penstock.config.run import RunConfig, has_target, written
from penstock.core.urls import is_url


def broken(run: RunConfig) -> Faults:
    """Every impossible combination in the run."""
    for rule in RULES:
        yield from rule(run)


def _a_model_is_named(run: RunConfig) -> Faults:
    if run.model.model_path is None and run.model.config_path is None:
        yield Fault(
            ("model", "model_path"),
            "no model is named; write model_path (weights to start from), "
            "or config_path for random weights",
            ("model.config_path",),
        )


def _batches_agree(run: RunConfig) -> Faults:
    train = run.train
    if train.global_batch_size is None:
        return
    unit, words = train.micro_batch_size, f"micro_batch_size ({train.micro_batch_size})"
    if written(run, "train.gradient_accumulation_steps"):
        unit *= train.gradient_accumulation_steps
        words += f" x gradient_accumulation_steps ({train.gradient_accumulation_steps})"
    if train.global_batch_size % unit:
        yield Fault(
            ("train", "global_batch_size"),
            f"{train.global_batch_size} rows cannot be made of whole {words};"
            f" write a multiple of {unit}, or leave gradient_accumulation_steps out",
            ("train.micro_batch_size", "train.gradient_accumulation_steps"),
        )


def _fsdp2_starts_on_meta(run: RunConfig) -> Faults:
    device = run.train.init_device
    if run.train.data_parallel_mode == "fsdp2" and device not in (None, "meta"):
        yield Fault(
            ("train", "init_device"),
            f"data_parallel_mode: fsdp2 cannot start from {device}, where every rank would hold the"
            " whole model; write init_device: meta or leave it out",
            ("train.data_parallel_mode",),
        )


def _decay_falls(run: RunConfig) -> Faults:
    train = run.train
    if train.lr_decay_style != "constant" and train.lr_min > train.lr:
        yield Fault(
            ("train", "lr_min"),
            f"the {train.lr_decay_style} decay would rise from lr ({train.lr:g}) to lr_min"
            f" ({train.lr_min:g}); write an lr_min of at most {train.lr:g}",
            ("train.lr", "train.lr_decay_style"),
        )


def _warmup_ends_before_decay(run: RunConfig) -> Faults:
    train = run.train
    decays = train.lr_decay_style != "constant"
    if decays and train.lr_warmup_ratio > train.lr_decay_ratio:
        yield Fault(
            ("train", "lr_warmup_ratio"),
            f"the warmup ends at {train.lr_warmup_ratio:g} of all steps, after the decay's end"
            f" (lr_decay_ratio {train.lr_decay_ratio:g}); write a smaller lr_warmup_ratio",
            ("train.lr_decay_ratio", "train.lr_decay_style"),
        )


def _recomputing_is_on(run: RunConfig) -> Faults:
    train = run.train
    if train.recompute_modules is not None and not train.enable_gradient_checkpointing:
        yield Fault(
            ("train", "recompute_modules"),
            "nothing is recomputed with enable_gradient_checkpointing: false;"
            " set it to true or leave recompute_modules out",
            ("train.enable_gradient_checkpointing",),
        )


def _adapters_are_on(run: RunConfig) -> Faults:
    if run.lora.save_lora_only and not run.lora.enable_lora:
        yield Fault(
            ("lora", "save_lora_only"),
            "there is no adapter to save with enable_lora: false;"
            " write enable_lora: true or leave save_lora_only out",
            ("lora.enable_lora",),
        )


def _stages_are_a_chain(run: RunConfig) -> Faults:
    stages, path = run.pipeline.stages, ("pipeline", "stages")
    twice = [stage for stage in STAGES if stages.count(stage) > 1]
    if twice:
        yield Fault(path, f"{' and '.join(twice)} is listed more than once; list each stage once")
        return
    ordered = [stage for stage in STAGES if stage in stages]
    if stages != ordered:
        yield Fault(path, f"the stages are out of order; write [{', '.join(ordered)}]")
        return
    whole = STAGES[STAGES.index(ordered[0]) : STAGES.index(ordered[-1]) + 1]
    missing = [stage for stage in whole if stage not in stages]
    if missing:
        after = STAGES[STAGES.index(missing[-1]) + 1]
        yield Fault(
            path,
            f"{after} needs {missing[-1]}, which is left out; write [{', '.join(whole)}]"
            " (what is already there is reused)",
        )


def _push_has_one_target(run: RunConfig) -> Faults:
    push = run.push
    if push.repo_id is not None and push.url is not None:
        yield Fault(
            ("push", "url"),
            "repo_id is given too, and a push has one target; leave one of the two out",
            ("push.repo_id",),
        )
    elif "push" in run.pipeline.stages and not has_target(run):
        yield Fault(
            ("pipeline", "stages"),
            "push is listed but has no target; write push.repo_id (your-name/my-model) or push.url",
            ("push.repo_id", "push.url"),
        )
    if push.url is not None and push.repo_id is None:
        for name in ("revision", "create_pr"):
            if getattr(push, name):
                yield Fault(
                    ("push", name),
                    f"only a hub repository has one, and url is a plain folder; leave {name} out",
                    ("push.url", "push.repo_id"),
                )


def _machines_can_meet(run: RunConfig) -> Faults:
    launch = run.launch
    if launch.node_rank >= launch.nnodes:
        yield Fault(
            ("launch", "node_rank"),
            f"{launch.node_rank} is none of {launch.nnodes} machine(s), which are counted from 0;"
            f" write at most {launch.nnodes - 1}, or raise nnodes",
            ("launch.nnodes",),
        )
    if launch.nnodes > 1 and launch.rdzv_endpoint is None:
        yield Fault(
            ("launch", "rdzv_endpoint"),
            f"{launch.nnodes} machines need a place to meet;"
            " write rdzv_endpoint: HOST:29500 with the name of the first machine",
            ("launch.nnodes",),
        )


def _nodes_share_a_folder(run: RunConfig) -> Faults:
    if run.launch.nnodes > 1 and is_url(run.train.output_dir):
        yield Fault(
            ("train", "output_dir"),
            f"is a URL, and {run.launch.nnodes} machines write their parts of a checkpoint into one"
            " folder; write a folder on a file system they share",
            ("launch.nnodes",),
        )


def _given_data_lies_here(run: RunConfig) -> Faults:
    if run.data.skip_prepare_dataset and is_url(run.data.dataset_prepared_path):
        yield Fault(
            ("data", "skip_prepare_dataset"),
            "takes what lies in a folder of this machine, and dataset_prepared_path is a URL; set"
            " it to false: prepared data there is found by its key and reused",
            ("data.dataset_prepared_path",),
        )


RULES: tuple[Callable[[RunConfig], Faults], ...] = (
    _a_model_is_named,
    *DATA_RULES,
    _batches_agree,
    _fsdp2_starts_on_meta,
    *LAYOUT_RULES,
    _decay_falls,
    _warmup_ends_before_decay,
    _recomputing_is_on,
    _adapters_are_on,
    _stages_are_a_chain,
    _push_has_one_target,
    _machines_can_meet,
    _nodes_share_a_folder,
    _given_data_lies_here,
)
