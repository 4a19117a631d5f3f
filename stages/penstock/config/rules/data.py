"""Invalid combinations of data settings that a declaration cannot say."""

import re
from collections.abc import Callable, Iterator

from penstock.config.loading.fault import ConfigIssue, Issues, Steps, dotted
from penstock.config.schema.dataset import LOSS_WEIGHT_LIMITS, DatasetConfig
from penstock.config.schema.run import RunConfig
from penstock.core.sources.local_files import detect_file_kind
from penstock.core.sources.megatron_files import DATA, INDEX, KIND, PARTS

TRAIN, TEST, AVOID = "datasets", "test_datasets", "decontaminate_datasets"

# Fields with the smallest and the largest number.
MEDIA_BOUNDS = (("image_min_pixels", "image_max_pixels"), ("video_min_frames", "video_max_frames"))

HUB_ID = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*(/[A-Za-z0-9_][A-Za-z0-9_.-]*)?")


def iter_datasets(run: RunConfig, *lists: str) -> Iterator[tuple[Steps, DatasetConfig]]:
    """The data sets of these lists, or of all, with their paths."""
    for name in lists or (TRAIN, TEST, AVOID):
        for index, entry in enumerate(getattr(run.data, name)):
            yield ("data", name, index), entry


def _check_file_format(run: RunConfig) -> Issues:
    for path, entry in iter_datasets(run):
        if entry.data_files is None or entry.ds_type is not None or detect_file_kind(entry.path):
            continue
        files = [entry.data_files] if isinstance(entry.data_files, str) else entry.data_files
        kinds = {detect_file_kind(file) for file in files}
        if len(kinds) != 1 or None in kinds:
            problem = "do not have one known extension" if files else "is empty"
            yield ConfigIssue(
                (*path, "data_files"),
                f"the names in data_files {problem}; write ds_type: json, csv, parquet, arrow,"
                " text or tar",
            )


def _check_max_seq_len(run: RunConfig) -> Issues:
    longest = run.data.row_length
    if run.data.sample_packing_method == "wrapped":
        return
    for path, entry in iter_datasets(run, TRAIN, TEST):
        if entry.max_seq_len is not None and entry.max_seq_len > longest:
            yield ConfigIssue(
                (*path, "max_seq_len"),
                f"a sample of {entry.max_seq_len} tokens does not fit a packed sequence of"
                f" {longest}; lower max_seq_len or raise data.sample_packing_sequence_len",
                ("data.sample_packing_sequence_len",),
            )


def _check_pad_multiple(run: RunConfig) -> Issues:
    length, multiple = run.data.row_length, run.data.pad_to_multiple_of
    if run.data.is_non_default("pad_to_multiple_of") and length % multiple:
        above = -(-length // multiple) * multiple
        below = above - multiple
        nearest = f"{below} or {above}" if below else f"{above}"
        yield ConfigIssue(
            ("data", "pad_to_multiple_of"),
            f"{multiple} does not divide sample_packing_sequence_len ({length}); write"
            f" sample_packing_sequence_len: {nearest}, or a pad_to_multiple_of that divides it",
            ("data.sample_packing_sequence_len",),
        )


def _check_shards(run: RunConfig) -> Issues:
    for path, entry in iter_datasets(run):
        count, index = entry.shards, entry.shards_idx
        yield from _check_shard_index((*path, "shards"), count, (*path, "shards_idx"), index)
    count, index = run.data.dataset_shard_num, run.data.dataset_shard_idx
    yield from _check_shard_index(
        ("data", "dataset_shard_num"), count, ("data", "dataset_shard_idx"), index
    )
    if count is not None and index is None:
        yield ConfigIssue(
            ("data", "dataset_shard_num"),
            f"has {count} shards, and none is selected; write dataset_shard_idx: 0 to {count - 1}",
            ("data.dataset_shard_idx",),
        )


def _check_shard_index(
    at_count: Steps, count: int | None, at_index: Steps, index: int | None
) -> Issues:
    name = at_count[-1]
    if index is not None and count is None:
        yield ConfigIssue(
            at_index,
            f"there is only one shard without {name}; write {name} too",
            (dotted(at_count),),
        )
    elif index is not None and count is not None and index >= count:
        yield ConfigIssue(
            at_index,
            f"{index} is not an index of {count} shards, which start at 0; write at most"
            f" {count - 1}, or raise {name}",
            (dotted(at_count),),
        )


def _check_megatron_files(run: RunConfig) -> Issues:
    for path, entry in iter_datasets(run):
        is_indexed = entry.ds_type == KIND or entry.path.endswith((INDEX, DATA))
        if is_indexed and entry.format != "tokenized":
            yield ConfigIssue(
                (*path, "type"),
                f"Megatron-LM files contain token ids, and {entry.format} needs text; write type:"
                " tokenized, or leave it out",
                (dotted((*path, "ds_type")), dotted((*path, "path"))),
            )
        if entry.splits_string is not None and entry.split not in (None, *PARTS):
            yield ConfigIssue(
                (*path, "split"),
                f"is {entry.split}, and splits_string has the splits {', '.join(PARTS)}; write one"
                " of these",
                (dotted((*path, "splits_string")),),
            )


def _check_weights(run: RunConfig) -> Issues:
    data = run.data
    reads = ("data.mix_strategy",)
    if all(entry.weight == 0 for entry in data.datasets):
        yield ConfigIssue(
            ("data", "datasets"), "all weights are 0, so there is no training data; raise one"
        )
        return
    for path, entry in iter_datasets(run, TRAIN):
        if data.mix_strategy == "concat" and entry.weight not in (0, 1):
            yield ConfigIssue(
                (*path, "weight"),
                f"mix_strategy: concat uses every sample once and ignores the weight"
                f" ({entry.weight:g}); write mix_strategy: random (or interleave_under,"
                " interleave_over), or weight: 0 to leave the source out",
                reads,
            )
    for path, entry in iter_datasets(run, TEST, AVOID):
        for name in ("weight", "max_samples") if path[1] == AVOID else ("weight",):
            if entry.is_non_default(name):
                yield ConfigIssue((*path, name), f"{path[1]} are not mixed; leave {name} out")


def _check_loss_weights(run: RunConfig) -> Issues:
    for name in (TRAIN, TEST):
        entries = getattr(run.data, name)
        if entries and all(entry.loss_weight == 0 for entry in entries):
            why = "every loss_weight is 0, so no token counts; raise one"
            yield ConfigIssue(("data", name), why)
    for path, entry in iter_datasets(run):
        for name in ("loss_weight", "field_weight"):
            if not entry.is_non_default(name):
                continue
            if path[1] == AVOID:
                yield ConfigIssue((*path, name), f"{AVOID} are not trained on; leave {name} out")
            elif entry.is_typed and entry.kind != "sft":
                yield ConfigIssue(
                    (*path, name),
                    f"the loss of type: {entry.type} is one of whole completions, whose tokens have"
                    f" no weights; leave {name} out",
                    (dotted((*path, "type")),),
                )
        smallest, largest = LOSS_WEIGHT_LIMITS
        if entry.loss_weight and not smallest <= entry.loss_weight <= largest:
            yield ConfigIssue(
                (*path, "loss_weight"),
                f"is {entry.loss_weight:g}; write 0, or a number from {smallest:g} to {largest:g}",
            )
        columns = run.data.select_columns
        if columns is not None and entry.field_weight and entry.field_weight not in columns:
            yield ConfigIssue(
                (*path, "field_weight"),
                f"{entry.field_weight} is not one of data.select_columns; add it there",
                ("data.select_columns",),
            )


def _check_truncation(run: RunConfig) -> Issues:
    data = run.data
    lengths = [
        (path, length) for path, entry in iter_datasets(run) if (length := entry.max_seq_len)
    ]
    reads = tuple(dotted((*path, "max_seq_len")) for path, _ in iter_datasets(run))
    prompt = data.max_prompt_len
    for path, longest in lengths:
        if prompt is not None and prompt >= longest:
            yield ConfigIssue(
                ("data", "max_prompt_len"),
                f"a prompt of {prompt} tokens leaves no room for a completion in"
                f" {dotted((*path, 'max_seq_len'))} ({longest}); write less than {longest}",
                reads,
            )
            return


def _check_sample_kinds(run: RunConfig) -> Issues:
    # A type that is not written is detected from records, and the rules run again.
    kinds = [
        (path, entry.format, entry.kind)
        for path, entry in iter_datasets(run, TRAIN, TEST)
        if entry.is_typed
    ]
    if not kinds:
        return
    first_path, first_type, first = kinds[0]
    reads = (f"{dotted(first_path)}.type",)
    for path, format_name, kind in kinds[1:]:
        if kind != first:
            yield ConfigIssue(
                (*path, "type"),
                f"{format_name} contains {kind} samples, and {first_type} of {dotted(first_path)}"
                f" contains {first} samples; use them in separate runs",
                reads,
            )
            return
    beyond = set(run.stages) - {"prepare", "pack"}
    if first != "sft" and beyond and run.train.objective == "sft":
        yield ConfigIssue(
            (*first_path, "type"),
            f"train.objective: sft cannot train on {first} samples; write train.objective:"
            " preference, pipeline.stages: [prepare, pack], or another type",
            ("pipeline.stages", "push", "train.objective"),
        )


def _check_streaming(run: RunConfig) -> Issues:
    for path, entry in iter_datasets(run):
        on_hub = (
            HUB_ID.fullmatch(entry.path)
            and not detect_file_kind(entry.path)
            # A built-in data set, whose name has the form of a hub id.
            and entry.path != "dummy"
        )
        if entry.streaming and not on_hub:
            yield ConfigIssue(
                (*path, "streaming"),
                f"{entry.path} is not a hub dataset (org/name), and files are read in parts anyway;"
                " leave streaming out",
                (dotted((*path, "path")),),
            )
        elif entry.streaming and "[" in (entry.split or ""):
            yield ConfigIssue(
                (*path, "streaming"),
                f"a slice ({entry.split}) cannot be streamed; leave streaming out, or write"
                " max_samples in place of the slice",
                (dotted((*path, "split")),),
            )


def _check_encode_images(run: RunConfig) -> Issues:
    data, model, path = run.data, run.model, ("data", "encode_images")
    if not data.encode_images:
        return
    if model.freeze is not None and "vision" not in model.freeze:
        yield ConfigIssue(
            path,
            f"is true, and model.freeze {model.freeze} leaves the vision tower trained, whose"
            f" features change; write freeze: {['vision', *model.freeze]}, or encode_images: false",
            ("model.freeze",),
        )
    if model.model_path is None and not model.encoders:
        yield ConfigIssue(
            path,
            "is true, and there are no weights to encode images with; write model.model_path, or"
            " encode_images: false",
            ("model.model_path",),
        )
    if data.encode_dtype is None and run.train.computes_in == "float16":
        yield ConfigIssue(
            path,
            "is true, and training computes in float16, whose range features may exceed; write"
            " encode_dtype: float32 or bfloat16",
            ("train.precision",),
        )


def _check_media_bounds(run: RunConfig) -> Issues:
    for path, entry in iter_datasets(run):
        for least, most in MEDIA_BOUNDS:
            low, high = getattr(entry, least), getattr(entry, most)
            if low is not None and high is not None and low > high:
                yield ConfigIssue(
                    (*path, least), f"is {low}, above {most}, which is {high}; swap them"
                )


DATA_RULES: tuple[Callable[[RunConfig], Issues], ...] = (
    _check_file_format,
    _check_max_seq_len,
    _check_pad_multiple,
    _check_shards,
    _check_megatron_files,
    _check_weights,
    _check_loss_weights,
    _check_truncation,
    _check_sample_kinds,
    _check_streaming,
    _check_media_bounds,
    _check_encode_images,
)
