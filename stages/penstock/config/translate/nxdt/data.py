"""NxDT: three kinds of data modules, and how samples of each become rows."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from penstock.config.translate import rule
from penstock.config.translate.shared import GROUP, ROW, SOURCES, TESTS
from penstock.config.translate.translation import Draft, Entry, Rule
from penstock.core.sources.megatron_files import parse_splits

ALIGNMENT = "model_alignment_strategy"
DPO, ORPO, SFT, PEFT = (f"{ALIGNMENT}.{name}" for name in ("dpo", "orpo", "sft", "peft"))

OF_SFT = {"type": "instruction", "field_instruction": "input", "field_output": "output"}
OF_PAIRS = {"type": "preference"}

# A folder that `datasets` saved; its rows hold input_ids and labels.
OF_TOKENS = {"type": "tokenized", "data_files": "*.arrow", "ds_type": "arrow"}

LINES = (".jsonl", ".json", ".arrow")

# Documents in Megatron's .bin and .idx, of which data_prefix is what both names begin with.
INDEXED = {"type": "tokenized", "ds_type": "megatron"}

AS_THERE = "documents that are shuffled, joined, and cut every seq_length tokens, as there"

SHUFFLES = ("data.shuffle_merged_datasets", "data.shuffle_before_merging_datasets")

PREFIX, SPLITS = "data.data_prefix", "data.splits_string"


def prefers(draft: Draft) -> bool:
    """Whether a run learns from preferences."""
    return any(key.startswith((f"{DPO}.", f"{ORPO}.")) for key in draft.written)


def _source(entry: Entry) -> None:
    name = TESTS if entry.key == "data.val_dir" else SOURCES
    path = str(entry.value)
    is_text = path.rstrip("/").endswith(LINES)
    columns = OF_PAIRS if prefers(entry.draft) else OF_SFT if is_text else OF_TOKENS
    entry.put(name, [{"path": path, **columns}])
    if columns is OF_SFT:
        entry.explain(
            "where the tokenizer has a chat template, question and answer are put through it"
        )


def _prefix(entry: Entry) -> None:
    value: Any = entry.value
    parts = cast("dict[str, Any]", value if isinstance(value, dict) else {"train": value})
    if isinstance(value, dict) and not parts.get("train"):
        entry.refuse("it needs train: a prefix, or weights and prefixes in turn")
        return
    entry.put(SOURCES, _weighed(parts["train"]))
    held = _weighed(parts["validation"]) if parts.get("validation") else []
    if held:
        entry.put(TESTS, _unweighed(held))
    weights = [source.get("weight", 0.0) for source in entry.draft.value(SOURCES)]
    if not any(weights):
        for source in entry.draft.value(SOURCES):
            source.pop("weight", None)
    elif len(weights) == 1:
        entry.draft.put(SOURCES, _unweighed(entry.draft.value(SOURCES)))
    else:
        entry.put("data.mix_strategy", "random")
        entry.put("data.weight_unit", "tokens")
    entry.explain(AS_THERE)
    if _are_weighed(held):
        entry.approximated(f"{AS_THERE}; {_held_whole(held)}")


def _weighed(value: Any) -> list[dict[str, Any]]:
    # The sources of `[weight, path, weight, path]`, of several paths or of one.
    if not isinstance(value, list):
        return [{"path": str(value), **INDEXED}]
    parts = cast("list[Any]", value)
    numbers, paths = parts[::2], parts[1::2]
    if len(numbers) != len(paths) or not all(map(_is_number, numbers)):
        if any(map(_is_number, parts)):
            raise ValueError("weights and prefixes do not take turns")
        return [{"path": str(path), **INDEXED} for path in parts]
    weights = zip(numbers, paths, strict=True)
    return [{"path": str(path), **INDEXED, "weight": float(w)} for w, path in weights]


def _is_number(value: Any) -> bool:
    if isinstance(value, str):
        return value.replace(".", "", 1).isdecimal()
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_weighed(sources: Sequence[dict[str, Any]]) -> bool:
    # Whether weights decide how much of each is sampled.
    return len(sources) > 1 and any("weight" in source for source in sources)


def _held_whole(held: Sequence[dict[str, Any]]) -> str:
    # The report on weights of validation data, which a test set does not have here.
    weights = ", ".join(f"{source['weight']:g}" for source in held)
    return (
        f"validation reads every prefix whole, and not in shares of {weights}; one of weight 0 is "
        "left out"
    )


def _unweighed(sources: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    # The same sources, read whole; those of weight 0 left out.
    weighed = [dict(source) for source in sources if source.get("weight", 1.0)]
    return [{k: v for k, v in source.items() if k != "weight"} for source in weighed]


def _splits(entry: Entry) -> None:
    prefix: Any = entry.get(PREFIX)
    if prefix is None or isinstance(prefix, dict):
        entry.no_effect("read with one data_prefix for all alone")
        return
    _, validation, test = parse_splits(str(entry.value))
    entry.decides(f"{SOURCES}.0.splits_string")
    if validation:
        entry.decides(TESTS)
    if test:
        entry.explain("the test documents are read by nothing, there either")


def _share_out(draft: Draft) -> None:
    # The documents of each split, where one data_prefix serves all.
    line, prefix = draft.lines.get(SPLITS), draft.get(PREFIX)
    if prefix is None or isinstance(prefix, dict) or (line and line.kind == "refused"):
        return
    shares = str(draft.get(SPLITS))
    sources = draft.sources(SOURCES)
    for source in sources:
        source["splits_string"] = shares
    if parse_splits(shares)[1]:
        held = [{**source, "split": "validation"} for source in _unweighed(sources)]
        draft.put(TESTS, held)
        if _are_weighed(sources):
            draft.set_line(PREFIX, "approximated", f"{AS_THERE}; {_held_whole(sources)}")


def _order(entry: Entry) -> None:
    if entry.get(PREFIX) is not None:
        entry.no_effect("documents of data_prefix are shuffled, whichever way batches are drawn")
        return
    for name in SHUFFLES:
        entry.put(name, entry.value == "cyclic")


def _prompt_length(entry: Entry) -> None:
    strategy = entry.key.rpartition(".")[0]
    other_keys = [key for key in entry.draft.written if key.startswith(f"{strategy}.")]
    if entry.is_assumed and (not other_keys or f"{DPO}.max_dpo_prompt_length" in other_keys):
        return
    entry.put("data.max_prompt_len", entry.value)


def _truncation(entry: Entry) -> None:
    entry.put("data.truncation_mode", entry.value)
    if entry.value == "keep_end":
        entry.approximated("what is too long still loses its start here, and its end there")


def settle_data(draft: Draft) -> None:
    """How long a sample may be, and how many share a row."""
    is_indexed = PREFIX in draft.written
    if is_indexed:
        _share_out(draft)
    model, own = draft.get("model.encoder_seq_length"), draft.get("data.seq_length")
    longest = own or model
    sources = draft.sources(SOURCES)
    for source in (*sources, *draft.sources(TESTS)):
        if longest and source["type"] != "tokenized":
            source["max_seq_len"] = longest
        if number := draft.get("data.dev_choose_samples"):
            source["max_samples"] = number
    if draft.get("data.dev_choose_samples"):
        draft.set_line(
            "data.dev_choose_samples",
            "doubtful",
            "every data set, training and validation, keeps so many of its first samples; write"
            " max_samples of a data set in a native file to limit one alone",
        )
    if longest:
        draft.put(ROW, 2 * longest if prefers(draft) and isinstance(longest, int) else longest)
    if own and model and own != model:
        draft.set_line(
            "model.encoder_seq_length",
            "approximated",
            f"samples and rows have data.seq_length ({own}) tokens; upstream wants both alike",
        )
    if is_indexed:
        _wrap(draft)
    elif draft.get(f"{SFT}.packing", draft.get("data.packing")):
        draft.put("data.sample_packing_method", "sequential")
        _join(draft, sources)
    else:
        draft.put("data.sample_packing_method", "multipack")
        draft.put(GROUP, 1)
    is_tokenized = not is_indexed and any(source["type"] == "tokenized" for source in sources)
    for name in SHUFFLES if is_tokenized else ():
        if not draft.has(name):
            draft.put(name, False)


def _wrap(draft: Draft) -> None:
    # Documents are shuffled, concatenated and split; tokens attend to all before them.
    draft.put("data.sample_packing_method", "wrapped")
    if not draft.has("data.isolate_samples"):
        draft.put("data.isolate_samples", False)
    for name in SHUFFLES:
        draft.put(name, True)


def _join(draft: Draft, sources: Sequence[dict[str, Any]]) -> None:
    # Records of a packed row see those before them, and what does not fit one is left out.
    if not draft.has("data.isolate_samples"):
        draft.put("data.isolate_samples", False)
    if any("max_seq_len" in source for source in sources):
        draft.put("data.truncation_mode", "drop")
    key = f"{SFT}.packing" if f"{SFT}.packing" in draft.lines else "data.packing"
    draft.set_line(
        key,
        "approximated",
        "prompts are not trained, as documented; upstream trains them in packed rows",
    )
    draft.lines[key].names.append("data.isolate_samples")


def _boundaries(entry: Entry) -> None:
    # Megatron masks the position whose input is the end of a document, so what it foretells is the
    # next document's first token.
    if entry.get(PREFIX) is None:
        entry.no_effect("read with data_prefix alone")
    elif entry.value:
        entry.no_effect("the first token of a document is never predicted from another document")
    else:
        entry.approximated(
            "the first token of a document is not predicted from the one before, as with true"
        )


LENGTH = rule.decides(ROW, f"{SOURCES}.0.max_seq_len")
PACKING = rule.decides("data.sample_packing_method", GROUP)
DROPS_ROWS = "an evaluation takes every row; of training, data.dataloader_drop_last says it"

SAME: Mapping[str, str] = {
    "data.micro_batch_size": "train.micro_batch_size",
    "data.global_batch_size": "train.global_batch_size",
    "data.num_workers": "data.dataloader_num_workers",
    "data.index_mapping_dir": "data.dataset_prepared_path",
}

COMPUTED: Mapping[str, Rule] = {
    **dict.fromkeys(("data.train_dir", "data.val_dir"), _source),
    "data.data_prefix": _prefix,
    "data.dev_choose_samples": rule.decides(f"{SOURCES}.0.max_samples", f"{TESTS}.0.max_samples"),
    "data.seq_length": LENGTH,
    "model.encoder_seq_length": LENGTH,
    "data.splits_string": _splits,
    "data.dataloader_type": _order,
    "data.tokenizer.type": rule.when(
        lambda entry: entry.get("data.tokenizer.library") != "megatron",
        rule.put("model.tokenizer_path"),
        "the name of a class; vocab_file says where the tokenizer is",
    ),
    "data.tokenizer.vocab_file": rule.explained(
        rule.put("model.tokenizer_path", lambda file: str(file).rpartition("/")[0] or "."),
        "the folder of both files, which transformers reads as vocab.json and merges.txt",
    ),
    "data.packing": PACKING,
    f"{SFT}.packing": PACKING,
    **{f"{strategy}.max_prompt_length": _prompt_length for strategy in (DPO, ORPO)},
    f"{DPO}.max_dpo_prompt_length": _prompt_length,
    **{f"{strategy}.truncation_mode": _truncation for strategy in (DPO, ORPO)},
    "data.reset_position_ids": rule.when(
        lambda entry: (
            bool(entry.value) != bool(entry.get("data.reset_attention_mask", entry.value))
        ),
        rule.approximated(
            "positions restart where attention does, as reset_attention_mask decides"
        ),
        "positions restart where attention does; reset_attention_mask decides it",
    ),
    "data.reset_attention_mask": rule.truth("data.isolate_samples"),
    "data.eod_mask_loss": _boundaries,
}

# Assumed where such a strategy, or a data_prefix for all splits, is written.
DEFAULTS: Mapping[str, Any] = {
    f"{DPO}.max_prompt_length": 2048,
    f"{ORPO}.max_prompt_length": 2048,
    SPLITS: "980,10,10",
}
