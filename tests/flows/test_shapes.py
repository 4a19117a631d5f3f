"""A model learns to see: `vision-quickstart` trains a tiny vision-language model from scratch on
pictures of shapes, by the flow, to an export that answers through transformers."""

import os
from io import BytesIO

import pytest
import torch
import transformers
import yaml
from PIL import Image

from penstock.prepare.builtin_pictures import picture_of_shape
from tests.conftest import ROOT

# pyright: reportMissingImports=false

CPU_SECONDS = 240
UNSEEN = range(10_000, 10_240)
"""Seeds of pictures, ten of each name."""


def answer_of(model, processor, content):
    """What transformers' model says of a picture."""
    image = Image.open(BytesIO(content))
    parts = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    inputs = processor.apply_chat_template(
        [{"role": "user", "content": parts}],
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    with torch.no_grad():
        end = processor.tokenizer.eos_token_id
        out = model.generate(**inputs, max_new_tokens=24, do_sample=False, eos_token_id=end)
    said = out[0, inputs["input_ids"].shape[1] :]
    return processor.tokenizer.decode(said, skip_special_tokens=True)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.exhaustive
def test_a_model_learns_to_name_shapes_and_colors_it_has_not_seen(reporting, tmp_path):
    import finetune

    del reporting
    written = yaml.safe_load((ROOT / "configs/recipes/vision-quickstart.yaml").read_text())
    written["data"]["dataset_prepared_path"] = str(tmp_path / "prepared")
    written["train"]["output_dir"] = str(tmp_path / "out")
    written["pipeline"]["artifacts_path"] = str(tmp_path / "artifacts")
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(written))
    # Of this process and those that it waited for.
    began = sum(os.times()[:4])
    assert finetune.finetune(config, return_state=True).is_completed()
    assert sum(os.times()[:4]) - began < CPU_SECONDS
    [exported] = (tmp_path / "artifacts/export").glob("*/hf")
    found = transformers.AutoModelForImageTextToText.from_pretrained(exported, dtype=torch.float32)
    processor = transformers.AutoProcessor.from_pretrained(exported)
    named = [picture_of_shape(seed) for seed in UNSEEN]
    right = sum(answer_of(found, processor, content) == name for name, content in named)
    assert right >= 0.95 * len(named), f"{right} of {len(named)}"
