"""Translate the values of a foreign file with the tables of its dialect."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any, cast

from penstock.config.loading.schema_tree import branches, is_section
from penstock.config.schema.base import ConfigSection
from penstock.config.schema.run import RunConfig
from penstock.config.server.run_fields import BUILT_IN, SERVER
from penstock.config.translate.axolotl.rules import AXOLOTL
from penstock.config.translate.dialect import Dialect
from penstock.config.translate.erniekit.rules import ERNIEKIT
from penstock.config.translate.fit_parallel_sizes import Devices, fit_parallel_sizes
from penstock.config.translate.hf.llama_factory import LLAMA_FACTORY
from penstock.config.translate.hf.llama_factory_v1 import LLAMA_FACTORY_V1
from penstock.config.translate.hf.trl import TRL, TRL_DPO
from penstock.config.translate.nxdt.rules import NXDT
from penstock.config.translate.torchtune.rules import TORCHTUNE
from penstock.config.translate.translate_key import apply_rule, flat_keys, translate_key
from penstock.config.translate.translation import GAPS, Draft, Entry, Line, Translation
from penstock.core.errors import ConfigError

# In the order in which they are tried.
DIALECTS: tuple[Dialect, ...] = (
    NXDT,
    TORCHTUNE,
    SERVER,
    AXOLOTL,
    LLAMA_FACTORY_V1,
    LLAMA_FACTORY,
    TRL_DPO,
    TRL,
    ERNIEKIT,
)

# The name of Penstock's own format in `--dialect`.
NATIVE = "native"


def detect_dialect(values: Mapping[str, Any]) -> Dialect | None:
    """The dialect of a file, as parsed; None for Penstock's own format or an unknown one."""
    return next((dialect for dialect in DIALECTS if dialect.recognizes(values)), None)


def find_dialect(name: str) -> Dialect | None:
    """The dialect with this name; None for Penstock's own format. Raises ConfigError for an unknown
    name."""
    if name == NATIVE:
        return None
    by_name = {dialect.name: dialect for dialect in DIALECTS}
    if name not in by_name:
        near = get_close_matches(name, by_name, 1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{name} is not a dialect{meant}\n  There are {', '.join([*by_name, NATIVE])}."
        )
    return by_name[name]


def translate(
    values: Mapping[str, Any], dialect: Dialect, devices: Devices, folder: Path | None = None
) -> Translation:
    """Translate a file in `dialect`, with parallel sizes that fit the devices. `folder` has the
    file, and may have others that it names.

    Nothing is validated: invalid values are reported when the translation is loaded.
    """
    flat = dict(flat_keys(dialect.prepare(values), dialect.keys))
    written = {
        key: value
        for key, value in flat.items()
        if value is not None or key in dialect.meaningful_nulls
    }
    defaults = {**dialect.defaults, **dialect.inferred(written)}
    draft = Draft(written, defaults, folder)
    for key, value in flat.items():
        draft.lines[key] = Line(key, value, "translated")
        _translate(draft, dialect, key, is_null=key not in written)
    for key, value in defaults.items():
        if not written.keys() & {key, *dialect.overridden_by.get(key, ())}:
            _assume(draft, dialect, key, value)
    dialect.finalize(draft)
    if str(draft.value("model.model_path")).startswith(BUILT_IN):
        draft.rename("model.model_path", "model.config_path")
    ranks = fit_parallel_sizes(draft, devices)
    # Values that are translated as their tool computes them, and probably do not do what was
    # intended.
    _warmup_ends(draft)
    _texts_keep_their_ends(draft)
    _experts_compute_in_fp8(draft)
    settings = _in_order(draft.settings, RunConfig)
    placeholders = {
        name: value
        for name, value in {**dialect.placeholders, **draft.placeholders}.items()
        if not draft.has(name)
    }
    lines = tuple(draft.lines.values())
    return Translation(dialect.name, dialect.title, settings, lines, ranks, placeholders)


def translate_native(values: Mapping[str, Any], devices: Devices) -> Translation:
    """A file in Penstock's own format, unchanged."""
    lines = [Line(key, value, "maps", names=[key]) for key, value in flat_keys(values, set())]
    return Translation(NATIVE, "Penstock", values, lines, devices.ranks)


def _translate(draft: Draft, dialect: Dialect, key: str, *, is_null: bool) -> None:
    stronger = [name for name in dialect.overridden_by.get(key, ()) if name in draft.written]
    if stronger and key in dialect.keys and not is_null:
        draft.set_line(key, "no effect", f"{stronger[0]} is written, and overrides it")
    else:
        entry = Entry(draft, draft.lines[key])
        translate_key(entry, dialect, key, dialect.title, is_null=is_null)


def _assume(draft: Draft, dialect: Dialect, key: str, value: Any) -> None:
    line = Line(key, value, "assumed")
    entry = Entry(draft, line)
    if key in dialect.same:
        entry.put(dialect.same[key], value)
    else:
        apply_rule(dialect.computed[key], entry)
    if line.names or line.kind in GAPS:
        draft.lines[key] = line


def _in_order(settings: Mapping[str, Any], section: type[ConfigSection]) -> dict[str, Any]:
    # The same settings in the order of the schema; unknown ones last.
    ordered: dict[str, Any] = {}
    for name in [*section.model_fields, *settings]:
        if name not in settings or name in ordered:
            continue
        value = settings[name]
        field = section.model_fields.get(name)
        ordered[name] = value
        if isinstance(value, dict) and field:
            inner = next(filter(is_section, branches(field.annotation)), None)
            if inner:
                ordered[name] = _in_order(cast("dict[str, Any]", value), inner)
    return ordered


def _warmup_ends(draft: Draft) -> None:
    warmup, steps = draft.value("train.lr_warmup_steps"), draft.value("train.max_steps")
    if isinstance(warmup, int) and isinstance(steps, int) and 0 < steps < warmup:
        draft.mark_doubtful(
            "train.lr_warmup_steps",
            f"the warmup of {warmup} steps is longer than the run of {steps}, so the learning rate"
            " never reaches its peak",
        )


def _texts_keep_their_ends(draft: Draft) -> None:
    if draft.value("data.truncation_mode", "keep_start") == "drop":
        return
    for name in ("data.datasets", "data.test_datasets"):
        texts = (source for source in draft.sources(name) if source.get("type") == "text")
        limits = {source.get("max_seq_len") for source in texts}
        # Keys that name data sets are marked once, however many they name.
        for limit in sorted(limit for limit in limits if isinstance(limit, int)):
            draft.mark_doubtful(
                name,
                f"a document of more than {limit} tokens is truncated; tools that concatenate and"
                " split documents train on the rest too. Split long documents",
            )


def _experts_compute_in_fp8(draft: Draft) -> None:
    counts = ("num_local_experts", "num_experts")
    is_mixture = any(draft.value(f"model.foundation.{name}") for name in counts)
    if draft.value("train.enable_fp8_training"):
        every = "experts" if is_mixture else "if the model has experts, they"
        draft.mark_doubtful(
            "train.enable_fp8_training",
            f"{every} compute in bfloat16 here: FP8 is for the other linear layers",
        )
