"""What is trained on, and how it is laid into rows."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.availability import Later, LocalPath
from penstock.config.section import Section

FileKind = Literal["json", "csv", "parquet", "arrow", "text"]

Count = Annotated[int, Field(gt=0)]


def _no_loading_scripts(value: bool) -> bool:
    if value:
        raise ValueError(
            "loading scripts are not run; convert the dataset to parquet or jsonl, "
            "and leave trust_remote_code out"
        )
    return value


def _size_or_share(value: int | float | None) -> int | float | None:
    """None when nothing is set aside; otherwise a number of samples or a share below 1."""
    if value is None or value == 0:
        return None
    if value < 0 or (isinstance(value, float) and value >= 1):
        raise ValueError(
            f"is {value}; write a whole number of samples (500) or a share between 0 and 1 (0.05)"
        )
    return value


class DatasetConfig(Section):
    """One source of samples."""

    path: str = Field(min_length=1)
    """A file, a folder or a glob, a Hugging Face hub id (`org/name`), `builtin:arithmetic`, or
    `dummy` for synthetic rows."""

    type: Literal["tokenized", "chat", "instruction", "text"] = "tokenized"
    """What a row holds: `tokenized` (`input_ids` and `labels`), `chat` (a list of messages; loss on
    the assistant's turns), `instruction` (a question and an answer; loss on the answer) or `text`
    (loss on everything)."""

    name: str | None = None
    """Configuration (subset) of a hub dataset."""

    split: str | None = None
    """Split to read. Unset: `train`, or the only one there is."""

    revision: str | None = None
    """Commit, tag or branch of a hub dataset."""

    trust_remote_code: Annotated[bool, AfterValidator(_no_loading_scripts)] = False
    """Whether a dataset may run code of its own. Only false: loading scripts are not run."""

    data_files: str | list[str] | None = None
    """The files to read, relative to `path`; one name or a list, globs allowed."""

    ds_type: FileKind | None = None
    """Format of the files: `json` (also lines of JSON), `csv`, `parquet`, `arrow` or `text`. Unset:
    told from their extensions."""

    max_seq_len: int | None = Field(default=None, gt=0)
    """Longest sample, in tokens; longer ones lose their end, and are counted."""

    shards: Annotated[int | None, Later()] = Field(default=None, gt=0)
    """Cut the dataset into this many pieces and use one (see `shards_idx`)."""

    shards_idx: Annotated[int | None, Later()] = Field(default=None, ge=0)
    """Which piece of `shards` to use, counted from 0."""

    preprocess_shards: Annotated[int | None, Later()] = Field(default=None, gt=0)
    """Prepare the dataset in this many pieces, one after another, to save memory. Not together with
    `shards`."""

    field_messages: str = Field(default="messages", min_length=1)
    """`chat`: the column with the list of messages, each with `role` and `content`."""

    field_instruction: str = Field(default="instruction", min_length=1)
    """`instruction`: the column with the question."""

    field_input: str | None = Field(default=None, min_length=1)
    """`instruction`: an optional column with context for the question."""

    field_output: str = Field(default="output", min_length=1)
    """`instruction`: the column with the answer."""

    field_system: str | None = Field(default=None, min_length=1)
    """`chat` and `instruction`: an optional column with the system prompt."""

    field_text: str = Field(default="text", min_length=1)
    """`text`: the column with the text."""


class DataConfig(Section):
    """Sources, their preparation, packing and loading."""

    datasets: list[DatasetConfig] = Field(min_length=1)
    """The sources to train on."""

    test_datasets: list[DatasetConfig] = Field(default_factory=list[DatasetConfig])
    """Sources to evaluate on, written like `datasets`. Not together with `val_set_size`."""

    dataset_prepared_path: Annotated[str, LocalPath()] = Field(
        default="last_prepared_dataset", min_length=1
    )
    """Folder for prepared and packed datasets; runs that share it share them."""

    bad_rows_allowed: float = Field(default=0.0, ge=0, le=1)
    """Share of a source's rows, 0 to 1, that may be unusable before preparing fails. Unusable rows
    are left out and counted."""

    select_columns: list[str] | None = None
    """Columns kept of each source, for example `[input_ids, labels]`. Unset: all of them."""

    sample_packing_method: Literal["sequential", "multipack"] = "sequential"
    """How samples share a row: `sequential` fills rows in the order of the data, `multipack` looks
    for samples that fit and fills rows better."""

    sample_packing_sequence_len: int = Field(default=32_000, gt=0)
    """Longest row, in tokens."""

    sample_packing_group_size: int = Field(default=100_000, gt=0)
    """Samples that are packed together; larger groups fill rows slightly better."""

    sample_packing_sequentially: bool | None = None
    """True packs sequentially whatever `sample_packing_method` says."""

    sample_packing_mp_start_method: Annotated[
        Literal["fork", "spawn", "forkserver"] | None, Later()
    ] = None
    """How processes that pack are started."""

    eval_sample_packing: bool | None = None
    """False keeps evaluation samples unpacked, one to a row."""

    dataloader_num_workers: Annotated[int, Later(allowed=(0,))] = Field(default=8, ge=0)
    """Processes that load rows for one training process."""

    dataloader_prefetch_factor: Annotated[int | None, Later(allowed=(None,))] = Field(
        default=2, gt=0
    )
    """Batches that each loading process keeps ready; null without loading processes."""

    dataloader_pin_memory: bool = True
    """Load batches into pinned memory, from which copies to a GPU are faster."""

    dataloader_drop_last: bool = True
    """Leave out the rows at the end of an epoch that do not fill a step, unless they are all
    there is."""

    pad_to_multiple_of: int = Field(default=128, gt=0)
    """Rows are padded to a multiple of this many tokens when they are loaded."""

    val_set_size: Annotated[int | float | None, AfterValidator(_size_or_share)] = None
    """Samples set aside for evaluation: a whole number of them, or a share between 0 and 1."""

    shuffle_merged_datasets: bool = True
    """Shuffle the samples after the sources have been put together."""

    shuffle_before_merging_datasets: bool = True
    """Shuffle each source before they are put together."""

    dataset_num_proc: int | None = Field(default=None, gt=0)
    """Processes for preparing. Unset: `PENSTOCK_NUM_PROC`, else the number of CPUs."""

    dataset_shard_num: Annotated[int | None, Later()] = Field(default=None, gt=0)
    """Cut the prepared dataset into this many pieces and use one (see `dataset_shard_idx`)."""

    dataset_shard_idx: Annotated[int | None, Later()] = Field(default=None, ge=0)
    """Which piece of `dataset_shard_num` to use, counted from 0."""

    num_dataset_shards_to_save: int | None = Field(default=None, gt=0)
    """Files the prepared dataset is written to. Unset: chosen from its size."""

    skip_prepare_dataset: Annotated[bool, Later()] = False
    """Take what lies in `dataset_prepared_path` without preparing."""

    push_dataset_to_hub: Annotated[str | None, Later()] = None
    """Hub dataset (`org/name`) the prepared data is pushed to."""

    hf_use_auth_token: Annotated[bool | None, Later()] = None
    """Use the hub's login for private datasets and pushes."""
