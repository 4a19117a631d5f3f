"""TRL and the alignment-handbook: data sets by name, in lists, and with shares of each."""

from collections.abc import Mapping
from typing import Any, cast

from penstock.config.translate import rule
from penstock.config.translate.dialect import Table, listed
from penstock.config.translate.shared import SOURCES, TESTS
from penstock.config.translate.translate_key import translate_items
from penstock.config.translate.translation import Entry, Rule

GRANTED = (
    "TRL tells from the columns what rows hold, and a column messages is taken for granted here;"
    " if they hold text, write dataset_text_field"
)
SHARED_OUT = "the first rows, or every n-th, of each data set; there rows are drawn at random"


def columns_of(entry: Entry, kind: str) -> dict[str, Any]:
    """The type of the data, `kind` being sft or preference, and the columns that it reads."""
    if kind == "preference":
        return {"type": kind}
    if entry.get("completion_only_loss"):
        named = {"field_instruction": "prompt", "field_output": "completion"}
        return {"type": "instruction", **named}
    if "dataset_text_field" in entry.draft.written:
        return {"type": "text", "field_text": entry.get("dataset_text_field")}
    return {"type": "chat"}


def take_share(source: dict[str, Any], share: Any) -> None:
    """Use a share of a data set: one of n shards where that is closer than whole percents."""
    if not isinstance(share, int | float) or not 0 < share <= 1:
        raise ValueError(f"{share} is no share")
    shards, percents = round(1 / share), max(1, round(100 * share))
    if share == 1:
        return
    if abs(1 / shards - share) <= abs(percents / 100 - share):
        source["shards"] = shards
    else:
        source["split"] = f"{source.get('split', 'train')}[:{percents}%]"


def by_name(kind: str) -> Rule:
    """The rule of `dataset_name`."""

    def apply(entry: Entry) -> None:
        columns = columns_of(entry, kind)
        config = entry.get("dataset_config")
        named = {"path": entry.value, **({"name": config} if config else {}), **columns}
        split = entry.get("dataset_train_split", "train")
        entry.put(SOURCES, [{**named, **({"split": split} if split != "train" else {})}])
        if entry.get("eval_strategy", "no") != "no":
            entry.put(TESTS, [{**named, "split": entry.get("dataset_test_split", "test")}])
        if columns == {"type": "chat"}:
            entry.approximated(GRANTED)

    return apply


def _share(entry: Entry) -> None:
    source = entry.draft.value(entry.into.rstrip("."))
    take_share(source, entry.value)
    entry.decides(*(f"{entry.into}{name}" for name in ("shards", "split") if name in source))
    if entry.value == 1:
        entry.no_effect("the whole data set is used")
    else:
        entry.approximated(SHARED_OUT)


# The keys of a data set of several.
ITEMS = Table(
    same={
        **{name: name for name in ("path", "name", "split", "data_files")},
        **{"id": "path", "config": "name"},
    },
    computed={
        "columns": rule.no_effect("columns that the type does not read are left out"),
        # After `split`, which it may extend.
        "weight": _share,
    },
    unsupported={"data_dir": "write data_files"},
)


def mixture(kind: str) -> Rule:
    """The rule of `datasets`, and of `dataset_mixture.datasets`."""

    def apply(entry: Entry) -> None:
        items = [
            dict(sorted(item.items(), key=lambda pair: pair[0] == "weight"))
            for item in listed(entry.value)
        ]
        columns = columns_of(entry, kind)
        entry.put(SOURCES, [dict(columns) for _ in items])
        translate_items(entry, items, ITEMS, SOURCES)

    return apply


def mixer(kind: str) -> Rule:
    """The rule of `dataset_mixer`: data sets with the share of each; test data is used whole."""

    def apply(entry: Entry) -> None:
        shares = cast("dict[str, Any]", entry.value)
        splits = [str(split) for split in listed(entry.get("dataset_splits", ["train", "test"]))]
        configs = listed(entry.get("dataset_configs", [None] * len(shares)))
        sources: dict[str, list[dict[str, Any]]] = {SOURCES: [], TESTS: []}
        for (path, share), config in zip(shares.items(), configs, strict=True):
            named = {"path": path, **({"name": config} if config else {})}
            for split in splits:
                source: dict[str, Any] = {**named, **columns_of(entry, kind), "split": split}
                sources[TESTS if "test" in split else SOURCES].append(source)
                if "test" not in split:
                    take_share(source, share)
        strategy = entry.get("eval_strategy") or entry.get("evaluation_strategy", "no")
        evaluates = entry.get("do_eval") or strategy != "no"
        for name, datasets in sources.items():
            if datasets and (name == SOURCES or evaluates):
                entry.put(name, datasets)
        if any(share != 1 for share in shares.values()):
            entry.approximated(SHARED_OUT)

    return apply


def data_rules(kind: str) -> Mapping[str, Rule]:
    """The rules of all keys that name data."""
    return {
        "dataset_name": by_name(kind),
        "datasets": mixture(kind),
        "dataset_mixture.datasets": mixture(kind),
        "dataset_mixture.test_split_size": rule.put("data.val_set_size"),
        "dataset_mixture.seed": rule.approximated(
            "train.seed decides what is held out, and the order of samples"
        ),
        "dataset_mixer": mixer(kind),
        "dataset_splits": rule.decides(SOURCES, TESTS),
        "dataset_configs": rule.decides(SOURCES, TESTS),
    }
