"""Valid configs at random: fields drawn by their types, and kept where the whole is valid."""

import random
from copy import deepcopy
from typing import Annotated, Any, Literal, get_args, get_origin

import annotated_types
from pydantic.fields import FieldInfo

from penstock.config.loading.load import loads
from penstock.config.loading.schema_tree import branches, is_section
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.run import RunConfig
from penstock.config.translate.translation import put_at
from penstock.core.errors import ConfigError

MODEL = "builtin:tiny-qwen3"
TEXTS = (
    "a",
    "org/name",
    "1e5",
    "1.5",
    "no",
    "null",
    "0x1F",
    "0o17",
    "- x",
    "a: b",
    "two\nlines",
    "ü",
)
"""Among them what YAML 1.1 and 1.2 read differently where it is not quoted."""

ELSEWHERE = (
    *("model.model_path", "model.config_path", "model.tokenizer_path", "lora.init_adapter_path"),
    *(
        "train.load_checkpoint_path",
        "train.init_checkpoint_path",
        "model.foundation",
        "model.encoders",
    ),
    *("data.skip_prepare_dataset", "data.datasets", "data.push_dataset_to_hub", "model.encoders"),
    *(
        f"data.datasets.0.{name}"
        for name in ("image_folder", "image_min_pixels", "image_max_pixels")
    ),
    *("train.indexer_loss_coef", "train.optimizer_offload"),
)
"""Fields of things which must be there for a plan to be made: files, images, GPUs, indexers."""


def draw_config(seed: int, num_fields: int = 10) -> dict[str, Any]:
    """Plain values of a valid config with up to `num_fields` fields beside the smallest ones.

    A field that does not go with those before it is left out again.
    """
    draw = random.Random(seed)
    values: dict[str, Any] = {
        "model": {"config_path": MODEL},
        "data": {
            "datasets": [{"path": "builtin:arithmetic", **draw.choice(({}, {"type": "chat"}))}]
        },
        "train": {"output_dir": "out", "data_parallel_mode": draw.choice(("none", "ddp", "fsdp2"))},
    }
    for switch in draw.sample(SWITCHES, draw.randint(0, 3)):
        values = _with(values, *switch)
    for name, field in draw.choices(FIELDS, k=num_fields):
        values = _with(values, name, _draw(draw, field.annotation, list(field.metadata)))
    return values


def _fields(section: type[ConfigSection], at: str) -> list[tuple[str, FieldInfo]]:
    found: list[tuple[str, FieldInfo]] = []
    for name, field in section.model_fields.items():
        path = f"{at}.{name}" if at else name
        [first, *_] = branches(field.annotation)
        if is_section(first):
            found += _fields(first, path)
        elif path not in ELSEWHERE and not path.startswith("data.datasets.0.path"):
            found.append((path, field))
    return found


FIELDS = [
    *_fields(RunConfig, ""),
    *(
        (f"data.datasets.0.{name}", f)
        for name, f in DatasetConfig.model_fields.items()
        if name != "path" and f"data.datasets.0.{name}" not in ELSEWHERE
    ),
]

SWITCHES: list[tuple[str, Any]] = [
    ("lora.enable_lora", True),
    ("lora.enable_qlora", True),
    ("train.precision", "bf16"),
    ("train.zero_stage", 2),
    ("train.optimizer", "muon"),
    ("train.global_batch_size", 8),
    ("train.pipeline_parallel_size", 2),
    ("train.pipeline_parallel_schedule", "Interleaved1F1B"),
    ("push.url", "file:///models"),
    ("data.val_set_size", 5),
    ("data.dataloader_num_workers", 8),
    ("data.sample_packing_sequence_len", 32_000),
]
"""Settings that others need, or that meant something else where they were not written."""


def _with(values: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The values with one more, or as they are where that is not valid."""
    changed = deepcopy(values)
    if name.startswith("data.datasets.0."):
        changed["data"]["datasets"][0][name.rpartition(".")[2]] = value
    else:
        put_at(changed, name, value)
    try:
        loads(changed)
    except ConfigError:
        return values
    return changed


def _draw(draw: random.Random, annotation: Any, bounds: list[Any]) -> Any:
    if get_origin(annotation) is Annotated:
        inner, *more = get_args(annotation)
        metadata = [part for each in more for part in getattr(each, "metadata", [each])]
        return _draw(draw, inner, [*bounds, *metadata])
    branch = draw.choice(branches(annotation))
    if branch is type(None):
        return None
    if branch is bool:
        return draw.random() < 0.5
    if branch in (int, float):
        return _number(draw, branch, bounds)
    if get_origin(branch) is Literal:
        return draw.choice(get_args(branch))
    if get_origin(branch) is list:
        return [_draw(draw, get_args(branch)[0], []) for _ in range(draw.randint(0, 2))]
    if get_origin(branch) is dict:
        keys, inside = get_args(branch)
        return {_draw(draw, keys, []): _draw(draw, inside, []) for _ in range(draw.randint(0, 2))}
    if is_section(branch):
        return {"path": "builtin:arithmetic"} if "path" in branch.model_fields else {}
    return draw.choice(TEXTS)


def _number(draw: random.Random, kind: type[int | float], bounds: list[Any]) -> Any:
    above: Any = next((b.gt for b in bounds if isinstance(b, annotated_types.Gt)), None)
    least: Any = next((b.ge for b in bounds if isinstance(b, annotated_types.Ge)), above or 0)
    most = [getattr(b, "le", getattr(b, "lt", None)) for b in bounds]
    end: Any = next((one for one in most if one is not None), 64)
    if kind is int:
        return draw.choice(
            (1, 2, 4, 8, 16, 128, draw.randint(int(least), max(int(least), int(end))))
        )
    return draw.choice((least, end, 1e-5, 0.5, 1.0, draw.uniform(float(least), float(end))))
