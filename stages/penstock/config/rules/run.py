"""Invalid combinations of settings, each with the reason and what to write instead.

A rule is a function of a run whose single values are all valid; it yields `ConfigIssue`s. What
depends on the number of ranks or on a device is checked later, where these are known.
"""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

from penstock.config.loading.fault import ConfigIssue, Issues, dotted
from penstock.config.rules.data import DATA_RULES, TEST, TRAIN, iter_datasets
from penstock.config.rules.effect import check_declared
from penstock.config.rules.extensions import check_fields_of_ours, check_options, check_reads
from penstock.config.rules.objective import OBJECTIVE_RULES
from penstock.config.rules.optimizer import OPTIM_RULES
from penstock.config.rules.parallelism import LAYOUT_RULES
from penstock.config.schema.pipeline import DEFAULT_STAGES, STAGES
from penstock.config.schema.run import RunConfig, has_target, needs_reference
from penstock.core.remote.urls import is_url

# Prefix of models that ship with the code, without weights.
BUILT_IN = "builtin:"

# Stages that are added where a run needs them.
ADDED = ("encode", "reference")


def rule_violations(run: RunConfig) -> Issues:
    """All invalid combinations in the run."""
    for rule in RULES:
        yield from rule(run)


def _check_model(run: RunConfig) -> Issues:
    path = run.model.model_path
    if path is None and run.model.config_path is None:
        yield ConfigIssue(
            ("model", "model_path"),
            "is not set; write model_path (pre-trained weights), or config_path for random weights",
            ("model.config_path",),
        )
    elif path and path.startswith(BUILT_IN):
        yield ConfigIssue(
            ("model", "model_path"),
            f"is {path}, which has no weights; write it as config_path, for random weights",
            ("model.config_path",),
        )
    for kind, encoder in run.model.encoders.items():
        if kind != "image":
            yield ConfigIssue(
                ("model", "encoders", kind),
                f"no architecture joins a new encoder of {kind} to a text model; leave {kind} out,"
                f" and write a model that has one as model_path (penstock models lists them)",
            )
        elif encoder.model_path is None and encoder.config_path is None:
            yield ConfigIssue(
                ("model", "encoders", kind),
                "names no vision model; write model_path (pre-trained weights), or config_path for"
                " random weights",
            )


def _check_global_batch_size(run: RunConfig) -> Issues:
    train = run.train
    if train.global_batch_size is None:
        return
    unit, unit_text = train.rows_at_once, f"micro_batch_size ({train.micro_batch_size})"
    steps = train.is_non_default("gradient_accumulation_steps")
    if steps:
        unit *= train.gradient_accumulation_steps
        unit_text += f" x gradient_accumulation_steps ({train.gradient_accumulation_steps})"
    if train.global_batch_size % unit:
        yield ConfigIssue(
            ("train", "global_batch_size"),
            f"{train.global_batch_size} packed sequences are not a multiple of {unit_text};"
            f" write a multiple of {unit}{', or leave gradient_accumulation_steps out' * steps}",
            ("train.micro_batch_size", "train.gradient_accumulation_steps"),
        )


def _check_merged_export(run: RunConfig) -> Issues:
    kind, lora = run.export.quantise, run.lora
    if not lora.enable_lora:
        return
    if run.export.mtp == "drop" and (not run.export.merge_lora or lora.save_lora_only):
        field = "lora.save_lora_only" if lora.save_lora_only else "export.merge_lora"
        yield ConfigIssue(
            ("export", "mtp"),
            f"drops layers of the merged model, which {field} does not export; leave one of the"
            " two out",
            (field,),
        )
    if kind is None:
        return
    for is_apart, field, value in (
        (not run.export.merge_lora, "export.merge_lora", "false"),
        (lora.save_lora_only, "lora.save_lora_only", "true"),
    ):
        if is_apart:
            yield ConfigIssue(
                ("export", "quantise"),
                f"{kind} quantizes the merged model, which {field}: {value} does not export;"
                " leave one of the two out",
                (field,),
            )


def _check_stages(run: RunConfig) -> Issues:
    stages, path = run.pipeline.stages or list(DEFAULT_STAGES), ("pipeline", "stages")
    twice = [stage for stage in STAGES if stages.count(stage) > 1]
    if twice:
        yield ConfigIssue(
            path, f"{' and '.join(twice)} is listed more than once; list each stage once"
        )
        return
    ordered = [stage for stage in STAGES if stage in stages]
    if stages != ordered:
        yield ConfigIssue(path, f"the stages are out of order; write [{', '.join(ordered)}]")
        return
    if "reference" in stages and not needs_reference(run):
        yield ConfigIssue(
            path,
            "the loss uses no reference model; leave reference out",
            ("train.objective", "preference"),
        )
    if "encode" in stages and not run.data.encode_images:
        yield ConfigIssue(
            path,
            "data.encode_images is false; leave encode out, or write encode_images: true",
            ("data.encode_images",),
        )
    span = STAGES[STAGES.index(ordered[0]) : STAGES.index(ordered[-1]) + 1]
    span = tuple(stage for stage in span if stage in stages or stage not in ADDED)
    missing = [stage for stage in span if stage not in stages]
    if missing:
        after = span[span.index(missing[-1]) + 1]
        yield ConfigIssue(
            path,
            f"{after} needs {missing[-1]}, which is left out; write [{', '.join(span)}]"
            " (existing results are reused)",
        )


def _check_push(run: RunConfig) -> Issues:
    if "push" in (run.pipeline.stages or ()) and not has_target(run):
        yield ConfigIssue(
            ("pipeline", "stages"),
            "push is listed but has no target; write push.repo_id (your-name/my-model) or push.url",
            ("push.repo_id", "push.url"),
        )


def _check_nodes(run: RunConfig) -> Issues:
    launch = run.launch
    if launch.node_rank >= launch.nnodes:
        yield ConfigIssue(
            ("launch", "node_rank"),
            f"{launch.node_rank} is not a rank of {launch.nnodes} node(s), which start at 0; write"
            f" at most {launch.nnodes - 1}, or raise nnodes",
            ("launch.nnodes",),
        )
    if launch.nnodes > 1 and launch.rdzv_endpoint is None:
        yield ConfigIssue(
            ("launch", "rdzv_endpoint"),
            f"{launch.nnodes} nodes need a rendezvous endpoint; write rdzv_endpoint: HOST:29500"
            " with the name of the first node",
            ("launch.nnodes",),
        )
    if launch.nnodes > 1 and is_url(run.train.output_dir):
        yield ConfigIssue(
            ("train", "output_dir"),
            f"is a URL, but {launch.nnodes} nodes write their shards of a checkpoint to one"
            " folder; write a folder on a shared file system",
            ("launch.nnodes",),
        )


def _check_skip_prepare(run: RunConfig) -> Issues:
    if run.data.skip_prepare_dataset and is_url(run.data.dataset_prepared_path):
        yield ConfigIssue(
            ("data", "skip_prepare_dataset"),
            "uses prepared data in a local folder, and dataset_prepared_path is a URL; set it to"
            " false: prepared data at a URL is found by its cache key and reused",
            ("data.dataset_prepared_path",),
        )


INSTEAD = "write a folder of its own, such as outputs/my-run"


# Folders of the Filesystem Hierarchy Standard, which every program shares.
SYSTEM = frozenset(
    f"/{name}"
    for name in (
        *("", "bin", "boot", "dev", "etc", "home", "lib", "lib64", "media", "mnt", "opt", "proc"),
        *("root", "run", "sbin", "srv", "sys", "tmp", "usr", "var"),
    )
)


def check_shared_folders(run: RunConfig) -> Issues:
    """Output folders that are a folder of the system, or a user's home."""
    for path, folder in {
        ("data", "dataset_prepared_path"): run.data.dataset_prepared_path,
        ("train", "output_dir"): run.train.output_dir,
        ("pipeline", "artifacts_path"): run.pipeline.artifacts_path,
    }.items():
        if not is_url(folder) and str(_normalize(folder)) in {*SYSTEM, str(Path.home())}:
            yield ConfigIssue(path, f"{folder} is a folder of other programs too; {INSTEAD}")


def check_output_dir(run: RunConfig) -> Issues:
    """`train.output_dir` that is the current folder, one above it, or the model's or data's."""
    output, path = run.train.output_dir, ("train", "output_dir")
    if is_url(output):
        return
    normalized = _normalize(output)
    # `.` and `..`: Path(".") has no parts.
    if set(normalized.parts) <= {".."}:
        yield ConfigIssue(path, f"{output} is the current folder, or one above; {INSTEAD}")
        return
    for name, input_path in _input_paths(run):
        if _normalize(input_path) == normalized:
            yield ConfigIssue(
                path, f"{output} is {name} too, and would be overwritten; {INSTEAD}", (name,)
            )


def _input_paths(run: RunConfig) -> Iterator[tuple[str, str]]:
    models = {
        "model.model_path": run.model.model_path,
        "model.config_path": run.model.config_path,
        "model.tokenizer_path": run.model.tokenizer_path,
        "lora.init_adapter_path": run.lora.init_adapter_path,
    }
    for kind, encoder in run.model.encoders.items():
        models[f"model.encoders.{kind}.model_path"] = encoder.model_path
        models[f"model.encoders.{kind}.config_path"] = encoder.config_path
    yield from ((name, path) for name, path in models.items() if path)
    for path, entry in iter_datasets(run, TRAIN, TEST):
        yield dotted((*path, "path")), entry.path


def _normalize(path: str) -> Path:
    # The normalized path; empty for the current folder.
    return Path(os.path.normpath(os.path.expanduser(path)))  # noqa: PTH111 - never raises


RULES: tuple[Callable[[RunConfig], Issues], ...] = (
    _check_model,
    *DATA_RULES,
    check_options,
    check_fields_of_ours,
    check_output_dir,
    check_shared_folders,
    _check_global_batch_size,
    *LAYOUT_RULES,
    *OPTIM_RULES,
    *OBJECTIVE_RULES,
    check_declared,
    _check_merged_export,
    _check_stages,
    check_reads,
    _check_push,
    _check_nodes,
    _check_skip_prepare,
)
