"""Combinations of data settings that cannot be honoured, each with what to write instead."""

import re
from collections.abc import Callable, Iterator

from penstock.config.loading.fault import ConfigIssue, Steps, dotted
from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.run import RunConfig
from penstock.core.sources.local_files import detect_file_kind
from penstock.core.sources.megatron_files import DATA, INDEX, KIND, PARTS

Faults = Iterator[ConfigIssue]

TRAIN, TEST, AVOID = "datasets", "test_datasets", "decontaminate_datasets"

HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")


def _typed(run: RunConfig, *lists: str) -> Iterator[tuple[Steps, DatasetConfig]]:
    """Those whose type is known: where it is not written, records will tell it, and rules are asked
    again."""
    return (each for each in _entries(run, *lists) if each[1].is_typed)


def _entries(run: RunConfig, *lists: str) -> Iterator[tuple[Steps, DatasetConfig]]:
    for name in lists or (TRAIN, TEST, AVOID):
        for index, entry in enumerate(getattr(run.data, name)):
            yield ("data", name, index), entry


def _formats_are_known(run: RunConfig) -> Faults:
    for path, entry in _entries(run):
        if entry.data_files is None or entry.ds_type is not None or detect_file_kind(entry.path):
            continue
        files = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
        kinds = {detect_file_kind(file) for file in files}
        if len(kinds) != 1 or None in kinds:
            told = "do not tell one format" if files else "is empty"
            yield ConfigIssue(
                (*path, "data_files"),
                f"the names in data_files {told}; write ds_type: json, csv, parquet, arrow or text",
            )


def _samples_fit_rows(run: RunConfig) -> Faults:
    longest = run.data.row_length
    if run.data.sample_packing_method == "wrapped":
        return
    for path, entry in _entries(run, TRAIN, TEST):
        if entry.max_seq_len is not None and entry.max_seq_len > longest:
            yield ConfigIssue(
                (*path, "max_seq_len"),
                f"a sample of {entry.max_seq_len} tokens does not fit a row of {longest}; lower"
                " max_seq_len or raise data.sample_packing_sequence_len",
                ("data.sample_packing_sequence_len",),
            )


def _padding_divides_rows(run: RunConfig) -> Faults:
    length, multiple = run.data.row_length, run.data.pad_to_multiple_of
    if run.data.asks_for("pad_to_multiple_of") and length % multiple:
        above = -(-length // multiple) * multiple
        below = above - multiple
        nearest = f"{below} or {above}" if below else f"{above}"
        yield ConfigIssue(
            ("data", "pad_to_multiple_of"),
            f"{multiple} does not divide sample_packing_sequence_len ({length}); write"
            f" sample_packing_sequence_len: {nearest}, or a pad_to_multiple_of that divides it",
            ("data.sample_packing_sequence_len",),
        )


def _one_source_of_evaluation(run: RunConfig) -> Faults:
    if run.data.val_set_size is not None and run.data.test_datasets:
        yield ConfigIssue(
            ("data", "val_set_size"),
            "samples are set aside for evaluation although test_datasets are given;"
            " leave one of the two out",
            ("data.test_datasets",),
        )


def _pieces_are_among_their_number(run: RunConfig) -> Faults:
    for path, entry in _entries(run):
        count, index = entry.shards, entry.shards_idx
        yield from _piece((*path, "shards"), count, (*path, "shards_idx"), index)
        if count is not None and entry.preprocess_shards is not None:
            yield ConfigIssue(
                (*path, "preprocess_shards"),
                "shards cuts this dataset too, and takes one piece of it; leave one of the two out",
                (dotted((*path, "shards")),),
            )
    count, index = run.data.dataset_shard_num, run.data.dataset_shard_idx
    told = list(_piece(("data", "dataset_shard_num"), count, ("data", "dataset_shard_idx"), index))
    if count is not None and index is None:
        told.append(
            ConfigIssue(
                ("data", "dataset_shard_num"),
                f"which of the {count} pieces is not said; write dataset_shard_idx: 0 to"
                f" {count - 1}",
                ("data.dataset_shard_idx",),
            )
        )
    yield from told


def _piece(at_count: Steps, count: int | None, at_index: Steps, index: int | None) -> Faults:
    name = at_count[-1]
    if index is not None and count is None:
        yield ConfigIssue(
            at_index, f"there is one piece without {name}; write {name} too", (dotted(at_count),)
        )
    elif index is not None and count is not None and index >= count:
        yield ConfigIssue(
            at_index,
            f"{index} is none of {count} pieces, which are counted from 0; write at most"
            f" {count - 1}, or raise {name}",
            (dotted(at_count),),
        )


def _indexed_files_hold_tokens(run: RunConfig) -> Faults:
    for path, entry in _entries(run):
        is_indexed = entry.ds_type == KIND or entry.path.endswith((INDEX, DATA))
        if is_indexed and entry.format != "tokenized":
            yield ConfigIssue(
                (*path, "type"),
                f"data of Megatron's holds token ids, and {entry.format} is made of text; write"
                " type: tokenized, or leave it out",
                (dotted((*path, "ds_type")), dotted((*path, "path"))),
            )
        if entry.splits_string is None:
            continue
        if entry.ds_type not in (None, KIND):
            yield ConfigIssue(
                (*path, "splits_string"),
                f"shares out documents of Megatron's, and ds_type is {entry.ds_type}; leave"
                " splits_string out",
                (dotted((*path, "ds_type")),),
            )
        if entry.split not in (None, *PARTS):
            yield ConfigIssue(
                (*path, "split"),
                f"is {entry.split}, and splits_string shares documents out to {', '.join(PARTS)};"
                " write one of these",
                (dotted((*path, "splits_string")),),
            )


def _weights_are_used(run: RunConfig) -> Faults:
    data = run.data
    reads = ("data.mix_strategy",)
    if all(entry.weight == 0 for entry in data.datasets):
        yield ConfigIssue(
            ("data", "datasets"),
            "every weight is 0, so nothing is left to train on; raise one",
        )
        return
    for path, entry in _entries(run, TRAIN):
        if data.mix_strategy == "concat" and entry.weight not in (0, 1):
            yield ConfigIssue(
                (*path, "weight"),
                f"mix_strategy: concat takes every sample once, whatever its weight"
                f" ({entry.weight:g}); write mix_strategy: random (or interleave_under,"
                " interleave_over), or weight: 0 to leave the source out",
                reads,
            )
    for path, entry in _entries(run, TEST, AVOID):
        for name in ("weight", "max_samples") if path[1] == AVOID else ("weight",):
            if entry.asks_for(name):
                yield ConfigIssue(
                    (*path, name),
                    f"no samples are drawn from {path[1]}; leave {name} out",
                )


def _epochs_are_drawn(run: RunConfig) -> Faults:
    data = run.data
    if data.weight_unit == "tokens" and data.mix_strategy == "concat":
        yield ConfigIssue(
            ("data", "weight_unit"),
            "mix_strategy: concat takes every sample once, whatever its weight; write mix_strategy:"
            " random (or interleave_under, interleave_over), or leave weight_unit out",
            ("data.mix_strategy",),
        )
    if data.samples_per_epoch is not None and data.mix_strategy != "random":
        yield ConfigIssue(
            ("data", "samples_per_epoch"),
            f"an epoch of mix_strategy: {data.mix_strategy} is as long as its sources make it;"
            " write mix_strategy: random, or leave samples_per_epoch out",
            ("data.mix_strategy",),
        )


def _what_is_left_out_is_asked_for(run: RunConfig) -> Faults:
    data = run.data
    if data.asks_for("near_duplicate_threshold") and data.deduplicate != "near":
        yield ConfigIssue(
            ("data", "near_duplicate_threshold"),
            "near duplicates are not looked for; write deduplicate: near,"
            " or leave near_duplicate_threshold out",
            ("data.deduplicate",),
        )
    if data.asks_for("decontaminate_ngram") and not data.decontaminate_datasets:
        yield ConfigIssue(
            ("data", "decontaminate_ngram"),
            "there is nothing to compare with; write decontaminate_datasets,"
            " or leave decontaminate_ngram out",
            ("data.decontaminate_datasets",),
        )


def _what_is_cut_has_a_length(run: RunConfig) -> Faults:
    data = run.data
    lengths = [(path, length) for path, entry in _entries(run) if (length := entry.max_seq_len)]
    reads = tuple(dotted((*path, "max_seq_len")) for path, _ in _entries(run))
    for name in ("truncation_mode", "max_prompt_len"):
        if not lengths and data.asks_for(name):
            yield ConfigIssue(
                ("data", name),
                "no dataset has a max_seq_len, so nothing is cut;"
                f" write max_seq_len in datasets, or leave {name} out",
                reads,
            )
    prompt = data.max_prompt_len
    for path, longest in lengths:
        if prompt is not None and prompt >= longest:
            yield ConfigIssue(
                ("data", "max_prompt_len"),
                f"a prompt of {prompt} tokens leaves no room for an answer in"
                f" {dotted((*path, 'max_seq_len'))} ({longest}); write less than {longest}",
                reads,
            )
            return


def _samples_are_of_one_kind(run: RunConfig) -> Faults:
    kinds = [(path, entry.format, entry.kind) for path, entry in _typed(run, TRAIN, TEST)]
    if not kinds:
        return
    first_path, first_type, first = kinds[0]
    reads = (f"{dotted(first_path)}.type",)
    for path, its_type, kind in kinds[1:]:
        if kind != first:
            yield ConfigIssue(
                (*path, "type"),
                f"{its_type} gives {kind} samples, and {first_type} of {dotted(first_path)} gives"
                f" {first} samples; prepare them in two runs",
                reads,
            )
            return
    beyond = set(run.stages) - {"prepare", "pack"}
    if first != "sft" and beyond and run.train.objective == "sft":
        yield ConfigIssue(
            (*first_path, "type"),
            f"train.objective: sft learns nothing from {first} samples; write train.objective:"
            " preference, pipeline.stages: [prepare, pack], or another type",
            ("pipeline.stages", "push", "train.objective"),
        )


def _judged_answers_are_trained_alone(run: RunConfig) -> Faults:
    first_path, first = next(iter(_entries(run, TRAIN)))
    if first.kind == "sft" or not first.is_typed:
        return
    for name in ("train_on_prompt", "train_on_turns"):
        if run.data.asks_for(name):
            yield ConfigIssue(
                ("data", name),
                f"of {first.type} samples the answers are trained whole, and nothing else;"
                f" leave {name} out",
                (f"{dotted(first_path)}.type",),
            )


def _prompts_have_two_answers(run: RunConfig) -> Faults:
    path, first = next(iter(_entries(run, TRAIN)))
    if run.data.asks_for("share_prompts") and first.is_typed and first.kind == "sft":
        yield ConfigIssue(
            ("data", "share_prompts"),
            f"samples of type {first.type} have one answer; leave share_prompts out",
            (f"{dotted(path)}.type",),
        )


def _answers_are_compared_apart(run: RunConfig) -> Faults:
    path, first = next(iter(_entries(run, TRAIN)))
    if not run.data.isolate_samples and first.kind != "sft":
        yield ConfigIssue(
            ("data", "isolate_samples"),
            f"answers of {first.type} samples are compared by what they are worth alone; leave"
            " isolate_samples out",
            (f"{dotted(path)}.type",),
        )


def _streams_come_from_the_hub(run: RunConfig) -> Faults:
    for path, entry in _entries(run):
        on_hub = (
            HUB_ID.fullmatch(entry.path)
            and not detect_file_kind(entry.path)
            and entry.path != "dummy"
        )
        if entry.streaming and not on_hub:
            yield ConfigIssue(
                (*path, "streaming"),
                f"{entry.path} is no dataset of the hub (org/name), and files are read piece by"
                " piece anyway; leave streaming out",
                (dotted((*path, "path")),),
            )


def _what_is_cut_anywhere_is_one_document(run: RunConfig) -> Faults:
    path, first = next(iter(_entries(run, TRAIN)))
    if run.data.sample_packing_method == "wrapped" and first.kind != "sft":
        yield ConfigIssue(
            ("data", "sample_packing_method"),
            f"wrapped cuts samples where a row is full, and both answers of {first.type} samples"
            " must stay whole; write sequential or multipack",
            (f"{dotted(path)}.type",),
        )


def _pushed_data_has_a_login(run: RunConfig) -> Faults:
    data = run.data
    if data.push_dataset_to_hub is not None and not data.hf_use_auth_token:
        yield ConfigIssue(
            ("data", "push_dataset_to_hub"),
            "pushing needs the hub's login; write hf_use_auth_token: true",
            ("data.hf_use_auth_token",),
        )


def _who_reads_ahead_is_there(run: RunConfig) -> Faults:
    steps, usual = run.data.dataloader_prefetch_factor, 2
    if run.data.dataloader_num_workers == 0 and steps not in (None, usual):
        yield ConfigIssue(
            ("data", "dataloader_prefetch_factor"),
            f"no process reads {steps} steps ahead with dataloader_num_workers: 0; write more of"
            " them, or leave dataloader_prefetch_factor out",
            ("data.dataloader_num_workers",),
        )


def _task_runners_are_chosen(run: RunConfig) -> Faults:
    pipeline = run.pipeline
    for name in ("task_runner_address", "task_runner_workers"):
        if pipeline.task_runner is None and getattr(pipeline, name) is not None:
            yield ConfigIssue(
                ("pipeline", name),
                f"no task runner is chosen; write task_runner: dask or ray, or leave {name} out",
                ("pipeline.task_runner",),
            )


DATA_RULES: tuple[Callable[[RunConfig], Faults], ...] = (
    _formats_are_known,
    _samples_fit_rows,
    _padding_divides_rows,
    _one_source_of_evaluation,
    _pieces_are_among_their_number,
    _indexed_files_hold_tokens,
    _weights_are_used,
    _epochs_are_drawn,
    _what_is_left_out_is_asked_for,
    _what_is_cut_has_a_length,
    _samples_are_of_one_kind,
    _judged_answers_are_trained_alone,
    _prompts_have_two_answers,
    _answers_are_compared_apart,
    _streams_come_from_the_hub,
    _what_is_cut_anywhere_is_one_document,
    _pushed_data_has_a_login,
    _who_reads_ahead_is_there,
    _task_runners_are_chosen,
)
