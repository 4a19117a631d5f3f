"""Tiny multimodal models of transformers with images, and the same in our decoder."""

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
import transformers
from torch import nn

from penstock.engine.vision.image_inputs import ImageInputBuilder
from penstock.engine.vision.stored_names import checkpoint_names
from penstock.models.decoder import Decoder
from penstock.models.layers.router_observer import route_modalities
from penstock.models.multimodal import text_name
from penstock.models.registry import get_family
from penstock.models.vision.tower import VisionTower
from penstock.models.vision.types import VISION_TYPES, read_vision
from penstock.models.weights import WeightMap
from penstock.rows.collate import MicroBatch
from penstock.rows.image_batch import ImageBatch
from penstock_kernels.attention import VarlenMetadata
from tests.models.multimodal import CONFIGS
from tests.models.stored import from_hf
from tests.models.twins import as_stored, documents

IMAGE = 5
"""The id of the image token."""
VIDEO = 8
"""The id of the video token."""
IMAGE_BOUNDS = torch.tensor([6, 7])
"""The ids of the tokens before and after an image that the experts of images compute."""

MORE = {
    "ernie4_5_vl_moe": {"depth": 2},
    "glm4v": {"depth": 2},
    "glm4v_moe": {"depth": 2},
    "gemma3": {"num_hidden_layers": 2},
    "idefics3": {"num_hidden_layers": 2},
    "internvl": {"num_hidden_layers": 2},
    "llava": {"num_hidden_layers": 3},
    "llava_next": {"num_hidden_layers": 2},
    "llava_onevision": {"num_hidden_layers": 2},
    "mistral3": {"num_hidden_layers": 2},
    "qwen2_vl": {"depth": 2},
    "qwen2_5_vl": {"depth": 2, "fullatt_block_indexes": [1], "window_size": 16},
    "qwen3_5": {"depth": 2},
    "qwen3_5_moe": {"depth": 2},
    "qwen3_vl": {"depth": 2, "deepstack_visual_indexes": [0, 1]},
    "qwen3_vl_moe": {"depth": 2, "deepstack_visual_indexes": [1]},
    "smolvlm": {"num_hidden_layers": 2},
}
"""Of the vision config."""


def is_grid(model_type: str) -> bool:
    """Whether its images are patches of a grid."""
    return VISION_TYPES[model_type].form == "grid"


def image_model(model_type: str) -> transformers.PreTrainedModel:
    """A model with random weights, of which no tensor is ones or zeros."""
    config = deepcopy(CONFIGS[model_type])
    config["vision_config"] |= MORE[model_type]
    named = ("internvl", "idefics3", "smolvlm")
    has_id = is_grid(model_type) or model_type in named
    token = "image_token_id" if has_id else "image_token_index"
    tokens = {token: IMAGE, **({"video_token_id": VIDEO} if VISION_TYPES[model_type].video else {})}
    config = transformers.AutoConfig.for_model(model_type, **{**config, **tokens})
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
            if name.endswith("A_log"):
                parameter.sub_(4)  # a state that is forgotten at once has no gradient but rounding
    return model.eval()


def random_images(model_type: str, numbers: list[int], seed: int = 3) -> list[ImageBatch]:
    """So many images of different sizes for each document, as image processors return them."""
    generator = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    found, at = [], 0
    for number in numbers:
        sizes = [(4 + 2 * ((at + i) % 3), 2 + 2 * ((at + i) % 2)) for i in range(number)]
        at += number
        if not number:
            found.append(None)
        elif is_grid(model_type):
            frames = 1 if model_type == "ernie4_5_vl_moe" else 2
            patches = [noise(height * width, 3 * frames * 4 * 4) for height, width in sizes]
            grids = torch.tensor([[1, *size] for size in sizes])
            tensors = {"pixel_values": torch.cat(patches), "image_grid_thw": grids}
            found.append(ImageBatch(tensors, tuple(h * w // 4 for h, w in sizes)))
        elif model_type == "mistral3":
            sides = [(8 * height, 8 * width) for height, width in sizes]
            pixels = torch.zeros(number, 3, *map(max, zip(*sides, strict=True)))
            for one, (height, width) in zip(pixels, sides, strict=True):
                one[:, :height, :width] = noise(3, height, width)
            tensors = {"pixel_values": pixels, "image_sizes": torch.tensor(sides)}
            found.append(ImageBatch(tensors, tuple(h * w // 4 for h, w in sizes)))
        elif model_type == "llava_onevision" and number > 1:
            # Of several images there are no tiles, and an end of a row behind each.
            tensors = {
                "pixel_values": noise(number, 1, 3, 32, 32),
                "image_sizes": torch.tensor([[8 * height, 8 * width] for height, width in sizes]),
                "batch_num_images": torch.full((number,), number),
            }
            found.append(ImageBatch(tensors, (16 + 1,) * number))
        elif model_type in ("llava_next", "llava_onevision"):
            tensors = {
                "pixel_values": noise(number, 2, 3, 32, 32),
                "image_sizes": torch.tensor([[32, 32]] * number),
            }
            if model_type == "llava_onevision":
                tensors["batch_num_images"] = torch.ones(number, dtype=torch.int64)
            # The whole image, and its only tile with the end of each row.
            found.append(ImageBatch(tensors, (16 + 4 * 5,) * number))
        elif model_type in ("idefics3", "smolvlm"):
            crops = [1 + (at + one) % 3 for one in range(number)]
            pixels = torch.zeros(number, max(crops), 3, 32, 32)
            for one, count in zip(pixels, crops, strict=True):
                one[:count] = noise(count, 3, 32, 32)
            found.append(ImageBatch({"pixel_values": pixels}, tuple(4 * count for count in crops)))
        else:
            count = 4 if model_type in ("internvl", "gemma3") else 16
            tensors = {"pixel_values": noise(number, 3, 32, 32)}
            found.append(ImageBatch(tensors, (count,) * number))
    return found


def joined(images: list[ImageBatch | None]) -> ImageBatch | None:
    """The images of several documents as those of a micro-batch."""
    some = [one for one in images if one is not None]
    if not some:
        return None
    tensors = {}
    for name in some[0].tensors:
        parts = [one.tensors[name] for one in some]
        if parts[0].ndim == 5:
            most = max(part.shape[1] for part in parts)
            none = [0] * 7
            parts = [nn.functional.pad(one, (*none, most - one.shape[1])) for one in parts]
        if parts[0].ndim == 4:
            height, width = (max(part.shape[dim] for part in parts) for dim in (2, 3))
            parts = [
                nn.functional.pad(one, (0, width - one.shape[3], 0, height - one.shape[2]))
                for one in parts
            ]
        tensors[name] = torch.cat(parts)
    counts = tuple(count for one in some for count in one.token_counts)
    sizes = {name: (1,) * len(counts) for name in tensors}
    if "image_grid_thw" in tensors:
        sizes["pixel_values"] = tuple(tensors["image_grid_thw"].prod(-1).tolist())
    return ImageBatch(tensors, counts, sizes=sizes)


def image_documents(model_type: str, numbers: list[int]):
    """Token ids and labels of documents with so many images each, and their images."""
    images = random_images(model_type, numbers)
    ids, labels = documents([9 + 4 * number for number in numbers])
    found = []
    for document, its in zip(ids, images, strict=True):
        parts = [document.clamp(min=10)]
        for count in its.token_counts if its else ():
            # Text of three tokens before each image, and the rest behind all.
            head, rest = parts[-1][:3], parts[-1][3:]
            if model_type == "ernie4_5_vl_moe":
                # Tokens that have the experts of images, beside those of images.
                head, rest = torch.cat((head[:2], IMAGE_BOUNDS[:1])), rest.clone()
                rest[0] = IMAGE_BOUNDS[1]
            parts[-1:] = [head, torch.full((count,), IMAGE), rest]
        found.append(torch.cat(parts))
    labels = [torch.cat((one[1:], torch.tensor([-100]))) for one in found]
    labels = [torch.where(one == IMAGE, -100, one) for one in labels]
    return found, labels, images


def micro_batch(ids, labels, images, length: int = 0) -> MicroBatch:
    """Documents in one row, padded to a length."""
    used = sum(map(len, ids))
    if padding := max(0, length - used):
        ids = [*ids, torch.zeros(padding, dtype=torch.int64)]
        labels = [*labels, torch.full((padding,), -100)]
    lengths = tuple(map(len, ids))
    return MicroBatch(
        torch.cat(ids),
        torch.cat(labels),
        torch.cat([torch.arange(length) for length in lengths]),
        lengths,
        used,
        int((torch.cat(labels) != -100).sum()),
        ((0, used),),
        images=joined(images),
    )


@dataclass
class ImageTwins:
    """The same weights twice."""

    theirs: transformers.PreTrainedModel
    ours: Decoder
    weights: WeightMap
    names: Mapping[str, str]
    """Names here of the tensors of the vision part, by those in files."""
    builder: ImageInputBuilder

    def stored_gradients(self) -> dict[str, torch.Tensor]:
        """Their gradients, by our names of parameters."""
        named = {n: p.grad for n, p in self.theirs.named_parameters() if p.grad is not None}
        stored = as_stored(self.theirs, named)
        here = {self.names.get(name) or text_name(name): one for name, one in stored.items()}
        return {
            native: from_hf(self.weights, native, here.__getitem__)
            for native in self.weights.native_names()
            if set(self.weights.hf_names(native)) <= here.keys()
        }

    def run(self, batch: MicroBatch, output_fn=None) -> torch.Tensor:
        """What our decoder returns for a micro-batch."""
        batch = self.builder.with_layout(batch)
        local = lambda one: one, torch.device("cpu")
        images = self.builder.build(batch, *local)
        segments = VarlenMetadata.of(batch.lengths, bidirectional=batch.bidirectional)
        with route_modalities(self.builder.modalities(batch, *local)):
            return self.ours(
                batch.input_ids_T, batch.position_ids_T, segments, output_fn, images=images
            )


def image_twins(model_type: str) -> ImageTwins:
    theirs = image_model(model_type)
    hf_config = theirs.config.to_dict()
    family = get_family(hf_config, "native")
    config = family.read(hf_config)
    vision = read_vision(hf_config)
    with torch.device("meta"):
        tower = VisionTower(vision)
    weights = replace(family.weight_map(config, merge_qkv=True), vision=tower.shapes)
    stored = as_stored(theirs, theirs.state_dict())
    names = checkpoint_names(stored, tower)
    here = {names.get(name) or text_name(name): one for name, one in stored.items()}
    ours = Decoder(config, merge_qkv=True, vision=tower, rope_axes=vision.rope_axes)
    tower.to_empty(device="cpu")
    ours.load_state_dict(
        {name: from_hf(weights, name, here.__getitem__) for name in weights.native_names()}
    )
    builder = ImageInputBuilder(vision, tower, fills=True)
    return ImageTwins(theirs, ours, weights, names, builder)


def their_logits(model, ids: torch.Tensor, images: ImageBatch | None) -> torch.Tensor:
    """One document alone."""
    more = {} if images is None else dict(images.tensors)
    if "image_grid_thw" in more:
        more["mm_token_type_ids"] = (ids == IMAGE).int()[None]
    if model.config.model_type == "ernie4_5_vl_moe":
        more["moe_mm_token_type_ids"] = ((ids >= IMAGE) & (ids <= 7)).int()[None]
    if model.config.model_type == "gemma3":
        more["token_type_ids"] = (ids == IMAGE).int()[None]
    if "batch_num_images" in more:
        more["batch_num_images"] = torch.tensor([len(images or ())])
    found = model(input_ids=ids[None], attention_mask=None, use_cache=False, **more)
    return found.logits[0]
