"""Combinations of settings that cannot be honoured, each with the reason and what to write instead.

A rule reads a run whose single values are all valid, and yields faults. What depends on the number
of ranks or on a device is judged later, where those are known.
"""

from collections.abc import Callable

from penstock.config.loading.fault import ConfigIssue
from penstock.config.rules.checkpoint import CHECKPOINT_RULES
from penstock.config.rules.data import DATA_RULES, Faults
from penstock.config.rules.evaluation import EVALUATION_RULES
from penstock.config.rules.fields import columns_are_read
from penstock.config.rules.memory import MEMORY_RULES
from penstock.config.rules.optimizer import OPTIM_RULES
from penstock.config.rules.parallelism import LAYOUT_RULES
from penstock.config.rules.paths import results_have_a_folder_of_their_own
from penstock.config.rules.preference import PREFERENCE_RULES
from penstock.config.rules.quantization import FP8_RULES, QLORA_RULES
from penstock.config.rules.release import RELEASE_RULES
from penstock.config.schema.pipeline import DEFAULT_STAGES, STAGES
from penstock.config.schema.run import RunConfig, has_target, needs_reference
from penstock.core.remote.urls import is_url

OF_ADAPTERS = (
    "use_rslora",
    "use_dora",
    "lora_plus_ratio",
    "lora_bias",
    "init_adapter_path",
    "moe_shared_lora",
    "moe_hybrid_shared_lora",
    "save_lora_only",
    "merge_lora_interval",
    "reset_optimizer_on_merge",
)
"""Settings that mean something only where adapters are trained."""


def rule_violations(run: RunConfig) -> Faults:
    """Every impossible combination in the run."""
    for rule in RULES:
        yield from rule(run)


def _a_model_is_named(run: RunConfig) -> Faults:
    if run.model.model_path is None and run.model.config_path is None:
        yield ConfigIssue(
            ("model", "model_path"),
            "no model is named; write model_path (weights to start from), "
            "or config_path for random weights",
            ("model.config_path",),
        )


def _models_read_text(run: RunConfig) -> Faults:
    if run.model.encoders:
        kinds = ", ".join(sorted(run.model.encoders))
        yield ConfigIssue(
            ("model", "encoders"),
            f"names encoders ({kinds}), and the families that are trained here read text alone;"
            " leave it out, and take a text model",
        )


def _batches_agree(run: RunConfig) -> Faults:
    train = run.train
    if train.global_batch_size is None:
        return
    unit, words = train.micro_batch_size, f"micro_batch_size ({train.micro_batch_size})"
    steps = train.asks_for("gradient_accumulation_steps")
    if steps:
        unit *= train.gradient_accumulation_steps
        words += f" x gradient_accumulation_steps ({train.gradient_accumulation_steps})"
    if train.global_batch_size % unit:
        yield ConfigIssue(
            ("train", "global_batch_size"),
            f"{train.global_batch_size} rows cannot be made of whole {words};"
            f" write a multiple of {unit}{', or leave gradient_accumulation_steps out' * steps}",
            ("train.micro_batch_size", "train.gradient_accumulation_steps"),
        )


def _what_changes_dropout_has_some(run: RunConfig) -> Faults:
    dropout = run.train.dropout
    for name in ("warmup_steps", "depth_scaling"):
        if getattr(dropout, name) and not (dropout.hidden or dropout.ffn or dropout.attention):
            yield ConfigIssue(
                ("train", "dropout", name),
                f"nothing is dropped; write hidden, attention or ffn, or leave {name} out",
                ("train.dropout.hidden", "train.dropout.attention", "train.dropout.ffn"),
            )


def _what_is_dropped_is_written_out(run: RunConfig) -> Faults:
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
                "is of attention that is plain, and computed by one rank from whole samples, and"
                f" {name} asks for another; write {name}: {instead}, or leave attention out",
                (name,),
            )


def _mlflow_is_told(run: RunConfig) -> Faults:
    if run.train.mlflow_tracking_uri is not None and not run.train.use_mlflow:
        yield ConfigIssue(
            ("train", "mlflow_tracking_uri"),
            "nothing is sent there with use_mlflow: false; write use_mlflow: true, or leave"
            " mlflow_tracking_uri out",
            ("train.use_mlflow",),
        )


def _events_have_a_folder(run: RunConfig) -> Faults:
    folder = run.train.log_dir
    if folder is not None and not run.train.use_tensorboard:
        yield ConfigIssue(
            ("train", "log_dir"),
            "TensorBoard's events alone go there, and use_tensorboard is false; write"
            " use_tensorboard: true, or leave log_dir out",
            ("train.use_tensorboard",),
        )
    if folder is not None and is_url(folder):
        yield ConfigIssue(
            ("train", "log_dir"),
            "is a URL, and events are written to a folder of this machine; leave it out: those in"
            " train.output_dir are kept where that is",
        )


def _fsdp2_starts_on_meta(run: RunConfig) -> Faults:
    device = run.train.init_device
    if run.train.data_parallel_mode == "fsdp2" and device not in (None, "meta"):
        yield ConfigIssue(
            ("train", "init_device"),
            f"data_parallel_mode: fsdp2 cannot start from {device}, where every rank would hold the"
            " whole model; write init_device: meta or leave it out",
            ("train.data_parallel_mode",),
        )


def _adapters_are_on(run: RunConfig) -> Faults:
    if run.lora.enable_lora:
        return
    for name in OF_ADAPTERS:
        if run.lora.asks_for(name):
            yield ConfigIssue(
                ("lora", name),
                "there are no adapters with enable_lora: false;"
                f" write enable_lora: true or leave {name} out",
                ("lora.enable_lora",),
            )


def _what_is_merged_is_all(run: RunConfig) -> Faults:
    lora = run.lora
    if not lora.enable_lora:
        return
    if not lora.merge_lora_interval:
        if lora.reset_optimizer_on_merge:
            yield ConfigIssue(
                ("lora", "reset_optimizer_on_merge"),
                "adapters are never merged with merge_lora_interval: 0; write after how many steps,"
                " or leave reset_optimizer_on_merge out",
                ("lora.merge_lora_interval",),
            )
        return
    path, every = ("lora", "merge_lora_interval"), f"every {lora.merge_lora_interval} step(s)"
    if lora.use_dora:
        yield ConfigIssue(
            path,
            f"merges products {every}, and with use_dora: true rows have trained norms besides,"
            " which no product holds; leave one of the two out",
            ("lora.use_dora",),
        )
    for is_apart, other, value in (
        (lora.save_lora_only, "lora.save_lora_only", "true"),
        (not run.export.merge_lora, "export.merge_lora", "false"),
    ):
        if is_apart:
            yield ConfigIssue(
                path,
                f"makes adapters part of the model {every}, so the adapter alone, which"
                f" {other}: {value} asks for, is not what was learnt; leave one of the two out",
                (other,),
            )


def _what_is_quantized_is_written(run: RunConfig) -> Faults:
    kind, lora = run.export.quantise, run.lora
    if kind is None or not lora.enable_lora:
        return
    for is_apart, other, value in (
        (not run.export.merge_lora, "export.merge_lora", "false"),
        (lora.save_lora_only, "lora.save_lora_only", "true"),
    ):
        if is_apart:
            yield ConfigIssue(
                ("export", "quantise"),
                f"{kind} weights are those of the merged model, which {other}: {value} leaves out;"
                " leave one of the two out",
                (other,),
            )


def _biases_may_move(run: RunConfig) -> Faults:
    if not run.train.moe_bias_update_rate:
        return
    path = ("train", "moe_bias_update_rate")
    if run.lora.enable_lora:
        yield ConfigIssue(
            path,
            "moves biases of the model itself, and with enable_lora: true only adapters are kept;"
            " leave moe_bias_update_rate out, or write lora.enable_lora: false",
            ("lora.enable_lora",),
        )
    if run.model.freeze_router:
        yield ConfigIssue(
            path,
            "moves biases of routers, and freeze_router: true leaves routers as they are; leave one"
            " of the two out",
            ("model.freeze_router",),
        )


def _experts_share_in_one_way(run: RunConfig) -> Faults:
    lora, ways = run.lora, ("moe_shared_lora", "moe_hybrid_shared_lora")
    written = [way for way in ways if getattr(lora, way)]
    if len(written) > 1:
        yield ConfigIssue(
            ("lora", ways[0]),
            "experts share whole adapters, or the factors on one side (moe_hybrid_shared_lora);"
            " write only one of the two",
            (f"lora.{ways[1]}",),
        )


def _stages_are_a_chain(run: RunConfig) -> Faults:
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
            "nothing that is learnt compares with a reference model; leave reference out",
            ("train.objective", "preference"),
        )
    whole = STAGES[STAGES.index(ordered[0]) : STAGES.index(ordered[-1]) + 1]
    whole = tuple(stage for stage in whole if stage in stages or stage != "reference")
    missing = [stage for stage in whole if stage not in stages]
    if missing:
        after = whole[whole.index(missing[-1]) + 1]
        yield ConfigIssue(
            path,
            f"{after} needs {missing[-1]}, which is left out; write [{', '.join(whole)}]"
            " (what is already there is reused)",
        )


def _push_has_one_target(run: RunConfig) -> Faults:
    push = run.push
    if push.repo_id is not None and push.url is not None:
        yield ConfigIssue(
            ("push", "url"),
            "repo_id is given too, and a push has one target; leave one of the two out",
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
                    f"only a hub repository has one, and url is a plain folder; leave {name} out",
                    ("push.url", "push.repo_id"),
                )


def _machines_can_meet(run: RunConfig) -> Faults:
    launch = run.launch
    if launch.node_rank >= launch.nnodes:
        yield ConfigIssue(
            ("launch", "node_rank"),
            f"{launch.node_rank} is none of {launch.nnodes} machine(s), which are counted from 0;"
            f" write at most {launch.nnodes - 1}, or raise nnodes",
            ("launch.nnodes",),
        )
    if launch.nnodes > 1 and launch.rdzv_endpoint is None:
        yield ConfigIssue(
            ("launch", "rdzv_endpoint"),
            f"{launch.nnodes} machines need a place to meet;"
            " write rdzv_endpoint: HOST:29500 with the name of the first machine",
            ("launch.nnodes",),
        )


def _nodes_share_a_folder(run: RunConfig) -> Faults:
    if run.launch.nnodes > 1 and is_url(run.train.output_dir):
        yield ConfigIssue(
            ("train", "output_dir"),
            f"is a URL, and {run.launch.nnodes} machines write their parts of a checkpoint into one"
            " folder; write a folder on a file system they share",
            ("launch.nnodes",),
        )


def _given_data_lies_here(run: RunConfig) -> Faults:
    if run.data.skip_prepare_dataset and is_url(run.data.dataset_prepared_path):
        yield ConfigIssue(
            ("data", "skip_prepare_dataset"),
            "takes what lies in a folder of this machine, and dataset_prepared_path is a URL; set"
            " it to false: prepared data there is found by its key and reused",
            ("data.dataset_prepared_path",),
        )


RULES: tuple[Callable[[RunConfig], Faults], ...] = (
    _a_model_is_named,
    _models_read_text,
    *DATA_RULES,
    columns_are_read,
    results_have_a_folder_of_their_own,
    _batches_agree,
    _what_changes_dropout_has_some,
    _what_is_dropped_is_written_out,
    _mlflow_is_told,
    _events_have_a_folder,
    _fsdp2_starts_on_meta,
    *LAYOUT_RULES,
    *OPTIM_RULES,
    *MEMORY_RULES,
    *FP8_RULES,
    *CHECKPOINT_RULES,
    *EVALUATION_RULES,
    *RELEASE_RULES,
    *PREFERENCE_RULES,
    _adapters_are_on,
    _what_is_merged_is_all,
    *QLORA_RULES,
    _what_is_quantized_is_written,
    _biases_may_move,
    _experts_share_in_one_way,
    _stages_are_a_chain,
    _push_has_one_target,
    _machines_can_meet,
    _nodes_share_a_folder,
    _given_data_lies_here,
)
