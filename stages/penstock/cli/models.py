"""`penstock models [check]`: the model types that can be trained, and one model in particular."""

import math
from importlib.metadata import version
from typing import Annotated, Any

import typer

from penstock.api.tables import table
from penstock.cli.console import Console, run
from penstock.cli.options import add_command

JsonObject = dict[str, Any]

NATIVE_AXES = "fsdp, tensor, pipeline, context"
EXPERT_AXES = f"{NATIVE_AXES}, expert"
AUTO_AXES = "fsdp, ddp"


def list_models(console: Console) -> JsonObject:
    """List the model types that can be trained."""
    from penstock.models.automodel.proved import ProvedModels
    from penstock.models.multimodal import MULTIMODAL
    from penstock.models.registry import FAMILIES

    proved = ProvedModels.read()
    known = sorted({*proved.models, *FAMILIES})
    found = {name: _entry(name, name in FAMILIES, proved) for name in known}
    found |= {name: _text_entry() for name in MULTIMODAL}
    found = dict(sorted(found.items()))
    rows = [("model_type", "backend", "parallelism", "documents", "LoRA")]
    rows += [
        (name, one["backend"], one["parallelism"], one["documents"], one["lora"])
        for name, one in found.items()
        if not one["reason"]
    ]
    refused = [f"  {name}: {one['reason']}" for name, one in found.items() if one["reason"]]
    installed = version("transformers")
    other = "" if installed == proved.transformers else f" (installed: {installed})"
    console.result(
        f"{table(rows)}\n\nnative (text): the language model, of a native type in text_config, is "
        f"trained as text.\n{len(rows) - 1} model types, proved with transformers "
        f"{proved.transformers}{other}. Not proved:\n" + "\n".join(refused)
    )
    return {"transformers": proved.transformers, "installed": installed, "models": found}


def check_one(
    console: Console,
    model: Annotated[str, typer.Argument(metavar="PATH", help="A folder, or a hub id.")],
    backend: Annotated[
        str, typer.Option(help="auto, native or transformers, as model.backend.")
    ] = "auto",
) -> JsonObject:
    """Print how this model can be trained, or why it cannot."""
    from penstock.config.loading.load import loads
    from penstock.machine import resolve_hf_config
    from penstock.models.automodel.family import AutoFamily
    from penstock.models.registry import get_family

    settings = loads(
        {
            "model": {"config_path": model, "backend": backend},
            "data": {"datasets": [{"path": "none"}]},
            "train": {"output_dir": "unused"},
        }
    )
    hf_config = resolve_hf_config(settings)
    family = get_family(hf_config, settings.model.backend)
    config = family.read(hf_config)
    shapes = family.weight_map(config).hf_shapes()
    parameters = sum(map(math.prod, shapes.values()))
    found: JsonObject = {
        "model_type": family.model_type,
        "architecture": family.architecture,
        "backend": "transformers" if isinstance(family, AutoFamily) else "native",
        "parallelism": AUTO_AXES,
        "parameters": parameters,
        "layers": config.num_hidden_layers,
        "lora_targets": list(family.lora_targets),
        "documents": "packed",
    }
    if isinstance(family, AutoFamily):
        traits = family.outline.traits
        found |= {
            "attention": traits.attention,
            "documents": "packed" if traits.packing else "padded",
            "head": "apart" if traits.head else "all logits",
            "why": traits.why,
            "not_native": "; ".join(family.not_native),
            "router_losses": "yes" if family.outline.routers else traits.routers_why,
        }
    else:
        found["parallelism"] = EXPERT_AXES if config.experts else NATIVE_AXES
    console.result(table([(name, _shown(value)) for name, value in found.items() if value != ""]))
    return found


def _text_entry() -> JsonObject:
    return {
        "backend": "native (text)",
        "parallelism": NATIVE_AXES,
        "documents": "packed",
        "lora": "yes",
        "reason": "",
    }


def _entry(name: str, is_native: bool, proved: Any) -> JsonObject:
    if is_native:
        return {
            "backend": "native",
            "parallelism": NATIVE_AXES,
            "documents": "packed",
            "lora": "yes",
            "reason": "",
        }
    found = proved.models[name]
    return {
        "backend": "transformers",
        "parallelism": AUTO_AXES,
        "documents": "packed" if found.packing else "padded",
        "lora": "yes" if found.lora else "no",
        "reason": found.reason,
    }


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


commands = typer.Typer(help="List the models that can be trained, or check one.")


@commands.callback(invoke_without_command=True)
def _list_by_default(
    context: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="End with one JSON object.")] = False,
) -> None:
    if context.invoked_subcommand is None:
        console = Console(as_json, False)
        raise typer.Exit(run(console, lambda: list_models(console)))


add_command(commands, list_models, "list")
add_command(commands, check_one, "check")
