"""Writes docs/models.md from what was proved: `python -m tests.engine.automodel.page`."""

from pathlib import Path

from penstock.models.automodel.proved import AUDIO_FILE, FILE, IMAGE_FILE, ProvedModel, ProvedModels
from penstock.models.multimodal import MULTIMODAL
from penstock.models.vision.types import VISION_TYPES
from tests.models.families import FAMILIES

PAGE = Path(__file__).parents[3] / "docs" / "models.md"

HEAD = """\
# Model types: every causal language model of transformers, its backend and what was tested

One line for each model type that transformers {version} lists as a causal language model:
{trained} of {all} train. `penstock models` prints the same list, and `penstock models check PATH`
examines one model. The two backends are compared in
[guide/models.md](guide/models.md#any-other-model-of-transformers).

The table is made by `python -m tests.engine.automodel.sweep` and `python -m
tests.engine.automodel.page`. For each type a tiny model with random weights is made from its own
config class. Through transformers' own code, under FSDP2 on two ranks, its loss is that of
transformers on separate documents (relative difference at most 1e-4), it falls in three steps
over one batch, with all weights and with LoRA, a run that resumes from a checkpoint ends with the
same bits, and the exported model has equal logits in transformers.

- *backend*: the one that `model.backend: auto` takes; where a native family does not compute a
  config.json, or LoRA on it, that of transformers.
- *documents*: `packed` rows give the outputs and gradients of separate documents; otherwise a
  micro-batch is computed as a `padded` batch of its documents.
- *attention*: `varlen` is Penstock's attention over packed documents; otherwise that of
  transformers.
- *head*: `apart` if the loss computes logits in chunks from the head's weights; otherwise all
  logits are computed.

The last three are of the transformers backend.
"""


TEXT = """\
## Multimodal models

Their language model is trained by Penstock's decoder (*native (text)* above), where `text_config`
is of a native type; see [guide/models.md](guide/models.md#multimodal-models). With *images* they
are trained on images too.
"""


IMAGES = """\
## Image-text models

One line for each model type that transformers {version} lists as a model of images and text:
{trained} of {all} train on images through transformers' own code (`model.backend: transformers`),
the whole model with its vision part. The table is made by `python -m
tests.engine.automodel.sweep_images`: under FSDP2 on two ranks, with documents of no, one and two
images, what is said above of text holds of images too. Documents are computed as a `padded` batch.
"""


AUDIO = """\
## Models with audio

Types that are trained on audio through transformers' own code, examined as above with audio in
place of images.
"""


def page(proved: ProvedModels, images: ProvedModels, audio: ProvedModels) -> str:
    """The page."""
    trained = {name: one for name, one in proved.models.items() if not one.reason}
    head = HEAD.format(version=proved.transformers, trained=len(trained), all=len(proved.models))
    rows = [_row(name, one) for name, one in sorted(trained.items())]
    refused = [
        f"| `{name}` | {_cell(one.reason)} |"
        for name, one in sorted(proved.models.items())
        if one.reason
    ]
    table = [
        "| `model_type` | backend | documents | attention | head | LoRA |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    rest = ["| `model_type` | reason |", "|---|---|", *refused]
    others = [
        f"| `{name}` | `{one.architecture}` | {'yes' if name in VISION_TYPES else 'no'} |"
        for name, one in sorted(MULTIMODAL.items())
    ]
    text = [TEXT, "| `model_type` | class | images |", "|---|---|---|", *others]
    parts = [head, *table, "", *text, "", *_images(images), "", *_audio(audio)]
    return "\n".join([*parts, "", "## Not proved", "", *rest, ""])


def _images(proved: ProvedModels) -> list[str]:
    """The section of image-text models."""
    models = sorted(proved.models.items())
    trained = sum(not one.reason for _, one in models)
    rows = [
        f"| `{name}` | `{one.architecture}` | {one.attention} | "
        f"{'apart' if one.head else 'all logits'} | "
        f"{'yes' if one.lora else 'no'} |"
        for name, one in models
        if not one.reason
    ]
    refused = [f"| `{name}` | {_cell(one.reason)} |" for name, one in models if one.reason]
    return [
        IMAGES.format(version=proved.transformers, trained=trained, all=len(models)),
        "| `model_type` | class | attention | head | LoRA |",
        "|---|---|---|---|---|",
        *rows,
        "",
        "### Image-text models that are not proved",
        "",
        "| `model_type` | reason |",
        "|---|---|",
        *refused,
    ]


def _audio(proved: ProvedModels) -> list[str]:
    """The section of models with audio."""
    rows = [
        f"| `{name}` | `{one.architecture}` | {one.attention} | {_cell(one.reason) or 'yes'} |"
        for name, one in sorted(proved.models.items())
    ]
    return [AUDIO, "| `model_type` | class | attention | trained |", "|---|---|---|---|", *rows]


def _row(name: str, one: ProvedModel) -> str:
    backend = "native" if name in FAMILIES else "transformers"
    backend = "native (text)" if name in MULTIMODAL else backend
    documents = "packed" if one.packing else "padded"
    head = "apart" if one.head else "all logits"
    lora = "yes" if one.lora else "no"
    return f"| `{name}` | {backend} | {documents} | {one.attention} | {head} | {lora} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    PAGE.write_text(page(*map(ProvedModels.read, (FILE, IMAGE_FILE, AUDIO_FILE))))
