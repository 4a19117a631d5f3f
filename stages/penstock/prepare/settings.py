"""What decides the content of prepared data, besides the data and the tokenizer themselves."""

from typing import Annotated, Literal

from pydantic import Field

from penstock.config.base import Settings

FileKind = Literal["json", "csv", "parquet", "arrow", "text"]


class DatasetSettings(Settings):
    """How the records of one source become samples. Which records those are is in its pin."""

    type: Literal["tokenized", "chat", "instruction", "text"] = "tokenized"
    """What a record holds."""

    ds_type: FileKind | None = None
    """Format of the files; told from their names where unset."""

    max_seq_len: int | None = Field(default=None, gt=0)
    """Samples are cut to this many tokens, keeping their start."""

    field_messages: str = "messages"
    """`chat`: the column with the list of messages."""

    field_instruction: str = "instruction"
    """`instruction`: the column with the question."""

    field_input: str | None = None
    """`instruction`: an optional column with context for the question."""

    field_output: str = "output"
    """`instruction`: the column with the answer."""

    field_system: str | None = None
    """`chat` and `instruction`: an optional column with the system prompt."""

    field_text: str = "text"
    """`text`: the column with the text."""


class PrepareSettings(Settings):
    """The identity of prepared data."""

    datasets: tuple[DatasetSettings, ...]
    """One for each training source, in the order of the sources."""

    test_datasets: tuple[DatasetSettings, ...] = ()
    """One for each validation source, in the order of the sources."""

    select_columns: tuple[str, ...] | None = None
    """The only columns a record may use; a record that lacks one of them is unusable."""

    val_set_size: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Samples moved from training to validation: how many, or a share of them."""

    shuffle_merged_datasets: bool = True
    """Shuffle the samples after the sources have been put together."""

    shuffle_before_merging_datasets: bool = True
    """Shuffle each source before they are put together."""

    num_dataset_shards_to_save: int | None = Field(default=None, gt=0)
    """Slices of training data in all; unset: one for each file."""

    bad_rows_allowed: float = Field(default=0.0, ge=0, le=1)
    """The share of a source's records that may be unusable."""

    seed: int = 42
    """Decides the validation samples and the order of all others."""
