"""Source pinning: data, tokenizers and models identified by their content.

Pins are the leaves of every cache key: a pin changes if and only if the content changes, wherever
the content is stored. Local files are pinned by digest, Hub repositories by commit, built-in data
by name and version, remote files by the version that their store reports.
"""

import re
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from penstock.core import env
from penstock.core.cache.digest_cache import digest_files
from penstock.core.cache.stage import Source
from penstock.core.errors import (
    CapabilityError,
    ConfigError,
    DamagedFileError,
    UnreachableError,
)
from penstock.core.files import read_json_object
from penstock.core.process.retry import PLANNING_TRIES
from penstock.core.remote.errors import connection_fault
from penstock.core.remote.path import RemotePath
from penstock.core.remote.urls import is_url, local_path, redact
from penstock.core.sources import local_files, megatron_files
from penstock.core.sources.local_files import LocalFiles
from penstock.core.sources.pin_remote import download_source, pin_remote_data, pin_remote_files

BUILTIN_DATA = {"builtin:arithmetic": 1, "builtin:shapes": 1, "dummy": 1}
"""Built-in generated data sets and their versions; incremented when the generated data changes."""

BUILTIN_TOKENIZER_VERSION = 1
"""Incremented when the byte-level tokenizer or its chat template changes."""

BUILTIN_MODELS = {
    "builtin:tiny-llama": 1,
    "builtin:tiny-qwen2": 1,
    "builtin:tiny-qwen3": 1,
    "builtin:tiny-qwen3-moe": 1,
    "builtin:tiny-gpt-oss": 1,
}
"""Tiny randomly initialized models; each includes the byte-level tokenizer."""

BUILTIN_ENCODERS = {"builtin:tiny-clip": 1, "builtin:tiny-siglip": 1}
"""Tiny vision towers without weights, with their image processors."""

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Files beside the tokenizer of a multimodal model."""

TOKENIZER_FILES = (
    "added_tokens.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.*",
    "additional_chat_templates/*",
    "vocab.*",
    "*.model",
    "*.tiktoken",
    "tokenizer.*.json",
    "tokenizer.model.*",
    "tekken.json",
    *PROCESSOR_FILES,
)
GENERATION_CONFIG = "generation_config.json"
"""Names the tokens that end a turn; pinned with a tokenizer beside it."""

TOKENIZER_AND_CONFIG = (*TOKENIZER_FILES, "config.json", GENERATION_CONFIG)
MODEL_FILES = (
    "config.json",
    GENERATION_CONFIG,
    "model.safetensors.index.json",
    "*.safetensors",
)

CONFIG_AND_CODE = ("config.json", "*.py")

ENCODER_FILES = ("config.json", "preprocessor_config.json")

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

COMMIT = re.compile(r"[0-9a-f]{40}")
HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?", re.ASCII)
HUB_TIMEOUT = 15.0  # Timeout in seconds for the Hub to resolve a commit


def pin_data(
    path: str,
    *,
    name: str | None = None,
    split: str | None = None,
    revision: str | None = None,
    data_files: str | Sequence[str] | None = None,
    ds_type: str | None = None,
    token: bool | None = None,
) -> Source:
    """Pin a data set: a local or remote file, folder or glob, a Hub id, or a built-in data set.

    `data_files` keep the user's order; all other files are sorted. `token` says whether the Hub
    login is used (true), not used (false), or used if there is one (None). Raises ConfigError for a
    missing source, and CapabilityError if the Hub is needed and cannot be reached.
    """
    files = [data_files] if isinstance(data_files, str) else list(data_files or [])
    if path in BUILTIN_DATA or path.startswith("builtin:"):
        split_name = None if split == "train" else split
        for field, value in (("name", name), ("split", split_name), ("revision", revision)):
            _reject(field, value, f"{path} is built in and has no {field}")
        _reject("data_files", data_files, f"{path} is built in and has no files")
        return _pin_builtin(path, BUILTIN_DATA)
    if is_url(path):
        _reject_for_files(path, name=name, revision=revision)
        if ds_type == megatron_files.KIND or path.endswith(megatron_files.INDEX):
            raise ConfigError(
                f"{redact(path)} is a Megatron dataset, which must be memory-mapped.\n"
                "  Copy its .bin and .idx files to a local folder, and write their prefix."
            )
        return pin_remote_data(path, split=split, data_files=files or None, ds_type=ds_type)
    path = local_path(path)
    if _is_on_hub(path):
        commit = _resolve_commit(path, revision, "dataset", token)
        return _hub_source(path, commit, name=name, split=split, data_files=files or None)
    _reject_for_files(path, name=name, revision=revision)
    local = local_files.find_data(path, split=split, data_files=files or None, ds_type=ds_type)
    return _local_source(local, label=local.label)


def pin_tokenizer(path: str, revision: str | None = None) -> Source:
    """Pin a tokenizer: only the tokenizer files, so that changed weights do not change the pin.

    Raises ConfigError for a folder without a tokenizer, CapabilityError if the Hub cannot be
    reached.
    """
    if path.startswith("builtin:"):
        _pin_builtin(path, {"builtin:bytes": BUILTIN_TOKENIZER_VERSION, **BUILTIN_MODELS})
        return Source({"kind": "builtin", "name": "bytes", "version": BUILTIN_TOKENIZER_VERSION})
    if not is_url(path) and _is_on_hub(path):
        return _hub_source(path, _resolve_commit(path, revision))
    _reject_for_files(path, revision=revision)
    folder = _download(path, TOKENIZER_AND_CONFIG) if is_url(path) else _require_folder(path)
    files = _glob_files(folder, TOKENIZER_FILES)
    has_tokenizer = any(
        "template" not in file.name and file.name not in PROCESSOR_FILES for file in files
    )
    if not has_tokenizer:
        _reject_adapter(path, folder)
        raise ConfigError(
            f"{redact(path)} holds no tokenizer (tokenizer.json, tokenizer_config.json, *.model).\n"
            "  Set model.tokenizer_path to a folder that does, to a hub id, or to builtin:bytes."
        )
    more: dict[str, Any] = {}
    if (folder / "config.json").is_file():
        # Without it, AutoTokenizer takes the class from config.json, which then is part of the pin.
        if _read_entry(folder / "tokenizer_config.json", "tokenizer_class"):
            # For some types of model, transformers takes another class than the one named here.
            more = {"model_type": _read_entry(folder / "config.json", "model_type")}
        else:
            files.append(folder / "config.json")
    # Its stop tokens are those of a chat's turns (`rows.tokenizer`).
    files += _glob_files(folder, (GENERATION_CONFIG,))
    return _local_source(LocalFiles(folder.name, folder, tuple(sorted(files))), **more)


def has_processor_files(tokenizer: Source) -> bool:
    """Whether there may be an image processor beside a pinned tokenizer."""
    pin = tokenizer.pin
    if pin["kind"] != "files":
        return pin["kind"] == "hub"
    return any(file["name"] in PROCESSOR_FILES for file in pin["files"])


def pin_model(path: str, revision: str | None = None) -> Source:
    """Pin a model: its config and safetensors weights, or a config alone. Raises ConfigError for a
    folder without either, CapabilityError if the Hub cannot be reached."""
    if path.startswith("builtin:"):
        return _pin_builtin(path, BUILTIN_MODELS)
    if is_url(path):
        _reject_for_files(path, revision=revision)
        return pin_remote_files(path, MODEL_FILES, "holds neither config.json nor *.safetensors")
    if _is_on_hub(path):
        return _hub_source(path, _resolve_commit(path, revision))
    _reject_for_files(path, revision=revision)
    return _local_source(_find_model(path))


def check_model(path: str) -> None:
    """Raise the errors of `pin_model` for a local path without reading weights. Makes no requests
    to the Hub or a remote store."""
    if path.startswith("builtin:"):
        _pin_builtin(path, BUILTIN_MODELS)
    elif not is_url(path) and not _is_on_hub(path):
        _find_model(path)


def pin_encoder(path: str) -> Source:
    """Pin the config.json and the image processor of a vision model, without its weights. Raises
    ConfigError for a folder without them, CapabilityError if the Hub cannot be reached."""
    if path.startswith("builtin:"):
        return _pin_builtin(path, BUILTIN_ENCODERS)
    remedy = "Name the folder of a vision model, with the file that says how images are prepared."
    return _pin_named_files(path, ENCODER_FILES, path, remedy)


def pin_adapter(path: str) -> Source:
    """Pin an adapter in PEFT format. Raises ConfigError for a folder without one, CapabilityError
    if the Hub cannot be reached."""
    remedy = (
        "Name a folder written by PEFT or penstock export; pickled weights (.bin) are not read, "
        "because unpickling can run code."
    )
    if not is_url(path) and (Path(path).expanduser() / "config.json").is_file():
        remedy = (
            "It is a whole model: write it as model.model_path, and leave init_adapter_path out."
        )
    return _pin_named_files(path, ADAPTER_FILES, f"lora.init_adapter_path {path}", remedy)


def _pin_named_files(path: str, names: tuple[str, ...], kind: str, remedy: str) -> Source:
    if is_url(path):
        return pin_remote_files(path, names, f"has none of {', '.join(names)}")
    if _is_on_hub(path):
        return _hub_source(path, _resolve_commit(path, None))
    folder = _require_folder(path)
    files = _glob_files(folder, names)
    if lacking := set(names) - {file.name for file in files}:
        raise ConfigError(f"{kind} has no {sorted(lacking)[0]}.\n  {remedy}")
    return _local_source(LocalFiles(folder.name, folder, tuple(files)))


def pin_config(path: str, *, with_code: bool = False, revision: str | None = None) -> Source:
    """Pin a model's config.json alone, so that weights in the same folder do not affect the pin, or
    `with_code` the code beside it too.

    Code of a Hub repository is pinned by its commit `revision`, that of a folder by its content.

    Raises ConfigError if there is none, or a commit is missing, CapabilityError if the Hub cannot
    be reached.
    """
    if with_code:
        return _pin_code(path, revision)
    if path.startswith("builtin:") or (not is_url(path) and _is_on_hub(path)):
        return pin_model(path)
    target = _download(path, ("config.json",)) if is_url(path) else Path(path).expanduser()
    file = target / "config.json" if target.is_dir() else target
    if not file.is_file():
        _reject_adapter(path, target)
        raise ConfigError(
            f"{redact(path)} holds no config.json.\n"
            "  Set model.config_path to a folder that does, to a hub id, or to builtin:tiny-qwen3."
        )
    return _local_source(LocalFiles(file.name, file.parent, (file,)))


def _pin_code(path: str, revision: str | None) -> Source:
    if path.startswith("builtin:") or is_url(path):
        raise ConfigError(
            f"model.trust_remote_code is true, and {redact(path)} is neither a folder of this "
            "machine nor a hub id.\n  Copy the model into a folder, or leave it out."
        )
    if _is_on_hub(path):
        if revision is None or not COMMIT.fullmatch(revision):
            raise ConfigError(
                f"model.code_revision is {revision!r}; code of {path} is run at a fixed commit.\n"
                "  Write the 40 digits of the commit whose code you have read."
            )
        return _hub_source(path, revision)
    _reject_for_files(path, **{"model.code_revision": revision})
    paths = pin_config(path).paths
    folder = paths[0].parent
    code = _glob_files(folder, ("*.py",))
    return _local_source(LocalFiles(folder.name, folder, tuple(sorted([*paths, *code]))))


def is_checkpoint(path: str) -> bool:
    """Whether `path` is a training checkpoint folder, judged by its files."""
    if is_url(path):
        return (RemotePath.from_url(path) / "COMPLETE").info(tries=PLANNING_TRIES) is not None
    folder = Path(path).expanduser()
    return any((folder / name).is_file() for name in ("COMPLETE", "state.json", ".metadata"))


def pin_checkpoint(path: str, field: str = "train.load_checkpoint_path") -> Source:
    """Pin the training checkpoint in `field`: every file of its folder. Raises ConfigError if it is
    not a folder or is incomplete."""
    if is_url(path):
        # One for each depth: a pattern matches only names of its own.
        source = pin_remote_files(path, ("*", "*/*", "*/*/*"), "is empty")
    else:
        folder = Path(path).expanduser()
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        source = _local_source(LocalFiles(folder.name, folder, tuple(files)))
    if not any(file["name"] == "COMPLETE" for file in source.pin["files"]):
        raise incomplete_checkpoint(path, field)
    return source


def incomplete_checkpoint(path: str, field: str) -> ConfigError:
    """The error for a `path` in `field` that is not a complete checkpoint."""
    return ConfigError(
        f"{field} {redact(path)} is not a complete checkpoint.\n"
        "  Name a complete folder in a run's checkpoints/."
    )


def _hub_source(repo: str, commit: str, **more: Any) -> Source:
    return Source({"kind": "hub", "repo": repo, "commit": commit, **more})


def _local_source(local: LocalFiles, **more: Any) -> Source:
    try:
        digests = digest_files(local.paths)
        files = [
            {"name": local.name_of(path), "bytes": path.stat().st_size, "sha256": digest}
            for path, digest in zip(local.paths, digests, strict=True)
        ]
    except PermissionError as error:
        raise local_files.permission_error(Path(str(error.filename))) from error
    return Source({"kind": "files", **more, "files": files}, local.paths)


def _pin_builtin(path: str, versions: dict[str, int]) -> Source:
    if path not in versions:
        raise ConfigError(f"{path} is not built in.\n  These are: {', '.join(sorted(versions))}.")
    name = path.removeprefix("builtin:")
    return Source({"kind": "builtin", "name": name, "version": versions[path]})


def _is_on_hub(path: str) -> bool:
    """Whether `path` is a Hub repository. Raises ConfigError for a missing local path."""
    if not path:
        raise ConfigError("a path is empty.\n  Give a file, a folder, or a hub id.")
    target = Path(path).expanduser()
    if target.exists() or megatron_files.find_index(target):
        return False
    if local_files.looks_local(path):
        if local_files.GLOB.search(path):
            return False
        raise local_files.missing_path_error(path)
    if not HUB_ID.fullmatch(path):
        raise ConfigError(f"{path} is neither a path that exists nor a hub id (org/name).")
    if "/" not in path and local_files.resembles_local_file(path):
        raise local_files.missing_path_error(path)
    return True


def _reject_adapter(path: str, folder: Path) -> None:
    if not (folder / ADAPTER_FILES[0]).is_file() or (folder / "config.json").is_file():
        return
    try:
        base = read_json_object(folder / ADAPTER_FILES[0]).get("base_model_name_or_path")
    except DamagedFileError:
        base = None
    raise ConfigError(
        f"{path} is an adapter of {base or 'a model that it does not name'}, and not a model.\n"
        f"  Write lora.init_adapter_path: {path}, with lora.enable_lora: true and its base as "
        "model.model_path; or merge the two with penstock merge."
    )


def _find_model(path: str) -> LocalFiles:
    target = Path(path).expanduser()
    if target.is_file() and target.suffix == ".json":
        return LocalFiles(target.name, target.parent, (target,))
    folder = _require_folder(path)
    _reject_adapter(path, folder)
    files = _glob_files(folder, MODEL_FILES)
    if not any(file.name == "config.json" or file.suffix == ".safetensors" for file in files):
        below = sorted(file.parent for file in folder.glob("*/config.json"))
        hint = (
            f"Did you mean {below[0]}?"
            if below
            else "Weights in other formats (.bin, .pt) are not read; save the model as safetensors."
        )
        raise ConfigError(f"{path} holds neither config.json nor *.safetensors.\n  {hint}")
    return LocalFiles(folder.name, folder, tuple(files))


def _reject_for_files(path: str, **hub_options: str | None) -> None:
    for field, value in hub_options.items():
        _reject(field, value, f"{redact(path)} is files, which have no {field}")


def _reject(field: str, value: Any, why: str) -> None:
    if value is not None:
        raise ConfigError(f"{field} is {value!r}, but {why}.\n  Leave {field} out.")


def _download(url: str, patterns: Sequence[str]) -> Path:
    # The files are few and small, and every stage needs them.
    return download_source(pin_remote_files(url, patterns, f"has none of {', '.join(patterns)}"))


def _require_folder(path: str) -> Path:
    target = Path(path).expanduser()
    if not target.is_dir():
        raise ConfigError(f"{path} is a file, not a folder.\n  Give its folder.")
    # For its error: glob takes a folder that may not be listed for an empty one.
    local_files.list_names(target)
    return target


def _glob_files(folder: Path, patterns: Sequence[str]) -> list[Path]:
    # `glob` leaves out a name without wildcards whose link leads nowhere.
    links = {folder / pattern for pattern in patterns if (folder / pattern).is_symlink()}
    paths = sorted(links.union(*(folder.glob(pattern) for pattern in patterns)))
    for path in paths:
        if not path.is_file() and not path.is_dir():
            raise ConfigError(
                f"{path} is a link that leads nowhere, a device, a pipe or a socket.\n"
                "  Write the file there, or remove it."
            )
    return [path for path in paths if path.is_file()]


def _read_entry(file: Path, name: str) -> Any:
    try:
        return read_json_object(file).get(name)
    except (OSError, ValueError, AttributeError):
        return None


def _resolve_commit(
    repo: str,
    revision: str | None,
    kind: Literal["dataset", "model"] = "model",
    token: bool | None = None,
) -> str:
    """The 40-digit commit of `revision` (default: main), now or when it was last resolved."""
    if revision and COMMIT.fullmatch(revision):
        return revision
    is_asked = not env.hub_is_offline() and _hub_answers(int(time.monotonic() // 60))
    commit = _request_commit(repo, revision, kind, token) if is_asked else None
    commit = commit or _cached_commit(repo, revision or "main", kind)
    if commit:
        return commit
    raise UnreachableError(
        f"{repo} is neither a path here nor in the local hub cache, and the Hugging Face hub "
        f"cannot be reached{' (HF_HUB_OFFLINE is set)' if env.hub_is_offline() else ''}.\n"
        f"  Go online, or download it where there is a network (hf download {repo}"
        f"{' --repo-type dataset' if kind == 'dataset' else ''}), or give a local path."
    )


@lru_cache(1)
def _hub_answers(minute: int) -> bool:  # noqa: ARG001 - so that the answer is of this minute
    # The client repeats each request for a quarter of a minute before it gives up, and a run asks
    # for several repositories.
    from huggingface_hub import constants, get_session

    try:
        get_session().head(constants.ENDPOINT, timeout=HUB_TIMEOUT)
    except Exception as error:  # noqa: BLE001 - its HTTP client's errors have no public base
        return connection_fault(error) is None
    return True


def _request_commit(
    repo: str, revision: str | None, kind: Literal["dataset", "model"], token: bool | None
) -> str | None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,  # pyright: ignore[reportPrivateImportUsage] - of the client that it uses
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    api = HfApi()
    ask = api.dataset_info if kind == "dataset" else api.model_info
    try:
        return ask(repo, revision=revision, timeout=HUB_TIMEOUT, token=token).sha
    except GatedRepoError as error:
        raise CapabilityError(
            f"{repo} is gated, and this account has no access to it.\n"
            "  Accept its terms on the hub, then log in (hf auth login) or set HF_TOKEN."
        ) from error
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{repo} is neither a path here nor a {kind} on the Hugging Face hub.\n"
            "  Check the spelling; for a private one, log in (hf auth login) or set HF_TOKEN."
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(
            f"{repo} has no revision {revision!r} on the hub.\n"
            "  Give a branch, a tag or a commit that it has."
        ) from error
    except HFValidationError as error:
        raise ConfigError(f"{repo} is neither a path here nor a valid hub id: {error}") from error
    except (HTTPError, OSError):
        return None


def _cached_commit(repo: str, revision: str, kind: Literal["dataset", "model"]) -> str | None:
    from huggingface_hub.constants import HF_HUB_CACHE

    folder = Path(HF_HUB_CACHE) / f"{kind}s--{repo.replace('/', '--')}" / "refs"
    ref = folder / revision
    # The revision is a user's text, which may hold `..`.
    if not ref.resolve().is_relative_to(folder.resolve()) or not ref.is_file():
        return None
    commit = ref.read_text().strip()
    return commit if COMMIT.fullmatch(commit) else None
