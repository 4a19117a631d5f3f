"""`penstock models [check]`: the model types that can be trained, and one model in particular."""

import math
from pathlib import Path
from typing import Annotated, Any, Literal

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
    # What --help would take half of its time for.
    from importlib.metadata import version

    from penstock.core.extensions import FAMILIES
    from penstock.models.automodel.proved import AUDIO_FILE, IMAGE_FILE, ProvedModels
    from penstock.models.multimodal import MULTIMODAL
    from penstock.models.vision.types import VISION_TYPES

    proved = ProvedModels.read()
    images, audio = (ProvedModels.read(file).models for file in (IMAGE_FILE, AUDIO_FILE))
    entries = {
        name: _entry("transformers", AUTO_AXES, "packed" if proof.packing else "padded", proof)
        for name, proof in proved.models.items()
    }
    entries |= {name: _entry("native", NATIVE_AXES, "packed") for name in FAMILIES.names}
    for kinds, proofs in (("images", images), ("audio", audio)):
        for name, proof in proofs.items():
            takes_images = kinds == "audio" and name in images and not images[name].reason
            backend = f"transformers ({'images, ' if takes_images else ''}{kinds})"
            if name not in entries or not proof.reason:
                entries[name] = _entry(backend, AUTO_AXES, "padded", proof)
    entries |= {
        name: _entry(
            f"native ({'images' if name in VISION_TYPES else 'text'})", NATIVE_AXES, "packed"
        )
        for name in MULTIMODAL
    }
    entries = dict(sorted(entries.items()))
    rows = [("model_type", "backend", "parallelism", "documents", "LoRA")]
    rows += [
        (name, entry["backend"], entry["parallelism"], entry["documents"], entry["lora"])
        for name, entry in entries.items()
        if not entry["reason"]
    ]
    refused = [f"  {name}: {entry['reason']}" for name, entry in entries.items() if entry["reason"]]
    installed = version("transformers")
    version_note = "" if installed == proved.transformers else f" (installed: {installed})"
    console.result(
        f"{table(rows)}\n\nnative (text): the language model, of a native type in text_config, is "
        "trained as text; native (images): and on images; transformers (images) or (audio): the "
        "whole model, through transformers' code.\n"
        f"{len(rows) - 1} model types, proved with transformers "
        f"{proved.transformers}{version_note}. Not proved:\n" + "\n".join(refused)
    )
    return {"transformers": proved.transformers, "installed": installed, "models": entries}


def check_one(
    console: Console,
    model: Annotated[str, typer.Argument(metavar="PATH", help="A folder, or a hub id.")],
    backend: Annotated[
        str, typer.Option(help="auto, native or transformers, as model.backend.")
    ] = "auto",
) -> JsonObject:
    """Print how this model can be trained, or why it cannot."""
    from penstock.config.loading.load import loads
    from penstock.estimate.machine import resolve_hf_config
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
    result: JsonObject = {
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
        result |= {
            "attention": traits.attention,
            "documents": "packed" if traits.packing else "padded",
            "head": "apart" if traits.head else "all logits",
            "why": traits.why,
            "not_native": "; ".join(family.not_native),
            "router_losses": "yes" if family.outline.routers else traits.routers_why,
        }
    else:
        result["parallelism"] = EXPERT_AXES if config.experts else NATIVE_AXES
    console.result(table([(name, _shown(value)) for name, value in result.items() if value != ""]))
    return result


def compose(
    console: Console,
    text: Annotated[Path, typer.Argument(metavar="TEXT", help="A text model's folder.")],
    image: Annotated[
        Path,
        typer.Option(metavar="ENCODER", help="A vision model's folder: CLIP, SigLIP or DINOv2."),
    ],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="OUT", help="A new folder.")],
    projector: Annotated[
        Literal["mlp", "linear", "pixel_shuffle"], typer.Option(help="What is between the two.")
    ] = "mlp",
    scale_factor: Annotated[
        int | None,
        typer.Option(
            min=2, help="Side of the square of features that a pixel shuffle joins. Default: 2."
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the projector's weights.")] = 0,
    scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Draw the vision model's weights from the seed too."),
    ] = False,
) -> JsonObject:
    """Put a vision model before a text model, as LLaVA does."""
    from penstock.compose.build import choose_form, compose_folders
    from penstock.compose.parts import Encoder, TextModel
    from penstock.config.schema.model import SCALE_FACTOR
    from penstock.core.errors import ConfigError

    if scale_factor is not None and projector != "pixel_shuffle":
        raise ConfigError(
            f"--scale-factor is of a pixel shuffle, and --projector is {projector}.\n"
            "  Write --projector pixel_shuffle, or leave --scale-factor out."
        )
    encoder = Encoder(str(image), None if scratch else image)
    form = choose_form(projector, scale_factor or SCALE_FACTOR)
    result = compose_folders(TextModel.of_folder(text), encoder, out, form, seed=seed)
    result["folder"] = str(out)
    console.say(f"composed: {result['parameters']:,} parameters, in {out}")
    return result


def _entry(backend: str, parallelism: str, documents: str, proof: Any = None) -> JsonObject:
    """How a model type is trained; `proof` says what was proved of one that is not native."""
    return {
        "backend": backend,
        "parallelism": parallelism,
        "documents": documents,
        "lora": "yes" if proof is None or proof.lora else "no",
        "reason": proof.reason if proof else "",
    }


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value)
    return f"{value:,}" if isinstance(value, int) else str(value)


commands = typer.Typer(help="List the models that can be trained, check one, or compose one.")


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
add_command(commands, compose)
