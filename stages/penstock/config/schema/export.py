"""Export and push of the trained model."""

import re
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from penstock.config.schema.base import PATH, ConfigSection, require
from penstock.config.schema.effect import NativeOnly, NotWith
from penstock.core.remote.urls import PACKAGE_OF, WEB

SHORT_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
PRECISIONS = ("auto", *SHORT_NAMES.values())
UNITS = {
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40,
}  # fmt: skip
SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]I?B)", re.IGNORECASE)


def parse_size(size: int | str) -> int:
    """The bytes of `5GB` (decimal), `5GiB` (binary) or a plain number. Raises ValueError."""
    match = SIZE.fullmatch(size.strip()) if isinstance(size, str) else None
    count = size if isinstance(size, int) else 0
    if match:
        count = int(float(match[1]) * UNITS[match[2].upper()])
    if count <= 0:
        raise ValueError(f"is {size}; write a size such as 5GB or 500MB, or a number of bytes")
    return count


def _check_url(value: str | None) -> str | None:
    if value is None:
        return None
    scheme, separator, location = value.partition("://")
    if not separator or not scheme:
        raise ValueError("is not a URL; write one such as s3://bucket/folder or file:///folder")
    writable = ("file", *(name for name in PACKAGE_OF if name not in WEB))
    if scheme.lower() not in writable:
        near = get_close_matches(scheme.lower(), writable, 1, 0.5)
        raise ValueError(
            f"nothing can be written to {scheme}://"
            + (f"; did you mean {near[0]}://?" if near else "; write s3://bucket/folder")
        )
    # The config of a run is stored with its results.
    if "@" in location.split("/", 1)[0]:
        raise ValueError(
            f"has credentials; write {scheme}:// without them and set them in the environment"
        )
    return value


REPO_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


# Formats that users ask for and other programs make.
ELSEWHERE = {
    "gguf": "is created from the exported folder by llama.cpp: leave quantise out, and run its "
    "convert_hf_to_gguf.py on hf/",
    "nf4": "is not a compressed-tensors format; servers quantize to it when they load a model "
    "with bitsandbytes. Leave quantise out, or write int4 or nvfp4",
}


def _check_quantization(value: Any) -> Any:
    if isinstance(value, str) and value in ELSEWHERE:
        raise ValueError(f"{value} {ELSEWHERE[value]}")
    return value


class ExportConfig(ConfigSection):
    """Export of the trained model to Hugging Face's format."""

    format: Literal["hf"] = "hf"
    """Format: `hf`, a folder that `transformers` loads."""

    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(
            lambda name: SHORT_NAMES.get(name, name) if isinstance(name, str) else name
        ),
        WithJsonSchema({"enum": [*PRECISIONS, *SHORT_NAMES], "type": "string"}),
    ] = "auto"
    """Dtype of the weights: `auto` is that of the base model; `float32`, `bfloat16` and `float16`
    may be written `fp32`, `bf16` and `fp16`."""

    # `parse_size` raises ValueError, and no size is 0.
    max_shard_size: Annotated[str | int, require(parse_size, "")] = "5GB"
    """Maximum size of a weight file: `5GB`, `500MB`, `4GiB` or a number of bytes."""

    merge_lora: bool = True
    """Export the merged model (base model and adapter) in addition to the adapter."""

    model_card: bool = True
    """Write a model card (README.md) into the exported folders: base model, data, training, losses,
    how to load it. A push replaces an existing card."""

    quantise: Annotated[
        Literal["fp8", "block_fp8", "int8", "int4", "nvfp4"] | None,
        BeforeValidator(_check_quantization),
        NativeOnly("only native models are quantized on export"),
    ] = None
    """Quantize the linear layers of `hf/`, in the compressed-tensors format that vLLM, SGLang and
    `transformers` load: `fp8` (a scale for each row), `block_fp8` (FP8, a scale for each 128 x
    128), `int8` (a scale for each row), `int4` (a scale for each 128, 64 or 32 columns), `nvfp4`
    (4-bit, a scale for each 16). Embeddings, LM head, norms and routers are not quantized."""

    mtp: Literal["keep", "drop"] = "keep"
    """Layers that predict further tokens (multi-token prediction): `keep` writes them, trained or
    as the base model has them; `drop` leaves them out and says in config.json that there are none.
    """

    verify: Literal["load", "logits", "off"] = "load"
    """What is checked before the export is complete. `load`: transformers loads `hf/` and PEFT
    `adapter/` (tensor names, shapes and dtypes, config, tokenizer; no weights are read). `logits`:
    also that transformers computes the logits of the trained weights. What does not load is an
    error; what this machine cannot load is a warning."""

    @property
    def max_shard_bytes(self) -> int:
        return parse_size(self.max_shard_size)


OF_REPOSITORIES = NotWith(
    "push.is_to_folder",
    why="is for hub repositories, and url is a folder",
    instead="leave {field} out",
    reads=("push.url", "push.repo_id"),
)


class PushConfig(ConfigSection):
    """Upload of the exported model to a hub repository or to a folder at a URL."""

    repo_id: Annotated[
        str | None,
        require(
            REPO_ID.fullmatch,
            "{value!r} is not a hub repository; write one such as your-name/my-model",
        ),
    ] = None
    """Hugging Face hub repository, `org/name`. Not together with `url`."""

    url: Annotated[
        str | None,
        PATH,
        AfterValidator(_check_url),
        NotWith(
            "push.repo_id", unless=(None,), why="repo_id is set too, and a push has one target"
        ),
    ] = None
    """Folder to upload to, as a URL that fsspec supports. Not together with `repo_id`."""

    private: bool = True
    """Create the repository as private."""

    revision: Annotated[str | None, OF_REPOSITORIES] = Field(default=None, min_length=1)
    """Branch of the repository. Unset: its main branch."""

    create_pr: Annotated[bool, OF_REPOSITORIES] = False
    """Open a pull request instead of committing."""

    dry_run: bool = False
    """Only list what would be uploaded. `penstock push` then builds nothing: of an export that does
    not exist yet it lists the folders."""

    @property
    def is_to_folder(self) -> bool:
        return self.url is not None and self.repo_id is None
