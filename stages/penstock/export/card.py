"""Model cards: a README.md in each exported folder, in the format of the Hugging Face Hub.

All content comes from manifests and facts, so equal runs have equal cards. Cards contain nothing
about the machine and no data samples.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from penstock.config.schema.memory import MemoryConfig
from penstock.core.cache.stage import Artifact
from penstock.core.files import atomic_write, read_json_object
from penstock.engine.model_source import ModelSource
from penstock.engine.peft.adapter_config import CONFIG
from penstock.export.base_model import BaseModel, read_base_model, read_model_folder
from penstock.export.card_text import (
    adapter_snippet,
    code,
    count,
    describe_adapter,
    model_snippet,
    number,
    pairs,
    section,
)
from penstock.export.data_text import data_section
from penstock.export.license import CARD, copy_license_files
from penstock.export.lineage import Lineage, has_chat_template

MARKUP = "\\`*_[]<>#|&!~$"
"""Markdown special characters."""

OBJECTIVES = {"sft": "next-token cross-entropy over the trained tokens"}
"""The training objective by kind of data."""

START_INPUTS = {"checkpoint": "a checkpoint of another run", "adapter": "an existing adapter"}
"""What a run can start from, by input name of the train stage."""

PRECISION_SETTINGS = ("enable_mixed_precision", "precision", "master_weights")
"""Settings that together describe compute and storage precision."""

VERSION_NAMES = ("penstock", "torch", "transformers", "commit")  # Packages whose versions are shown


@dataclass(frozen=True)
class Export:
    """Data for the cards, known once all folders are written."""

    facts: Mapping[str, Any]
    key: str
    origin: ModelSource
    base: BaseModel | None
    adapter: Mapping[str, Any] | None  # The adapter_config.json, if there are adapters
    lineage: Lineage


def write_cards(
    out: Path, facts: Mapping[str, Any], *, key: str, origin: ModelSource, trained: Artifact
) -> None:
    """Write the cards of the model and of the adapter, if any, and copy the license texts of the
    base model.

    `facts` and `key` are those of the export. A randomly initialized base model has no card.
    """
    folders, model_type = facts["folders"], facts["model_type"]
    adapter = read_json_object(out / "adapter" / CONFIG) if "adapter" in folders else None
    export = Export(facts, key, origin, read_base_model(origin), adapter, Lineage.of(trained))
    model_folder = out / folders.get("hf", folders.get("adapter", ""))
    prompting = "chat" if has_chat_template(model_folder) else "text"
    tokenizer = "here"
    if "hf" in folders and not origin.chat_template:
        is_of_base = origin.model_path in (None, origin.tokenizer_path)
        tokenizer = "of the base" if is_of_base else "in hf"
    snippets = {
        "hf": model_snippet(prompting, model_type),
        "adapter": adapter_snippet(prompting, model_type, tokenizer),
    }
    for name, use in snippets.items():
        if name not in folders:
            continue
        folder = out / folders[name]
        _save_card(folder, _front_matter(export, name), _body(export, name, use))
        if export.base and export.base.folder:
            copy_license_files(export.base.folder, folder)


def write_merged_card(
    out: Path, base: Path, adapter: Path, config: Mapping[str, Any], facts: Mapping[str, Any]
) -> None:
    """Write README.md to `out`, the model in `base` merged with the adapter in `adapter`.

    `config` is the adapter_config.json, `facts` are those of the merge. The license texts of both
    are copied; if names collide, the base model's is used.
    """
    base_model, adapter_model = read_model_folder(base), read_model_folder(adapter)
    prompting = "chat" if has_chat_template(out) else "text"
    model_type = str(read_json_object(out / "config.json").get("model_type"))
    names = [model.name.rpartition("/")[2] for model in (base_model, adapter_model)]
    license_ = adapter_model.license
    rows = {
        "base model": describe_base(base_model),
        "adapter": describe_base(adapter_model),
        "adapter type": describe_adapter(config),
        "merged into": f"{facts['changed']:,} of {count(facts['tensors'], 'tensor')}",
        "license": _describe_license(base_model),
        "license of the adapter": code(license_.display_name) if license_ else "",
    }
    use = section("Use", model_snippet(prompting, model_type))
    tags = ["penstock", "lora", "merged"]
    data = front_matter(base_model, "finetune", library_name="transformers", tags=tags)
    _save_card(out, data, "\n\n".join([_heading(" with ".join(names)), pairs(rows), use]))
    for folder in (base, adapter):
        copy_license_files(folder, out)


def _save_card(folder: Path, data: ModelCardData, body: str) -> None:
    card = ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n")
    with atomic_write(folder / CARD) as part:
        card.save(part)


def front_matter(base: BaseModel | None, relation: str, **more: Any) -> ModelCardData:
    """The front matter fields that all cards have. A base model that is not known to be on the Hub
    is omitted, because the Hub would link to it."""
    repos = base.repos if base else []
    license_ = base.license.front_matter if base and base.license else {}
    return ModelCardData(
        base_model=repos[0] if len(repos) == 1 else repos or None,
        base_model_relation=relation if repos else None,
        pipeline_tag="text-generation",
        **license_,
        **more,
    )


def _heading(text: str) -> str:
    title = " ".join(text.split())
    return "# " + "".join(
        f"\\{character}" if character in MARKUP else character for character in title
    )


def describe_base(base: BaseModel) -> str:
    """The base model with its commit, as part of a sentence."""
    if base.parts:
        return " with ".join(map(describe_base, base.parts))
    if base.drawn:
        return f"{code(base.name)} (random weights)"
    if not base.repo:
        return code(base.name)
    commit = f" at {code(base.commit[:12])}" if base.commit else ""
    return f"[{base.repo}](https://huggingface.co/{base.repo}){commit}"


def _describe_license(base: BaseModel) -> str:
    if not base.license:
        return "unknown; check the base model's license before you redistribute this model"
    name, link = code(base.license.display_name), base.license.link
    # Angle brackets delimit the link; they end at characters that no valid link has.
    if link is not None and not any(marker in link for marker in "<> \n"):
        name = f"[{name}](<{link}>)"
    return f"that of the base model, {name}"


def _front_matter(export: Export, name: str) -> ModelCardData:
    lineage = export.lineage
    evaluation: dict[str, Any] = {}
    if (loss := lineage.train["facts"].get("eval_loss")) is not None:
        data = ", ".join(dict.fromkeys(source["label"] for source in lineage.sources))
        result = EvalResult(
            task_type="text-generation",
            dataset_type=lineage.datasets[0] if len(lineage.datasets) == 1 else "held-out",
            dataset_name=f"{data or 'data'}, held out",
            metric_type="loss",
            metric_name="cross-entropy of a token",
            metric_value=round(loss, 6),
        )
        evaluation = {"model_name": _title(export), "eval_results": [result]}
    return front_matter(
        export.base,
        "finetune" if name == "hf" else "adapter",
        library_name="transformers" if name == "hf" else "peft",
        datasets=lineage.datasets or None,
        tags=["penstock", *(["lora"] if export.adapter else [])],
        **evaluation,
    )


def _title(export: Export) -> str:
    start = export.base.name if export.base else f"{export.facts['model_type']} from scratch"
    labels = [source["label"] for source in export.lineage.sources if source["role"] == "train"]
    on = f" on {', '.join(dict.fromkeys(labels))}" if labels else ""
    return f"{start.rpartition('/')[2]} fine-tuned{on}" if export.base else f"{start}{on}"


def _body(export: Export, name: str, use: str) -> str:
    facts = export.lineage.train["facts"]
    losses = {"final training loss": "final_loss", "evaluation loss": "eval_loss"}
    results = {
        title: number(facts[fact]) for title, fact in losses.items() if facts.get(fact) is not None
    }
    parts = [
        _heading(_title(export)),
        _summary(export, name),
        section("Use", use),
        data_section(export.lineage),
        _recipe(export),
        section("Results", pairs(results)),
        _lineage(export),
    ]
    return "\n\n".join(part for part in parts if part)


def _summary(export: Export, name: str) -> str:
    facts, base = export.facts, export.base
    dtype = facts["dtype"] if name == "hf" else ""
    if dtype and "quantised" in facts:
        dtype = f"{code(facts['quantised'])} in linear layers, {dtype} elsewhere"
    rows = {
        "base model": describe_base(base) if base else "none: trained from scratch",
        "architecture": code(facts["model_type"]),
        "parameters": f"{facts['parameters']:,}" if name == "hf" else "",
        "dtype of the weights": dtype,
        "adapter": describe_adapter(export.adapter) if export.adapter else "",
        "adapter parameters": f"{facts['adapter']['parameters']:,}" if export.adapter else "",
        "license": _describe_license(base) if base else "",
    }
    notes: list[str] = []
    if export.adapter and name == "hf":
        notes.append("The adapter is merged into these weights; `adapter/` holds it alone.")
    elif not base and name == "adapter":
        notes.append("Its base weights are not published; they are in `../base`.")
    if "quantised" in facts and name == "hf":
        notes.append(
            "Loads in vLLM and SGLang, and in transformers with `compressed-tensors` installed."
        )
    return "\n\n".join(paragraph for paragraph in (pairs(rows), *notes) if paragraph)


def _recipe(export: Export) -> str:
    lineage = export.lineage
    settings: Mapping[str, Any] = lineage.train.get("settings", {})
    facts: Mapping[str, Any] = lineage.train["facts"]
    train: Mapping[str, Any] = settings.get("train", {})
    if not train:
        return ""
    length = lineage.packing.get("sample_packing_sequence_len")
    row = count(settings["rows_per_step"], "row") + (f" of {length:,} tokens" if length else "")
    kind = lineage.prepared.get("kind", "")
    lora: Mapping[str, Any] = settings.get("lora", {})
    inputs = lineage.train.get("inputs", {})
    trained = _describe_trained_weights(settings)
    if formats := facts.get("quantised", ()):
        trained += f", in {' and '.join(map(code, formats))}"
    optimizer = f"{code(train['optimizer'])}, weight decay {number(train['weight_decay'])}"
    for name, value in train.get("optimizer_kwargs", {}).items():
        optimizer += f", {name} {code(json.dumps(value))}"
    lr = _describe_lr(train)
    if (ratio := lora.get("lora_plus_ratio", 1.0)) != 1:
        lr += f"; {number(ratio)} times as large for lora_B (LoRA+)"
    norm = train["max_grad_norm"]
    rows = {
        "objective": OBJECTIVES.get(kind, code(kind)),
        "trained parameters": trained,
        "optimizer": optimizer,
        "learning rate": lr,
        "gradient clipping": f"max norm {number(norm)}" if norm else "none",
        "started from": " and ".join(text for name, text in START_INPUTS.items() if name in inputs),
        "global batch size": row,
        "steps": f"{facts['steps']:,}, {count_epochs(facts['epochs'])}",
        "tokens seen": f"{facts['tokens']:,}",
        "trained tokens": f"{facts['trained_tokens']:,}",
        "precision": _describe_precision(train),
        "dropout": _describe_dropout(train.get("dropout", {}), lora.get("lora_dropout", 0.0)),
        "seed": str(train["seed"]),
    }
    return section("Training", pairs(rows))


def _describe_trained_weights(settings: Mapping[str, Any]) -> str:
    if lora := settings.get("lora"):
        every = lora.get("merge_lora_interval")
        if every:
            return f"adapters, merged into the base model every {count(every, 'step')} (ReLoRA)"
        return "adapters; the base model is frozen"
    frozen = settings["model"].get("freeze_router", False)
    return "all weights except routers" if frozen else "all weights"


def count_epochs(epochs: float) -> str:
    """`1 epoch`, `2.5 epochs`."""
    return f"{epochs:.4g} epoch" + ("" if epochs == 1 else "s")


def _describe_precision(train: Mapping[str, Any]) -> str:
    written = {name: train[name] for name in PRECISION_SETTINGS if name in train}
    memory_config = MemoryConfig.model_validate(written)
    rounds = train["optimizer"] in ("anyprecision_adamw", "muon", "novograd")
    states = "bfloat16" if rounds and train["optimizer_dtype"] == "bf16" else "float32"
    compute, weights = memory_config.computes_in, memory_config.keeps_in
    if compute == weights == states:
        return states
    if weights == states:
        return f"{compute}, weights and optimizer states in {states}"
    return f"{compute}, weights in {weights}, optimizer states in {states}"


def _describe_lr(train: Mapping[str, Any]) -> str:
    text = number(train["lr"])
    if train["optimizer"] == "muon":
        text += f" ({number(train['muon_lr'])} for matrices)"
    if train.get("lr_warmup_steps"):
        text += f", after a warmup of {count(train['lr_warmup_steps'], 'step')}"
    elif train["lr_warmup_ratio"]:
        text += f", after a warmup of {train['lr_warmup_ratio']:.4g} of the steps"
    if train["lr_decay_style"] == "constant":
        return f"{text}, constant"
    by = "" if train["lr_decay_ratio"] == 1 else f" at {train['lr_decay_ratio']:.4g} of the steps"
    return f"{text}, decaying to {number(train['lr_min'])}{by} ({train['lr_decay_style']})"


def _describe_dropout(written: Mapping[str, Any], of_adapters: float) -> str:
    of = {"hidden": "hidden states", "ffn": "feed-forward activations"}
    named = [f"{written[name]} of {dropout}" for name, dropout in of.items() if written.get(name)]
    text = " and ".join(named)
    if written.get("depth_scaling"):
        text += ", less in earlier layers"
    if steps := written.get("warmup_steps"):
        text += f", after a warmup of {count(steps, 'step')}"
    adapters = f"{of_adapters} of adapters" if of_adapters else ""
    return "; ".join(filter(None, (text, adapters)))


def _lineage(export: Export) -> str:
    keys = {**export.lineage.keys, "export": export.key}
    made_by: Mapping[str, str] = export.lineage.train.get("code", {})
    with_what = ", ".join(
        f"{name} {code(made_by[name])}" for name in VERSION_NAMES if name in made_by
    )
    return section(
        "Lineage",
        "Each stage's cache key is a digest of its settings and inputs.",
        pairs({stage: code(key) for stage, key in keys.items()}),
        f"Trained with {with_what}." if with_what else "",
    )
