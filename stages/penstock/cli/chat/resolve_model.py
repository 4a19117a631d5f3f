"""Resolves the model of `penstock chat`: a config's trained model, a folder, or a hub id."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.cli.evaluate import load_run
from penstock.config.loading.cli_overrides import Override
from penstock.config.loading.load import SUFFIXES, loads
from penstock.config.schema.run import RunConfig
from penstock.core.cache.store import fetch_cached, find_cached
from penstock.core.errors import ConfigError, PenstockError, StageError
from penstock.core.files import read_json_object
from penstock.core.remote.urls import is_url
from penstock.core.sources.hub import MODEL_FILES, local_folder
from penstock.core.sources.pin import pin_model
from penstock.export.stage import Export
from penstock.pipeline.origins import with_adapter
from penstock.pipeline.plan import Plan, plan
from penstock.train.launch.job import JOB

if TYPE_CHECKING:
    from penstock.engine.distributed.ranks import ProcessInfo
    from penstock.evaluate.chat_model import ChatModel

ADAPTER, MODEL = "adapter_config.json", "config.json"


@dataclass(frozen=True)
class Target:
    """A model folder, and an adapter folder if an adapter is loaded on it."""

    model: Path
    adapter: Path | None
    description: str
    """Description of the model."""


def resolve_target(
    typed: str,
    overrides: Sequence[Override],
    adapter: str | None,
    scratch: Path,
    notify: Callable[[str], None],
) -> Target:
    """The model that `typed` names; the newest checkpoint of an unfinished run is exported to
    `scratch`.

    Raises ConfigError if it names no model, and StageError for a run without a checkpoint.
    """
    path = Path(typed).expanduser()
    is_run = path.suffix in SUFFIXES or (path / JOB).is_file()
    if is_run and not (path / MODEL).is_file():
        target = _resolve_run(plan(load_run(path, overrides), ("export",)), scratch, notify)
    else:
        target = _resolve_folder(_local_folder(typed))
    if adapter is None:
        return target
    if target.adapter:
        raise ConfigError(
            f"{typed} is an adapter already ({target.adapter}), and only one adapter can be loaded "
            "on a model.\n  Leave --adapter out, or name the base model."
        )
    adapter_folder = _local_folder(adapter)
    return Target(
        target.model, adapter_folder, f"{target.description} with the adapter {adapter_folder}"
    )


def load_target(
    target: Target, ranks: "ProcessInfo", scratch: Path, notify: Callable[[str], None]
) -> "ChatModel":
    """Load the model. An adapter that the engine cannot run unmerged is merged into a copy of the
    base model in `scratch`."""
    from penstock.evaluate.chat_model import load_chat_model

    model, adapter = target.model, target.adapter
    # Beside an adapter, it has the chat template that the adapter was trained with.
    tokenizer = adapter if adapter and (adapter / "tokenizer_config.json").is_file() else model
    try:
        run = _build_config(model, adapter)
    except PenstockError:
        if adapter is None:
            raise
        from penstock.export.merge import merge_folders

        notify("chat: merging the adapter into its base model; this kind cannot run unmerged")
        model, adapter = scratch / f"merged-{target.model.name}", None
        merge_folders(target.model, target.adapter or model, model)
        run = _build_config(model, None)
    return load_chat_model(run, model, ranks, tokenizer=tokenizer, adapter=adapter)


def _build_config(model: Path, adapter: Path | None) -> RunConfig:
    """A run config for this model, with the precision of the stored weights; quantized ones are
    dequantized."""
    base = read_json_object(model / MODEL)
    unsaid = "bfloat16" if base.get("quantization_config") else "float32"
    stored = base.get("dtype") or base.get("torch_dtype") or unsaid
    run = loads(
        {
            "model": {"model_path": str(model)},
            # A config requires data and an output folder; neither is used here.
            "data": {"datasets": [{"path": "builtin:arithmetic", "type": "chat"}]},
            "train": {
                "output_dir": "outputs/chat",
                "data_parallel_mode": "none",
                "precision": "fp32" if stored == "float32" else "bf16",
                "enable_gradient_checkpointing": False,
            },
            "lora": {"enable_lora": True, "init_adapter_path": str(adapter)} if adapter else {},
        }
    )
    return with_adapter(run)


def _resolve_run(planned: Plan, scratch: Path, notify: Callable[[str], None]) -> Target:
    """The exported model of a run, else its newest checkpoint."""
    step = planned.step("export")
    exported = fetch_cached(step, planned.run.pipeline.verify)
    if exported is not None:
        folders = step.artifact.facts["folders"]
        path = step.artifact.path
        name = "hf" if "hf" in folders else "adapter"
        target = _resolve_folder(path / folders[name])
        return Target(target.model, target.adapter, f"the exported model, {path / folders[name]}")
    assert isinstance(step.stage, Export)
    checkpoint = _newest_checkpoint(planned)
    notify(f"chat: nothing is exported yet; answering with the checkpoint {checkpoint}")
    from penstock.engine.hf.export import write_folders
    from penstock.engine.model_source import ExportFormat

    out = scratch / "exported"
    facts = write_folders(checkpoint, step.stage.origin, ExportFormat(), out)
    folder = out / ("hf" if "hf" in facts["folders"] else "adapter")
    target = _resolve_folder(folder)
    return Target(target.model, target.adapter, f"the checkpoint {checkpoint}")


def _newest_checkpoint(planned: Plan) -> Path:
    from penstock.engine.checkpoint.folders import complete_checkpoints, newest_checkpoint

    step = planned.step("train")
    if find_cached(step) is not None:
        return step.path / step.artifact.facts["checkpoint"]
    root = step.path / "checkpoints"
    from penstock.train.launch.job import read_earlier_keys

    key = step.artifact.key
    checkpoint = newest_checkpoint(root, (key, *read_earlier_keys(step.path, key)))
    if checkpoint:
        return checkpoint
    checkpoints = complete_checkpoints(root)
    why = (
        f"{checkpoints[-1]} is of a run with other settings"
        if checkpoints
        else f"{root} has no complete checkpoint"
    )
    raise StageError(
        f"this config has trained nothing yet: {why}.\n"
        "  Run penstock run first, or name a model's folder."
    )


def _resolve_folder(folder: Path) -> Target:
    """A folder with a model, or with an adapter that names its base."""
    if (folder / ADAPTER).is_file():
        named = str(read_json_object(folder / ADAPTER).get("base_model_name_or_path") or "")
        beside = folder / named
        base = beside if named and beside.is_dir() else _local_folder(named)
        return Target(base.resolve(), folder, f"the adapter {folder} on {base.resolve()}")
    if not (folder / MODEL).is_file():
        raise ConfigError(
            f"{folder} holds neither a run nor a model: it has no {MODEL}, {ADAPTER} or {JOB}.\n"
            "  Name a config, a train.output_dir, or a folder in Hugging Face's format."
        )
    return Target(folder, None, str(folder))


def _local_folder(typed: str) -> Path:
    """A local folder as it is, or a hub repository at its current commit."""
    folder = Path(typed).expanduser()
    if folder.is_dir():
        return folder
    if is_url(typed) or not typed or folder.is_absolute() or typed.startswith("."):
        raise ConfigError(
            f"{typed or 'the base model'} is not a local folder.\n"
            "  Name a config, a folder in Hugging Face's format, or a hub id."
        )
    return local_folder(typed, pin_model(typed), MODEL_FILES)
