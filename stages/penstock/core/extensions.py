"""Parts by name: ours, and those that installed packages add with entry points.

A package adds a dataset format `qa_csv` with these lines in its pyproject.toml; nothing of it is
imported before a config names the format:

    [project.entry-points."penstock.formats"]
    qa_csv = "my_package.formats:QaCsv"
"""

import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, distribution, distributions
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict

from penstock.core.errors import ConfigError
from penstock.version import __version__


class Part(BaseModel):
    """A part of a user's package. Its fields are its options: they are validated like a section of
    the config, and are in the cache keys of the results that the part affects."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    version: ClassVar[int] = 1
    """Raise it if the same options give other results; older ones are then not reused. A release of
    the package does the same."""


class UnknownPartError(ConfigError):
    """Neither Penstock nor an installed package has a part of this name."""


# eq=False leaves the hash of the object, under which `_load` is cached; a mapping has none.
@dataclass(frozen=True, eq=False)
class Registry:
    """The parts of one kind. Every method that takes a name raises ConfigError if no part has it,
    or if two packages do."""

    group: str  # The group of entry points
    noun: str  # What such a part is called in messages
    base: str  # The class of such parts of packages, as `module:attribute`
    builtins: Mapping[str, Any]
    """Ours by name: as `module:attribute`, imported when it is used, or the part itself."""

    @property
    def names(self) -> list[str]:
        """The names of all parts, ours first. Imports none."""
        return [*self.builtins, *sorted(_installed(self.group).keys() - self.builtins.keys())]

    def find(self, name: str) -> EntryPoint | None:
        """The entry point of a package's part; None for one of ours. Imports nothing."""
        entries = _installed(self.group).get(name, ())
        owners = [f"penstock {__version__}"] * (name in self.builtins) + [*map(_package, entries)]
        if len(owners) > 1:
            raise ConfigError(
                f"{self.noun} {name!r} is in {owners[0]} and in {owners[1]}.\n"
                f"  Uninstall one of them, or rename its entry point in the group {self.group}."
            )
        if not owners:
            near = get_close_matches(name, self.names, 1)
            hint = f"Did you mean {near[0]}? " if near else ""
            raise UnknownPartError(
                f"there is no {self.noun} {name!r}.\n"
                f"  {hint}There are {', '.join(self.names)}; packages add others as entry points "
                f"of the group {self.group}."
            )
        return entries[0] if entries else None

    def load(self, name: str) -> Any:
        """The part. Raises ConfigError with file and line if its package cannot be imported."""
        return _load(self, name)

    def build(self, name: str, options: Mapping[str, Any]) -> Any:
        """The part with its options; of ours, which have none, the part itself. Raises pydantic's
        ValidationError for invalid options."""
        if self.find(name):
            return self.load(name)(**options)
        if options:
            raise ConfigError(f"{self.noun} {name} has no options; those of packages may have some")
        return self.load(name)

    def record(self, name: str, options: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """What is in a cache key about a package's part, as JSON; None for ours. Without `options`
        they are in the key elsewhere."""
        entry = self.find(name)
        if entry is None:
            return None
        version = getattr(self.load(name), "version", 1)
        record = {"package": _package(entry), "version": version}
        if options is not None:
            record["options"] = self.build(name, options).model_dump(mode="json")
        return record


def describe_failure(error: BaseException) -> str:
    """The error of a user's code in one line, with the file and line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    location = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{location}"


# Metadata of every distribution is read once.
@cache
def _all_entry_points() -> list[EntryPoint]:
    """The entry points of all packages that have some for us."""
    # Not `importlib.metadata.entry_points`, which parses those of every package: a twentieth of the
    # time of a finished run.
    names = dict.fromkeys(
        package.metadata["Name"]
        for package in distributions()
        if "[penstock." in (package.read_text("entry_points.txt") or "")
    )
    # By name again: of several copies on the path the first one is imported.
    return [entry for name in names for entry in distribution(name).entry_points]


@cache
def _installed(group: str) -> Mapping[str, Sequence[EntryPoint]]:
    """The entry points of a group by name. Imports nothing."""
    by_name: dict[str, list[EntryPoint]] = defaultdict(list)
    for entry in _all_entry_points():
        if entry.group == group:
            by_name[entry.name].append(entry)
    return by_name


@cache
def _load(registry: Registry, name: str) -> Any:
    entry = registry.find(name)
    if entry is None:
        target = registry.builtins[name]
        return _resolve(target) if isinstance(target, str) else target
    try:
        part = entry.load()
    # A module that calls sys.exit while it is imported would end this process without a message.
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{registry.noun} {name!r} of {_package(entry)} cannot be imported: "
            f"{describe_failure(error)}.\n  Repair the package, or install another version."
        ) from error
    base = _resolve(registry.base)
    if not isinstance(part, base) and not (isinstance(part, type) and issubclass(part, base)):
        raise ConfigError(
            f"{registry.noun} {name!r} of {_package(entry)} is {entry.value}, which is no "
            f"{registry.base.replace(':', '.')}.\n  Repair the package."
        )
    return part


def _resolve(target: str) -> Any:
    module, _, attribute = target.partition(":")
    return getattr(import_module(module), attribute)


def _package(entry: EntryPoint) -> str:
    return f"{entry.dist.name} {entry.dist.version}" if entry.dist else entry.module


FORMATS = Registry(
    "penstock.formats",
    "dataset format",
    "penstock.prepare.formats.conversation:DatasetFormat",
    {
        "tokenized": "penstock.prepare.formats.tokenized:tokenized",
        "chat": "penstock.prepare.formats.chat:chat",
        "sharegpt": "penstock.prepare.formats.sharegpt:sharegpt",
        "instruction": "penstock.prepare.formats.alpaca:instruction",
        "alpaca": "penstock.prepare.formats.alpaca:alpaca",
        "text": "penstock.prepare.formats.plain:plain",
        "preference": "penstock.prepare.formats.preference:preference",
        "kto": "penstock.prepare.formats.kto:kto",
        "sft_turns": "penstock.prepare.formats.erniekit:sft_turns",
        "preference_turns": "penstock.prepare.formats.erniekit:preference_turns",
    },
)

STAGES = Registry(
    "penstock.stages",
    "stage",
    "penstock.core.cache.package_stage:PackageStage",
    {
        name: f"penstock.{name}.stage:{name.title()}"
        for name in ("prepare", "encode", "pack", "reference", "train", "export", "push")
    },
)

LOSSES = Registry(
    "penstock.losses",
    "loss",
    "penstock.losses.logits_loss:LogitsLoss",
    {"cross_entropy": "penstock.losses.cross_entropy:CROSS_ENTROPY"},
)

METRICS = Registry(
    "penstock.metrics",
    "metric",
    "penstock.losses.logits_loss:LogitsMetric",
    # Ours are in every evaluation.
    dict.fromkeys(
        ("loss", "perplexity", "token_accuracy"), "penstock.train.eval.metrics:TokenMetrics"
    ),
)

OPTIMIZERS = Registry(
    "penstock.optimizers",
    "optimizer",
    "torch.optim:Optimizer",
    {
        name: f"penstock.optim.build:{name}"
        for name in ("adamw", "anyprecision_adamw", "sgd", "muon", "novograd")
    },
)

TRACKERS = Registry(
    "penstock.trackers",
    "tracker",
    "penstock.train.trackers.tracker:PackageTracker",
    {
        name: f"penstock.train.trackers.{name}:start_run"
        for name in ("wandb", "tensorboard", "mlflow", "trackio")
    },
)

_FAMILIES = {
    "llama": """
        llama qwen2 qwen3 mistral ministral ministral3 internlm3 iquestcoder cwm helium seed_oss
        smollm3
    """,
    "qwen": "qwen2_moe qwen3_moe qwen3_next qwen3_5_text qwen3_5_moe_text",
    "ernie": "ernie4_5 ernie4_5_moe",
    "gemma": "gemma gemma2 gemma3_text gemma4_text vaultgemma",
    "glm": "glm glm4 glm4_moe solar_open",
    "granite": "granite granite_swa granitemoe granitemoehybrid hyperclovax",
    "olmo": "olmo olmo2 olmo3 olmoe flex_olmo olmo_hybrid",
    "exaone": "exaone4 exaone_moe",
    "hunyuan": "hunyuan_v1_dense hunyuan_v1_moe hy_v3",
    "cohere": "cohere cohere2 cohere2_moe",
    "partial_rope": "phi3 stablelm",
    "ungated": "arcee jais2 nemotron opt",
    "mixture": "mixtral minimax_m2 gpt_oss dots1 mellum",
    "llama4": "llama4_text",
    "latent": """
        deepseek_v2 deepseek_v3 deepseek_v32 glm_moe_dsa glm4_moe_lite minicpm3 youtu
    """,
    "kimi_linear": "kimi_linear",
    "mamba": "bamba nemotron_h",
    "lfm2": "lfm2 lfm2_moe",
}
"""By module, the model types."""


def _families() -> Iterator[tuple[str, str]]:
    for module, names in _FAMILIES.items():
        for name in names.split():
            attribute = name.removesuffix("_text").upper()
            yield name, f"penstock.models.families.{module}:{attribute}"


FAMILIES = Registry(
    "penstock.families",
    "model family",
    "penstock.models.family:Family",
    dict(_families()),
)
