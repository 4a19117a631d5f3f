"""A run on images, from records to an exported model that transformers loads with its processor."""

import json

import pytest
import torch
import transformers

from tests.cli.command import penstock
from tests.media.tiny_processors import write_processor
from tests.models.multimodal import CONFIGS, TEXT
from tests.pipeline.runs import write_run
from tests.stages.prepare.media.test_images import asking, expected, loaded, write_data
from tests.stages.prepared import write_lines

pytestmark = pytest.mark.usefixtures("warm_ranks")

CONVERSATIONS = [
    asking(),
    *(asking(f"{n % 6}.jpg", answer=f"The picture {n % 6}.") for n in range(10)),
    asking("1.jpg", "0.jpg", "3.jpg"),
]
VISION = {
    "ernie4_5_vl_moe": {"patch_size": 14},
    "llava": {"image_size": 28, "patch_size": 14},
    "qwen2_5_vl": {"patch_size": 14},
    "qwen3_vl": {"patch_size": 16},
}
_QWEN = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
TOKENS = {
    "ernie4_5_vl_moe": {
        "image_token_id": "<|IMAGE_PLACEHOLDER|>",
        "image_start_token_id": "<|IMAGE_START|>",
        "image_end_token_id": "<|IMAGE_END|>",
    },
    "llava": {"image_token_index": "<image>"},
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
}


def write_model(folder, family, write=write_processor):
    """A model and a processor, which `write` writes, that belong together."""
    write(family, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = dict(CONFIGS[family])
    config["vision_config"] = {**config["vision_config"], **VISION[family]}
    size = {"vocab_size": TEXT["vocab_size"]}
    config["text_config"] = {**config["text_config"], **size}
    config |= {name: ids[token] for name, token in TOKENS[family].items()}
    config = transformers.AutoConfig.for_model(family, **config)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(folder)
    return folder


def loss_of(folder, conversation):
    """By transformers, of a whole conversation with images."""
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    inputs = {k: torch.as_tensor(v) for k, v in expected(folder, conversation).data.items()}
    is_image = inputs["input_ids"] == loaded(folder).token_id
    assert is_image.any()
    labels = inputs["input_ids"].masked_fill(is_image, -100)
    with torch.no_grad():
        return model(**inputs, labels=labels).loss.item()


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "backend"),
    [
        ("qwen2_5_vl", "auto"),
        ("llava", "auto"),
        ("ernie4_5_vl_moe", "native"),
        ("qwen2_5_vl", "transformers"),
    ],
)
def test_images_are_prepared_packed_trained_on_and_exported(tmp_path, family, backend):
    model = write_model(tmp_path / "model", family)
    data = write_data(tmp_path / "data", CONVERSATIONS)
    sections = {
        "model": {
            "model_path": str(model),
            "config_path": None,
            "freeze": [],
            "foundation": {},
            "backend": backend,
        },
        "data": {
            "datasets": [{"path": str(data), "type": "chat"}],
            "sample_packing_sequence_len": 128,
            "val_set_size": 2,
        },
        "train": {"global_batch_size": 2, "num_train_epochs": 4, "eval_steps": 4},
    }
    config = write_run(tmp_path, **sections)
    said = penstock("run", config, "--json")
    assert said.code == 0, said.err
    records = [json.loads(x) for x in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in records if "loss" in one]
    assert losses[-1] < 0.7 * losses[0]
    assert any("eval_loss" in one for one in records)
    [exported] = (tmp_path / "artifacts/export").glob("*/hf")
    assert loss_of(exported, CONVERSATIONS[-1]) < 0.9 * loss_of(model, CONVERSATIONS[-1])
    # A plan knows the images now, and counts the vision part.
    parameters = transformers.AutoModelForImageTextToText.from_pretrained(model).num_parameters()
    planned = penstock("plan", config, "--json").last["costs"]["parameters"]
    assert planned == pytest.approx(parameters, rel=0.03)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("family", "how"),
    [("qwen2_5_vl", {}), ("qwen2_5_vl", {"encode_images": True}), ("llava", {})],
)
def test_answers_about_images_are_preferred_as_chosen(tmp_path, family, how):
    model = write_model(tmp_path / "model", family)
    write_data(tmp_path / "data", [])
    pairs = [
        {
            "conversations": [{"from": "human", "value": "<image>Which picture?"}],
            "chosen": {"from": "gpt", "value": f"The picture {n % 6}."},
            "rejected": {"from": "gpt", "value": f"Not a picture {n % 5}."},
            "images": [f"{n % 6}.jpg"],
        }
        for n in range(12)
    ]
    data = write_lines(tmp_path / "data" / "pairs.jsonl", pairs)
    sections = {
        "model": {"model_path": str(model), "config_path": None, "foundation": {}},
        "data": {
            "datasets": [{"path": str(data), "type": "preference"}],
            "sample_packing_sequence_len": 256,
            "val_set_size": 3,
            **how,
        },
        "train": {
            **{"objective": "preference", "global_batch_size": 2, "num_train_epochs": 6},
            **{"eval_at_start": True, "eval_at_end": True, "enable_mixed_precision": False},
        },
    }
    said = penstock("run", write_run(tmp_path, **sections), "--json")
    assert said.code == 0, said.err
    [reference] = [one for one in said.last["stages"] if one["stage"] == "reference"]
    assert reference["facts"]["samples"] == len(pairs)
    records = [json.loads(x) for x in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    before, *_, after = [one for one in records if "eval_loss" in one]
    # Nothing has moved yet: the model is its own reference.
    assert before["eval_loss"] == pytest.approx(0.693147, rel=1e-5)
    assert after["eval_loss"] < 0.9 * before["eval_loss"]
