"""ERNIEKit's example files for images, on a tiny ERNIE-4.5-VL and data of their form."""

import json
import math
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from peft import PeftModel

from tests.cli.command import penstock
from tests.media.pictures import picture
from tests.pipeline.media.test_image_chain import expected, write_model
from tests.stages.prepare.media.test_images import asking
from tests.stages.prepared import write_lines

pytestmark = pytest.mark.usefixtures("warm_ranks")

SHARED = Path(__file__).parents[4] / "shared"
EXAMPLES = sorted((SHARED / "examples" / "erniekit").glob("*VL*.yaml"))


def write_example_data(folder: Path) -> Path:
    """Sixteen records, of which every fourth has no image."""
    folder.mkdir()
    lines = []
    for number in range(16):
        (folder / f"{number}.jpg").write_bytes(picture(number, 60, 40, "JPEG"))
        image = {"matched_text_index": 0, "image_url": f"{number}.jpg"}
        texts = [("What is it?", "mask"), (f"The picture {number}.", "no_mask")]
        lines.append(
            {
                "text_info": [{"text": text, "tag": tag} for text, tag in texts],
                "image_info": [image] if number % 4 else [],
            }
        )
    return write_lines(folder / "train.jsonl", lines)


@pytest.mark.dist
@pytest.mark.exhaustive
@pytest.mark.skipif(not EXAMPLES, reason="needs ../shared/examples")
def test_every_example_is_checked_and_trains_three_steps(tmp_path, monkeypatch):
    model = write_model(tmp_path / "model", "ernie4_5_vl_moe")
    data = write_example_data(tmp_path / "data")
    for file in EXAMPLES:
        folder = tmp_path / file.stem
        folder.mkdir()
        monkeypatch.chdir(folder)
        keys = yaml.safe_load(file.read_text()) | {
            "model_name_or_path": str(model),
            "train_dataset_path": str(data),
            "max_seq_len": 256,
            "pad_to_max_seqlen": 256,
            "max_steps": 3,
        }
        config = folder / file.name
        config.write_text(yaml.safe_dump(keys))
        said = penstock("check", config)
        assert said.code == 0, said.out + said.err
        said = penstock("run", config, "--json")
        assert said.code == 0, said.err
        lines = (folder / "output/metrics.jsonl").read_text().splitlines()
        losses = [one["loss"] for one in map(json.loads, lines) if "loss" in one]
        assert len(losses) == 3
        assert all(map(math.isfinite, losses))
        [adapter] = (folder / "artifacts/export").glob("*/adapter")
        assert_adapts(model, adapter)


def assert_adapts(model: Path, adapter: Path) -> None:
    """Peft loads the adapter, and it changes what the model says of an image."""
    base = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    conversation = asking("1.jpg")
    inputs = {k: torch.as_tensor(v) for k, v in expected(model, conversation).data.items()}
    with torch.no_grad():
        before = base(**inputs).logits
        after = PeftModel.from_pretrained(base, adapter)(**inputs).logits
    assert not torch.equal(before, after)
