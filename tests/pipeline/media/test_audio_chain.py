"""A run on audio, from records to an exported model that transformers loads with its processor."""

import json

import pytest
import torch
import transformers

from penstock.media.audio import decode_audio
from tests.cli.command import penstock
from tests.engine.automodel.tiny_images import tiny_image_config
from tests.media.sounds import MELS, RATE, write_audio_processor
from tests.pipeline.runs import write_run
from tests.stages.prepare.media.test_audio import SOUNDS, hearing, write_data

pytestmark = pytest.mark.usefixtures("warm_ranks")

CONVERSATIONS = [
    hearing(),
    *(hearing(f"{n % 4}.wav", answer=f"The sound {n % 4}.") for n in range(10)),
    hearing("1.wav", "0.wav", "3.wav"),
]
FRAMES = 100
"""Of a second, the longest audio of the tiny processor."""


def write_model(folder):
    """A model and a processor that belong together."""
    write_audio_processor(folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    config = tiny_image_config("qwen2_audio")
    config.audio_token_index = ids["<|AUDIO|>"]
    config.audio_config.num_mel_bins = MELS
    config.audio_config.max_source_positions = FRAMES // 2
    torch.manual_seed(0)
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def loss_of(folder, conversation):
    """Of the answer in a conversation, by transformers' processor and model."""
    processor = transformers.AutoProcessor.from_pretrained(folder)
    auto = transformers.AutoModelForMultimodalLM
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    names = [part["path"] for part in conversation[0]["content"] if part["type"] == "audio"]
    inputs = processor(
        text=processor.apply_chat_template(conversation),
        audio=[decode_audio(SOUNDS[name], RATE) for name in names],
        sampling_rate=RATE,
        return_tensors="pt",
    )
    ids = inputs["input_ids"]
    assert (ids == processor.audio_token_id).any()
    labels = ids.clone()
    labels[:, : -len(f"{conversation[1]['content']}.\n")] = -100
    with torch.no_grad():
        return model(**inputs, labels=labels).loss.item()


@pytest.mark.dist
@pytest.mark.exhaustive
def test_audio_is_prepared_packed_trained_on_and_exported(tmp_path):
    model = write_model(tmp_path / "model")
    data = write_data(tmp_path / "data", [{"messages": each} for each in CONVERSATIONS])
    sections = {
        "model": {
            "model_path": str(model),
            "config_path": None,
            "freeze": [],
            "foundation": {},
            "backend": "transformers",
        },
        "data": {
            "datasets": [{"path": str(data), "type": "chat"}],
            "sample_packing_sequence_len": 256,
            "val_set_size": 2,
        },
        "train": {"global_batch_size": 2, "num_train_epochs": 6, "eval_steps": 4, "lr": 0.002},
    }
    config = write_run(tmp_path, **sections)
    said = penstock("run", config, "--json")
    assert said.code == 0, said.err
    records = [json.loads(x) for x in (tmp_path / "out/metrics.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in records if "loss" in one]
    assert losses[-1] < 0.8 * losses[0]
    assert any("eval_loss" in one for one in records)
    [exported] = (tmp_path / "artifacts/export").glob("*/hf")
    before, after = (
        sum(loss_of(one, each) for each in CONVERSATIONS[1:]) for one in (model, exported)
    )
    assert after < 0.8 * before
    assert penstock("plan", config, "--json").code == 0
