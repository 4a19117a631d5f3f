"""Tiny vision-language models with an image processor, for servers, and what transformers makes of
samples with images."""

import json
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image

from tests.media.pictures import picture
from tests.media.tiny_processors import write_processor
from tests.models.images import image_model

PATCH = 4
PICTURES = [
    picture(1, 17, 9),
    picture(2, 30, 12),
    picture(3, 12, 25),
]
"""PNG files, which become 2, 6 and 6 tokens or so: of different grids."""

Part = Sequence[int] | bytes
"""Tokens, or an image file."""


def write_image_model(folder: Path, model_type: str = "qwen2_5_vl") -> Path:
    """A model of random weights whose patches are as those of its image processor."""
    write_processor(model_type, folder)
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    settings["patch_size"] = PATCH
    settings["size"] = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": (12 * PATCH) ** 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    model = image_model(model_type)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.config.image_token_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    model.save_pretrained(folder)
    return folder


class Judge:
    """transformers' own model and image processor."""

    def __init__(self, folder: Path) -> None:
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self.processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.image_token = self.model.config.image_token_id

    def inputs(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The arguments of the model for text and images."""
        ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, bytes):
                images.append(Image.open(BytesIO(part)).convert("RGB"))
                ids += [self.image_token] * self.count(part)
            else:
                ids += part
        input_ids = torch.tensor([ids])
        more = dict(self.processor(images, return_tensors="pt")) if images else {}
        if images:
            more["mm_token_type_ids"] = (input_ids == self.image_token).int()
        return {"input_ids": input_ids, **more}

    def count(self, image: bytes) -> int:
        """How many tokens an image is."""
        opened = Image.open(BytesIO(image)).convert("RGB")
        [grid] = self.processor([opened], return_tensors="np")["image_grid_thw"]
        return int(np.prod(grid)) // self.processor.merge_size**2

    def log_probs(self, parts: Sequence[Part], targets: np.ndarray) -> torch.Tensor:
        """The log-prob of each target, [T]."""
        logits = self.model(**self.inputs(parts), use_cache=False).logits[0].float()
        chosen = torch.as_tensor(targets.astype(np.int64))[:, None]
        return logits.log_softmax(-1).gather(1, chosen)[:, 0]
