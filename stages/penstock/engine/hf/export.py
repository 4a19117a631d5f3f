"""Export a checkpoint to folders that transformers and PEFT load.

Without adapters there is `hf/`. With adapters there is `adapter/`, and `hf/` with the merged model
if requested. A randomly initialized base model exists nowhere else, so it is exported as `base/`.
If adapters were merged during training (ReLoRA), the adapters alone are not the result: there is
only `hf/`.
"""

import json
import logging
import operator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from penstock.core.files import read_json_object
from penstock.core.sources.hub import local_folder
from penstock.core.sources.pin import CONFIG_AND_CODE
from penstock.engine.checkpoint.model_reader import CheckpointReader
from penstock.engine.hf.base_model import BaseModelWeights
from penstock.engine.hf.config import read_hf_config
from penstock.engine.hf.converted_weights import as_published
from penstock.engine.hf.export_adapter import Adapters, adapters_in, write_adapter_folder
from penstock.engine.hf.prediction_layers import (
    copies_of_ends,
    prediction_layers,
    trained_in,
    with_copies,
    without_prediction_layers,
)
from penstock.engine.hf.safetensors_reader import SafetensorsFolder
from penstock.engine.hf.save_model import (
    DTYPES,
    HFFolderMeta,
    declared_dtype,
    dtype_name,
    write_hf_folder,
)
from penstock.engine.hf.state_dict import HFStateDict, in_checkpoint, in_multimodal, in_source
from penstock.engine.hf.stored_forms import in_files_form, parts_in
from penstock.engine.hf.tokenizer_files import TokenizerFiles
from penstock.engine.hf.verify_folder import (
    NotVerifiedError,
    noting_unverified,
    verify_adapter,
    verify_model,
)
from penstock.engine.hf.verify_logits import verify_logits
from penstock.engine.hf.weight_files import absent_tensors, prediction_tensors
from penstock.engine.model_source import ExportFormat, ModelSource
from penstock.engine.quantization.export import Quantizer, quantizer_for
from penstock.engine.vision.build import build_outline, trained_shapes
from penstock.models.automodel.build import absent_rope
from penstock.models.automodel.weight_map import AutoWeightMap
from penstock.models.registry import get_family

log = logging.getLogger("penstock.export")

GENERATION_CONFIG = "generation_config.json"

# The base model path in an adapter's config if the base is exported beside it: relative, so that
# the two may be moved together.
BASE_BESIDE = "../base"


def write_folders(
    checkpoint: Path, origin: ModelSource, form: ExportFormat, out: Path
) -> dict[str, Any]:
    """Write all folders, keeping files that an earlier attempt finished, and return facts. Raises
    ArtifactError if the checkpoint is incomplete or of another model."""
    reader = CheckpointReader(checkpoint)
    config_path = origin.config_path
    if origin.config.pin["kind"] != "builtin":
        files = CONFIG_AND_CODE if origin.runs_code else ("config.json",)
        config_path = str(local_folder(config_path, origin.config, files))
    hf_config = read_hf_config(config_path, origin.foundation, runs_code=origin.runs_code)
    family = get_family(hf_config, origin.backend, adapters=origin.adapting is not None)
    config = family.trained_config(hf_config, mtp=trained_in(reader, family, hf_config))
    names = family.weight_map(config)
    if names.multimodal:
        names = replace(names, vision=trained_shapes(reader.shapes(), hf_config))
    reads_base = origin.quantizing or reader.state["adapter_only"] or names.is_multimodal
    folder = _folder(origin) if reads_base else None
    vision = build_outline(hf_config) if names.vision else None
    weights = BaseModelWeights(names, origin.quantizing, hf_config, family.roles, folder, vision)
    adapters = adapters_in(reader, names, origin.adapting)
    quantizer = None
    if form.quantize:
        # Layers that predict further tokens are not quantized.
        plain = family.weight_map(family.read(hf_config))
        quantizer = quantizer_for(form.quantize, family, plain)
    extras = HFFolderMeta(
        without_prediction_layers(hf_config, family) if form.mtp == "drop" else hf_config,
        TokenizerFiles(origin.tokenizer_path, origin.tokenizer, origin.chat_template),
        _generation_config(origin),
    )
    export = _Export(form, origin, weights, extras, quantizer)
    with ExitStack() as opened:
        base = export.base_weights(reader, opened)
        if adapters and reader.state["adapter_only"]:
            written = export.write_adapters(base, adapters, out)
        else:
            merged = adapters.merged_into(base) if adapters else base
            written = {"hf": export.write_model(merged, out / "hf", quantizer)}
    return {
        "format": "hf",
        "folders": {name: name for name in written},
        "step": reader.state["step"],
        "model_type": family.model_type,
        "dtype": dtype_name(export.dtype),
        "parameters": written.get("hf", written.get("adapter", {}))["parameters"],
        "shards": written.get("hf", {}).get("shards", 0),
        **({"quantised": form.quantize} if form.quantize else {}),
        **({"adapter": written["adapter"]} if "adapter" in written else {}),
    }


@dataclass(frozen=True)
class _Export:
    form: ExportFormat
    origin: ModelSource
    model: BaseModelWeights
    extras: HFFolderMeta
    quantizer: Quantizer | None

    def base_weights(self, reader: CheckpointReader, opened: ExitStack) -> HFStateDict:
        """The model without its adapters, which an adapter-only checkpoint does not hold."""
        model = self.model
        if not reader.state["adapter_only"]:
            return in_checkpoint(reader, model.names, model.formats)
        # Adapters were trained on the quantized matrices, so these are exported, not the originals.
        if (base_folder := _folder(self.origin)) is None:
            source = model.random_init(self.origin.seed)
        else:
            source = opened.enter_context(SafetensorsFolder(base_folder))
        return in_source(model.quantized_reader(source), model.names)

    def write_adapters(self, base: HFStateDict, adapters: Adapters, out: Path) -> dict[str, Any]:
        form, origin = self.form, self.origin
        written: dict[str, Any] = {}
        if form.merged:
            merged = adapters.merged_into(base)
            written["hf"] = self.write_model(merged, out / "hf", self.quantizer)
        if origin.chat_template or not form.merged:
            # Elsewhere there is no tokenizer with this chat template, or none at all.
            self.extras.tokenizer.write(out / "adapter")
        written["adapter"] = write_adapter_folder(
            adapters,
            out / "adapter",
            base_model=origin.model_path or BASE_BESIDE,
            revision=origin.weights.pin.get("commit") if origin.weights else None,
            dtype=None if form.dtype == "auto" else DTYPES[form.dtype],
        )
        if origin.model_path and (rope := absent_rope(self.extras.hf_config)):
            log.warning(
                "export: adapter/ is of a base model with the rope_theta of attn_config, which "
                "transformers 5 does not read: add %s to the config.json of %s before loading both",
                *(json.dumps(rope)[1:-1], origin.model_path),
            )
        if form.verify != "off":
            with noting_unverified(out / "adapter"):
                verify_adapter(out / "adapter", self.model.hf_config)
        if origin.model_path is None:
            written["base"] = self.write_model(base, out / "base", None)
        return written

    def write_model(
        self, weights: HFStateDict, out: Path, quantizer: Quantizer | None
    ) -> dict[str, Any]:
        form, origin, model, dtype = self.form, self.origin, self.model, self.dtype
        with ExitStack() as opened:
            state_dict = as_in_files(weights, model, opened)
            num_layers = model.names.config.num_hidden_layers
            if form.mtp == "drop":
                state_dict = state_dict.without(prediction_tensors(state_dict.shapes, num_layers))
            else:
                state_dict = self._with_prediction_layers(state_dict, opened)
                further = prediction_tensors(state_dict.shapes, num_layers)
                quantizer = quantizer and quantizer.leaving_out(further)
            facts = write_hf_folder(
                state_dict,
                out,
                self.extras,
                dtype=dtype,
                max_shard_size=form.max_shard_bytes,
                quantizer=quantizer,
            )
        if form.verify != "off":
            with noting_unverified(out):
                verify_model(out, _folder(origin), runs_code=origin.runs_code)
        if form.verify == "logits":
            with noting_unverified(out):
                if quantizer:
                    raise NotVerifiedError(
                        "the logits of a quantized model are not those of training"
                    )
                verify_logits(weights, model.names, out, dtype, runs_code=origin.runs_code)
        return facts

    def _with_prediction_layers(self, weights: HFStateDict, opened: ExitStack) -> HFStateDict:
        config = self.model.names.config
        copies = copies_of_ends(config)
        if (base_folder := _folder(self.origin)) is None:
            return with_copies(weights, copies)
        folder = opened.enter_context(SafetensorsFolder(base_folder))
        names = prediction_tensors(folder.names(), config.num_hidden_layers)
        weights = with_copies(weights, {name: of for name, of in copies.items() if name in names})
        # What was not trained, as the base model has it.
        missing = [name for name in names if name not in weights.shapes]
        return weights.joined(prediction_layers(folder, missing, self.model.published))

    @property
    def dtype(self) -> torch.dtype:
        if self.form.dtype != "auto":
            return DTYPES[self.form.dtype]
        if declared := declared_dtype(self.extras.hf_config):
            return declared if self.origin.model_path else torch.float32
        if (folder := _folder(self.origin)) is None:
            return torch.float32
        with SafetensorsFolder(folder) as weights:
            # As dtype="auto" of transformers: that of the first floating-point tensor.
            stored = (weights.stored(name).dtype for name in weights.names())
            return next(filter(operator.attrgetter("is_floating_point"), stored), torch.float32)


def as_in_files(weights: HFStateDict, model: BaseModelWeights, opened: ExitStack) -> HFStateDict:
    """The tensors as the model's files have them, with those that are not trained here."""
    if isinstance(model.names, AutoWeightMap):
        published = as_published(weights, model.hf_config, model.names)
        if model.folder is None:
            return published
        folder = opened.enter_context(SafetensorsFolder(model.folder))
        absent = absent_tensors(folder.names(), model.names)
        return published.joined(prediction_layers(folder, absent, model.published))
    if not model.names.multimodal:
        return weights
    assert model.folder is not None
    folder = opened.enter_context(SafetensorsFolder(model.folder))
    local_base = model.here(folder)
    weights = in_files_form(weights, local_base, parts_in(model.names, local_base))
    return in_multimodal(weights, folder, model.vision_names(folder))


def _folder(origin: ModelSource) -> Path | None:
    if origin.model_path is None or origin.weights is None:
        return None
    return local_folder(origin.model_path, origin.weights)


def _generation_config(origin: ModelSource) -> dict[str, Any] | None:
    source, typed = origin.config, origin.config_path
    if origin.weights and origin.model_path:
        source, typed = origin.weights, origin.model_path
    if source.pin["kind"] == "hub":
        file = local_folder(typed, source, (GENERATION_CONFIG,)) / GENERATION_CONFIG
        return read_json_object(file) if file.is_file() else None
    pinned = [path for path in source.paths if path.name == GENERATION_CONFIG]
    return read_json_object(pinned[0]) if pinned else None
