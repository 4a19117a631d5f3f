"""Stand-ins for what a translated file names: a tiny model of the same family, and records in the
form that the file declares."""

import copy
import json
import re
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import datasets
import torch
import transformers

from penstock.models.automodel.build import language_config
from penstock.models.automodel.media.absent_tower import has_absent_tower, without_tower
from tests.engine.automodel import tiny_images, tiny_models
from tests.engine.automodel.tiny_images import AUDIO_TYPES, IMAGE_TYPES
from tests.media import tiny_processors
from tests.models.stored import published
from tests.stages.prepare.megatron_files import write_mapped

FAMILIES = (
    (r"Qwen3\.[5-9].*-A\d+B", "qwen3_5_moe"),
    (r"Qwen3\.[5-9]", "qwen3_5"),
    (r"Qwen3-Next", "qwen3_next"),
    (r"Qwen3-VL.*-A\d+B", "qwen3_vl_moe"),
    (r"Qwen3-VL", "qwen3_vl"),
    (r"Qwen3.*-A\d+B|qwen3_moe", "qwen3_moe"),
    (r"Qwen3|Plano", "qwen3"),
    (r"Qwen2\.5-VL", "qwen2_5_vl"),
    (r"Qwen2-VL", "qwen2_vl"),
    (r"Qwen1\.5-MoE", "qwen2_moe"),
    (r"Qwen2|Qwen1\.5|cogito.*qwen|DeepCoder|Spark", "qwen2"),
    (r"Llama-4", "llama4"),
    (r"Llama-3\.2-\d\dB-Vision", "mllama"),
    (r"llava", "llava"),
    (r"unsloth/Phi-", "llama"),
    (r"ERNIE.*VL", "ernie4_5_vl_moe"),
    (r"ERNIE.*-A\d+B", "ernie4_5_moe"),
    (r"ERNIE", "ernie4_5"),
    (r"gemma-3n", "gemma3n"),
    (r"gemma-4", "gemma4"),
    (r"gemma-3-(1b|270m)|functiongemma|embeddinggemma", "gemma3_text"),
    (r"gemma-3", "gemma3"),
    (r"gemma-2-", "gemma2"),
    (r"gemma", "gemma"),
    (r"GLM-4\.7-Flash", "glm4_moe_lite"),
    (r"GLM-5", "glm_moe_dsa"),
    (r"GLM-4\.\dV", "glm46v"),
    (r"GLM-4\.[5-7]", "glm4_moe"),
    (r"GLM-4", "glm4"),
    (r"gpt-oss", "gpt_oss"),
    (r"granite-4", "granitemoehybrid"),
    (r"Hunyuan", "hunyuan_v1_dense"),
    (r"InternVL", "internvl"),
    (r"Jamba", "jamba"),
    (r"Kimi-Linear", "kimi_linear"),
    (r"LFM.*VL", "lfm2_vl"),
    (r"LFM.*-A\d+B", "lfm2_moe"),
    (r"LFM", "lfm2"),
    (r"Mistral-Small-[34]|Magistral-Small-2509|Mistral-Medium|Ministral-3-", "mistral3"),
    (r"Voxtral", "voxtral"),
    (r"pixtral", "llava"),
    (r"Mixtral|zephyr-orpo", "mixtral"),
    (r"mamba", "mamba"),
    (r"MiniMax-M2", "minimax_m2"),
    (r"Nemotron-Mini", "nemotron"),
    (r"Nemotron-3", "nemotron_h"),
    (r"Olmo-3", "olmo3"),
    (r"PaddleOCR", "paddleocr_vl"),
    (r"Phi-[34]", "phi3"),
    (r"phi-", "phi"),
    (r"Seed-OSS", "seed_oss"),
    (r"SmolVLM", "smolvlm"),
    (r"SmolLM3", "smollm3"),
    (r"Trinity", "afmoe"),
    (r"AFM-", "arcee"),
    (r"Apertus", "apertus"),
    (r"gpt2|Cerebras-GPT", "gpt2"),
    (r"dbrx", "dbrx"),
    (r"DeepSeek-V4", "deepseek_v4"),
    (r"DeepSeek-V3", "deepseek_v3"),
    (r"DeepSeek-V2", "deepseek_v2"),
    (r"Falcon-H1", "falcon_h1"),
    (r"falcon-7b", "falcon"),
    (r"gpt-j", "gptj"),
    (r"mpt-", "mpt"),
    (r"pythia|neox|RedPajama", "gpt_neox"),
    (r"stablelm", "stablelm"),
    (r"starcoder2|starchat2", "starcoder2"),
    (r"command-r7b", "cohere2"),
    (r"Muse-Glimmer", "muse_glimmer"),
    (r"deepseek_ocr2", "deepseek_ocr2"),
    (r"csm-", "csm"),
    (r"whisper", "whisper"),
    (r"ModernBERT", "modernbert"),
    (r"mistral|zephyr|OpenHermes", "mistral"),
    (r"llama|SmolLM|Falcon-E|Yi-|Llasa|orpheus|xgen", "llama"),
)
"""Names of models, by regular expressions of which the first that matches counts, and their
`model_type`."""

OWN_CODE = (
    (r"Qwen-7B", "qwen"),
    (r"btlm", "btlm"),
    (r"replit", "replit_lm"),
    (r"MOSS-VL", "moss_vl"),
    (r"MiMo-7B", "mimo"),
    (r"deepseek_ocr", "deepseek_ocr"),
)
"""Models whose repositories hold their code."""

NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
QUANTIZED: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"bnb-4bit|bnb-nf4", NF4),
    (r"GPTQ", {"quant_method": "gptq", "bits": 4}),
    (r"AWQ", {"quant_method": "awq", "bits": 4}),
    (r"AQLM", {"quant_method": "aqlm"}),
    (r"NVFP4", {"quant_method": "modelopt", "quant_algo": "NVFP4"}),
    (r"prequantized", {"quant_method": "bitnet"}),
)
"""What config.json of such a name says of its weights."""

CHANGES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"GLM-4\.5", {"head_dim": 128}),
    (r"LFM2(\.5)?-[\d.]+[BM]($|-[BI])", {"layer_types": ["conv", "full_attention"] * 16}),
    (r"gemma-4-\d", {"text_config": {"hidden_size_per_layer_input": 0}}),
    (r"Mistral-Small-4", {"text_config": {"model_type": "mistral4"}}),
    (r"Cerebras-GPT", {"n_positions": 2048}),
    (r"dbrx", {"attn_config": {"clip_qkv": 8, "kv_n_heads": 8, "rope_theta": 500_000}}),
    (r"ERNIE-4\.5-300B", {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}),
)
"""What their configs have, where the default of the type has another value."""

LONG = 131_072
"""Positions of models that rotate queries and keys, whose weights do not depend on it."""

PROCESSORS = {
    "qwen2_vl": "qwen2_5_vl",
    "qwen3_vl_moe": "qwen3_vl",
    "qwen3_5": "qwen3_vl",
    "qwen3_5_moe": "qwen3_vl",
    "smolvlm": "idefics3",
    "glm46v": "glm4v",
}
"""Families with the processor of another."""

OF_OBJECTIVE = {"pretrain": "text", "preference": "preference"}
"""What is trained on where no type is declared, besides conversations."""

QUESTION, ANSWER = "What follows one?", "Two follows one."
RECORDS = 20


def model_type(name: str) -> tuple[str, bool]:
    """The type of the model with this name, and whether its code is its own."""
    for families, is_own in ((OWN_CODE, True), (FAMILIES, False)):
        for pattern, kind in families:
            if re.search(pattern, name, re.IGNORECASE):
                return kind, is_own
    return "llama", False


class StandIns:
    """Models and data in a folder; a model is written once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = cache(self._model)

    def put(self, settings: Mapping[str, Any], at: Path, file: str = "") -> dict[str, Any]:
        """The settings of a translation with stand-ins, whose data and results are in `at`; the
        name of its file says what its model is if nothing else does."""
        shutil.rmtree(at, ignore_errors=True)
        at.mkdir(parents=True)
        values: dict[str, Any] = copy.deepcopy(dict(settings))
        model, data = values.setdefault("model", {}), values.setdefault("data", {})
        train = values.setdefault("train", {})
        written = str(model.get("model_path") or model.get("config_path"))
        if not written.startswith("builtin:"):
            folder, has_weights = self.model(file if written.startswith("/home") else written)
            is_trained_further = bool(model.pop("model_path", None)) and has_weights
            model["config_path"] = None if is_trained_further else folder
            model["model_path"] = folder if is_trained_further else None
        if "tokenizer_path" in model:
            model["tokenizer_path"] = "builtin:bytes"
        for name in ("datasets", "test_datasets"):
            for index, dataset in enumerate(data.get(name, ())):
                self._put_data(dataset, train, at / f"{name}{index}")
        if not data.get("datasets"):
            kind = OF_OBJECTIVE.get(train.get("objective", ""), "chat")
            data["datasets"] = [{"path": str(write_records(at / "rows.jsonl", kind, {}))}]
        data["dataset_prepared_path"] = str(at / "prepared")
        train["output_dir"] = str(at / "out")
        for section, name in (("train", "init_checkpoint_path"), ("lora", "init_adapter_path")):
            values.get(section, {}).pop(name, None)
        if values.get("push", {}).get("repo_id"):
            values["push"]["dry_run"] = True
        return values

    def _put_data(self, dataset: dict[str, Any], train: Mapping[str, Any], at: Path) -> None:
        kind = dataset.get("type") or OF_OBJECTIVE.get(train.get("objective", ""), "chat")
        for name in ("name", "split", "revision", "data_files", "streaming", "image_folder"):
            if name != "split" or "splits_string" not in dataset:
                dataset.pop(name, None)
        if dataset.get("ds_type") not in ("arrow", "megatron"):
            dataset.pop("ds_type", None)
        if dataset.get("ds_type") == "megatron":
            tokens = [list(range(3, 250))]
            dataset["path"] = str(write_mapped(at, [tokens] * RECORDS))
        elif dataset.get("ds_type") == "arrow":
            rows = {"input_ids": [[3, 4, 5]] * RECORDS, "labels": [[3, 4, 5]] * RECORDS}
            datasets.Dataset.from_dict(rows).save_to_disk(at)
            dataset["path"] = str(at)
        else:
            dataset["path"] = str(write_records(at.with_suffix(".jsonl"), kind, dataset))

    def _model(self, name: str) -> tuple[str, bool]:
        """The folder of a model, and whether it has weights."""
        kind, is_own = model_type(name)
        declared = next((how for mark, how in QUANTIZED if re.search(mark, name, re.I)), None)
        changes = next((how for mark, how in CHANGES if re.search(mark, name, re.I)), {})
        marks = (*([declared["quant_method"]] if declared else ()), *changes)
        folder = self.folder / "-".join((kind, *marks))
        if not (folder / "config.json").is_file():
            folder.mkdir(parents=True)
            if is_own:
                values = {"model_type": kind, "auto_map": {"AutoConfig": f"code_{kind}.Config"}}
                (folder / "config.json").write_text(json.dumps(values))
            else:
                _write_model(folder, kind, changes)
            _write_tokenizer(folder, kind)
            if declared:
                file = folder / "config.json"
                values = json.loads(file.read_text())
                file.write_text(json.dumps({**values, "quantization_config": declared}))
        return str(folder), any(folder.glob("*.safetensors"))


def _write_model(folder: Path, kind: str, changes: Mapping[str, Any]) -> None:
    """The default config of a type, with the header of its weights; the config alone where no model
    can be built from it."""
    has_media = kind in (*IMAGE_TYPES, *AUDIO_TYPES)
    lacking = tiny_images.ARGUMENTS if has_media else tiny_models.OVERRIDES
    auto = transformers.AutoModelForMultimodalLM if has_media else transformers.AutoModelForCausalLM
    config = transformers.CONFIG_MAPPING[kind](**{**lacking.get(kind, {}), **changes})
    if has_media:
        values = tiny_images.merged(config.to_dict(), tiny_images.OVERRIDES.get(kind, {}))
        config = type(config).from_dict(values)
    text = language_config(config)
    if hasattr(text, "rope_parameters") and hasattr(text, "max_position_embeddings"):
        text.max_position_embeddings = LONG
    config.save_pretrained(folder)
    try:
        with torch.device("meta"):
            built = without_tower(config) if has_absent_tower(config) else config
            model = auto.from_config(built if has_media else text, dtype=torch.bfloat16)
    except (ValueError, ImportError, AttributeError, KeyError, TypeError) as error:
        (folder / "why_no_weights.txt").write_text(repr(error))
        return
    _write_header(folder / "model.safetensors", published(model, model.state_dict()))


def _write_header(file: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """A file of weights whose bytes are not stored: as long as its header says, and sparse."""
    header: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + 2 * tensor.numel()
        header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)


def _write_tokenizer(folder: Path, kind: str) -> None:
    family = PROCESSORS.get(kind, kind)
    if family in tiny_processors.FAMILIES or family == "mistral3":
        template = tiny_processors.CHATML.replace("IMAGE", "<image>")
        is_of_parts = family.startswith("llava")
        tiny_processors.write_processor(family, folder, template if is_of_parts else None)
    else:
        tiny_processors.write_tokenizer(folder, [], {}, bos="<s>")
        template = tiny_processors.CHATML.replace("IMAGE", "")
        (folder / "chat_template.jinja").write_text(template)


def write_records(file: Path, kind: str, declared: Mapping[str, Any]) -> Path:
    """Records of a format, under the names that a data set declares."""
    record = _record(kind, lambda name, default: declared.get(f"field_{name}") or default)
    rows = [record | ({"label": row % 2 == 0} if kind == "kto" else {}) for row in range(RECORDS)]
    if kind == "kto" and declared.get("field_label"):
        rows = [{**row, declared["field_label"]: row["label"]} for row in rows]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def _record(kind: str, named: Any) -> dict[str, Any]:
    keys = ("from", "value") if kind == "sharegpt" else ("role", "content")
    role, content = named("message_role", keys[0]), named("message_content", keys[1])
    question = {role: "human" if kind == "sharegpt" else "user", content: QUESTION}
    answer = {role: "gpt" if kind == "sharegpt" else "assistant", content: ANSWER}
    messages = named("messages", "conversations" if kind == "sharegpt" else "messages")
    if kind in ("chat", "sharegpt"):
        return {messages: [question, answer]}
    if kind in ("instruction", "alpaca"):
        return {
            named("instruction", "instruction"): QUESTION,
            named("input", "input"): QUESTION,
            named("output", "output"): ANSWER,
        }
    if kind == "text":
        return {named("text", "text"): f"{QUESTION} {ANSWER}"}
    if kind == "preference":
        chosen, rejected = named("chosen", "chosen"), named("rejected", "rejected")
        if named("messages", None):
            return {messages: [question], chosen: answer, rejected: {**answer, content: "No."}}
        return {named("prompt", "prompt"): QUESTION, chosen: ANSWER, rejected: "No."}
    if kind == "kto":
        if named("messages", None):
            return {messages: [question, answer]}
        return {named("prompt", "prompt"): QUESTION, named("completion", "completion"): ANSWER}
    if kind == "sft_turns":
        return {"src": [QUESTION], "tgt": [ANSWER]}
    if kind == "preference_turns":
        return {"src": [QUESTION], "tgt": [], "response": [[ANSWER], ["No."]], "sort": [1, 0]}
    return {"input_ids": [3, 4, 5], "labels": [3, 4, 5]}
