"""Invalid combinations of settings, each with the reason and what to write instead.

A rule is a function of a run whose single values are all valid; it yields `ConfigIssue`s. What
depends on the number of ranks or on a device is checked later, where these are known.
"""

from collections.abc import Callable, Mapping
from typing import get_args

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.checkpoint import CHECKPOINT_RULES
from penstock.config.rules.data import DATA_RULES, Issues
from penstock.config.rules.effect import check_effects
from penstock.config.rules.evaluation import EVALUATION_RULES
from penstock.config.rules.fields import check_dataset_columns, check_media_bounds
from penstock.config.rules.memory import MEMORY_RULES
from penstock.config.rules.optimizer import OPTIM_RULES
from penstock.config.rules.parallelism import LAYOUT_RULES
from penstock.config.rules.paths import check_output_dir, check_shared_folders
from penstock.config.rules.preference import PREFERENCE_RULES
from penstock.config.rules.quantization import FP8_RULES, QLORA_RULES
from penstock.config.rules.release import RELEASE_RULES
from penstock.config.schema.model import Part
from penstock.config.schema.pipeline import DEFAULT_STAGES, STAGES
from penstock.config.schema.run import RunConfig, has_target, needs_reference
from penstock.core.remote.urls import is_url

ADDED = ("encode", "reference")
"""Stages that are added where a run needs them."""


def rule_violations(run: RunConfig) -> Issues:
    """All invalid combinations in the run."""
    for rule in RULES:
        yield from rule(run)


def _check_model_path(run: RunConfig) -> Issues:
    if run.model.model_path is None and run.model.config_path is None:
        yield ConfigIssue(
            ("model", "model_path"),
            "is not set; write model_path (pre-trained weights), or config_path for random weights",
            ("model.config_path",),
        )


def _check_code_revision(run: RunConfig) -> Issues:
    if run.model.code_revision is not None and not run.model.trust_remote_code:
        yield ConfigIssue(
            ("model", "code_revision"),
            "no code of the model is run; write trust_remote_code: true, or leave it out",
        )


def _check_encoders(run: RunConfig) -> Issues:
    for kind, encoder in run.model.encoders.items():
        path = ("model", "encoders", kind)
        if kind != "image":
            yield ConfigIssue(
                path,
                f"no architecture joins a new encoder of {kind} to a text model; leave {kind} out,"
                f" and write a model that has one as model_path (penstock models lists them)",
            )
        elif encoder.model_path is None and encoder.config_path is None:
            yield ConfigIssue(
                path,
                "names no vision model; write model_path (pre-trained weights), or config_path for"
                " random weights",
            )
        if encoder.is_non_default("scale_factor") and encoder.projector != "pixel_shuffle":
            yield ConfigIssue(
                (*path, "scale_factor"),
                f"is of a pixel shuffle, and the projector is {encoder.projector}; write projector:"
                " pixel_shuffle, or leave it out",
                (f"model.encoders.{kind}.projector",),
            )
    if run.model.encoders and run.model.trust_remote_code:
        yield ConfigIssue(
            ("model", "encoders"),
            "is for text models that Penstock's own code computes, and trust_remote_code: true runs"
            " the model's; leave one of the two out",
            ("model.trust_remote_code",),
        )


def _check_freeze(run: RunConfig) -> Issues:
    freeze = run.model.freeze
    if freeze is None:
        return
    if run.lora.enable_lora:
        yield ConfigIssue(
            ("model", "freeze"),
            f"is {freeze}, and with lora.enable_lora all of the model's own weights are frozen;"
            " leave it out",
            ("lora.enable_lora",),
        )
    elif len({*freeze}) == len(get_args(Part)):
        yield ConfigIssue(
            ("model", "freeze"),
            f"is {freeze}, all parts of a model, and nothing would be trained; leave one out",
        )


def _check_global_batch_size(run: RunConfig) -> Issues:
    train = run.train
    if train.global_batch_size is None:
        return
    unit, words = train.micro_batch_size, f"micro_batch_size ({train.micro_batch_size})"
    steps = train.is_non_default("gradient_accumulation_steps")
    if steps:
        unit *= train.gradient_accumulation_steps
        words += f" x gradient_accumulation_steps ({train.gradient_accumulation_steps})"
    if train.global_batch_size % unit:
        yield ConfigIssue(
            ("train", "global_batch_size"),
            f"{train.global_batch_size} packed sequences are not a multiple of {words};"
            f" write a multiple of {unit}{', or leave gradient_accumulation_steps out' * steps}",
            ("train.micro_batch_size", "train.gradient_accumulation_steps"),
        )


def _check_attention_dropout(run: RunConfig) -> Issues:
    train, model = run.train, run.model
    hindrances = {
        "train.ringattn_parallel_size": (train.ringattn_parallel_size > 1, "1"),
        "train.ulysses_parallel_size": (train.ulysses_parallel_size > 1, "1"),
        "train.enable_compile": (train.enable_compile, "false"),
        "model.attention_cast_bf16": (model.attention_cast_bf16, "false"),
        "model.attn_implementation": (model.attn_implementation not in (None, "eager"), "eager"),
    }
    for name, (hinders, instead) in hindrances.items():
        if train.dropout.attention and hinders:
            yield ConfigIssue(
                ("train", "dropout", "attention"),
                f"needs eager attention over complete samples on one rank, without {name}; write"
                f" {name}: {instead}, or leave attention out",
                (name,),
            )


def _check_tensorboard_log_dir(run: RunConfig) -> Issues:
    folder = run.train.log_dir
    if folder is not None and is_url(folder):
        yield ConfigIssue(
            ("train", "log_dir"),
            "is a URL, but event files are written to a local folder; leave it out: event files in"
            " train.output_dir are uploaded with it",
        )


def _check_fsdp2_init_device(run: RunConfig) -> Issues:
    device = run.train.init_device
    if run.train.data_parallel_mode == "fsdp2" and device not in (None, "meta"):
        yield ConfigIssue(
            ("train", "init_device"),
            f"data_parallel_mode: fsdp2 cannot initialize on {device}, where every rank would hold"
            " the whole model; write init_device: meta or leave it out",
            ("train.data_parallel_mode",),
        )


def _check_relora(run: RunConfig) -> Issues:
    lora = run.lora
    if not lora.enable_lora:
        return
    if not lora.merge_lora_interval:
        return
    path, every = ("lora", "merge_lora_interval"), f"every {lora.merge_lora_interval} step(s)"
    if lora.use_dora:
        yield ConfigIssue(
            path,
            f"merges low-rank products {every}, but with use_dora: true the magnitudes of rows are"
            " trained too, which are not part of a product; leave one of the two out",
            ("lora.use_dora",),
        )
    for is_apart, other, value in (
        (lora.save_lora_only, "lora.save_lora_only", "true"),
        (not run.export.merge_lora, "export.merge_lora", "false"),
    ):
        if is_apart:
            yield ConfigIssue(
                path,
                f"merges adapters into the model {every}, so the adapter alone, which {other}:"
                f" {value} exports, is not the trained model; leave one of the two out",
                (other,),
            )


def _check_merged_export(run: RunConfig) -> Issues:
    kind, lora = run.export.quantise, run.lora
    if not lora.enable_lora:
        return
    if run.export.mtp == "drop" and (not run.export.merge_lora or lora.save_lora_only):
        other = "lora.save_lora_only" if lora.save_lora_only else "export.merge_lora"
        yield ConfigIssue(
            ("export", "mtp"),
            f"drops layers of the merged model, which {other} does not export; leave one of the"
            " two out",
            (other,),
        )
    if kind is None:
        return
    for is_apart, other, value in (
        (not run.export.merge_lora, "export.merge_lora", "false"),
        (lora.save_lora_only, "lora.save_lora_only", "true"),
    ):
        if is_apart:
            yield ConfigIssue(
                ("export", "quantise"),
                f"{kind} quantizes the merged model, which {other}: {value} does not export;"
                " leave one of the two out",
                (other,),
            )


def _check_moe_bias_update(run: RunConfig) -> Issues:
    if not run.train.moe_bias_update_rate:
        return
    path = ("train", "moe_bias_update_rate")
    if run.lora.enable_lora:
        yield ConfigIssue(
            path,
            "changes biases of the model itself, and with enable_lora: true only adapters are"
            " saved; leave moe_bias_update_rate out, or write lora.enable_lora: false",
            ("lora.enable_lora",),
        )
    if run.model.freeze_router:
        yield ConfigIssue(
            path,
            "changes biases of routers, and freeze_router: true freezes routers; leave one of the"
            " two out",
            ("model.freeze_router",),
        )


def _first_conflict(field: str, conflicts: Mapping[str, tuple[bool, str]]) -> Issues:
    """The first of these settings that is set, and why `train.<field>` cannot be used with it."""
    for name, (is_set, why) in conflicts.items():
        if is_set:
            reason = f"cannot be used with {name}: {why}; or leave {field} out"
            yield ConfigIssue(("train", field), reason, (name,))
            return


def _check_mtp(run: RunConfig) -> Issues:
    train = run.train
    if not train.mtp_loss_weight:
        return
    conflicts = {
        "lora.enable_lora": (run.lora.enable_lora, "all weights of those layers are trained"),
        "train.objective": (
            train.objective == "preference",
            "its loss is of whole completions, not of tokens",
        ),
    }
    yield from _first_conflict("mtp_loss_weight", conflicts)


def _check_indexer_loss(run: RunConfig) -> Issues:
    train = run.train
    if train.indexer_warmup and not train.indexer_loss_coef:
        yield ConfigIssue(
            ("train", "indexer_warmup"),
            "trains indexers only, and train.indexer_loss_coef is 0: nothing would be trained;"
            " write indexer_loss_coef: 1.0",
            ("train.indexer_loss_coef",),
        )
    if not train.indexer_loss_coef:
        return
    conflicts = {
        "lora.enable_lora": (run.lora.enable_lora, "indexers have no adapters"),
        "train.enable_compile": (train.enable_compile, "its observers are not compiled"),
        "train.mtp_loss_weight": (
            train.mtp_loss_weight > 0 and train.indexer_warmup,
            "the warm-up trains indexers only",
        ),
        "train.moe_bias_update_rate": (
            train.moe_bias_update_rate > 0 and train.indexer_warmup,
            "the warm-up trains indexers only",
        ),
    }
    field = "indexer_warmup" if train.indexer_warmup else "indexer_loss_coef"
    yield from _first_conflict(field, conflicts)


def _check_shared_lora(run: RunConfig) -> Issues:
    lora, ways = run.lora, ("moe_shared_lora", "moe_hybrid_shared_lora")
    written = [way for way in ways if getattr(lora, way)]
    if len(written) > 1:
        yield ConfigIssue(
            ("lora", ways[0]),
            "experts share complete adapters (moe_shared_lora) or one of the two factors"
            " (moe_hybrid_shared_lora); write only one of the two",
            (f"lora.{ways[1]}",),
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
    whole = STAGES[STAGES.index(ordered[0]) : STAGES.index(ordered[-1]) + 1]
    whole = tuple(stage for stage in whole if stage in stages or stage not in ADDED)
    missing = [stage for stage in whole if stage not in stages]
    if missing:
        after = whole[whole.index(missing[-1]) + 1]
        yield ConfigIssue(
            path,
            f"{after} needs {missing[-1]}, which is left out; write [{', '.join(whole)}]"
            " (existing results are reused)",
        )


def _check_push(run: RunConfig) -> Issues:
    push = run.push
    if push.repo_id is not None and push.url is not None:
        yield ConfigIssue(
            ("push", "url"),
            "repo_id is set too, and a push has one target; leave one of the two out",
            ("push.repo_id",),
        )
    elif "push" in (run.pipeline.stages or ()) and not has_target(run):
        yield ConfigIssue(
            ("pipeline", "stages"),
            "push is listed but has no target; write push.repo_id (your-name/my-model) or push.url",
            ("push.repo_id", "push.url"),
        )
    if push.url is not None and push.repo_id is None:
        for name in ("revision", "create_pr"):
            if getattr(push, name):
                yield ConfigIssue(
                    ("push", name),
                    f"is for hub repositories, and url is a folder; leave {name} out",
                    ("push.url", "push.repo_id"),
                )


def _check_rendezvous(run: RunConfig) -> Issues:
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


def _check_shared_output_dir(run: RunConfig) -> Issues:
    if run.launch.nnodes > 1 and is_url(run.train.output_dir):
        yield ConfigIssue(
            ("train", "output_dir"),
            f"is a URL, but {run.launch.nnodes} nodes write their shards of a checkpoint to one"
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


RULES: tuple[Callable[[RunConfig], Issues], ...] = (
    _check_model_path,
    _check_code_revision,
    _check_encoders,
    _check_freeze,
    *DATA_RULES,
    check_dataset_columns,
    check_media_bounds,
    check_output_dir,
    check_shared_folders,
    _check_global_batch_size,
    _check_attention_dropout,
    _check_tensorboard_log_dir,
    _check_fsdp2_init_device,
    *LAYOUT_RULES,
    *OPTIM_RULES,
    *MEMORY_RULES,
    *FP8_RULES,
    *CHECKPOINT_RULES,
    *EVALUATION_RULES,
    *RELEASE_RULES,
    *PREFERENCE_RULES,
    check_effects,
    _check_relora,
    *QLORA_RULES,
    _check_merged_export,
    _check_moe_bias_update,
    _check_mtp,
    _check_indexer_loss,
    _check_shared_lora,
    _check_stages,
    _check_push,
    _check_rendezvous,
    _check_shared_output_dir,
    _check_skip_prepare,
)
