"""One source of samples: where its records are, what they hold, and which of them are used."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import ConfigSection
from penstock.core.sources.megatron_files import parse_splits

FileKind = Literal["json", "csv", "parquet", "arrow", "text", "megatron"]

FormatName = Literal[
    "tokenized",
    "chat",
    "sharegpt",
    "instruction",
    "alpaca",
    "text",
    "preference",
    "kto",
    "sft_turns",
    "preference_turns",
]

Kind = Literal["sft", "preference", "kto"]

KIND_OF_FORMAT: dict[FormatName, Kind] = {
    "preference": "preference",
    "preference_turns": "preference",
    "kto": "kto",
}
"""What samples of a format are for; `sft` where it is not listed."""

SCORES = ("field_chosen_score", "field_rejected_score")
"""Columns that say how good the answers of a pair are."""


def _no_loading_scripts(value: bool) -> bool:
    if value:
        raise ValueError(
            "loading scripts are not run; convert the dataset to parquet or jsonl, "
            "and leave trust_remote_code out"
        )
    return value


def _shares(value: str | None) -> str | None:
    if value is not None:
        parse_splits(value)
    return value


class DatasetConfig(ConfigSection):
    """One source of samples."""

    path: str = Field(min_length=1)
    """A file, a folder or a glob; a URL (`s3://`, `gs://`, `abfs://`, `https://`); a Hugging Face
    hub id (`org/name`); `builtin:arithmetic`, or `dummy` for synthetic rows."""

    type: FormatName | None = None
    """What a row holds. Unset: told from the first records, `tokenized` where they have
    `input_ids`. `tokenized` (`input_ids` and `labels`), `chat` (a list of messages; loss on the
    assistant's turns), `sharegpt` (the same, as `from` and `value`), `instruction` and `alpaca` (a
    question and an answer; loss on the answer), `text` (loss on everything), `preference` (a
    prompt, a chosen and a rejected answer), `kto` (a prompt, an answer and whether it is good),
    `sft_turns` and `preference_turns` (ERNIEKit's `src`, `tgt` and `response`)."""

    name: str | None = None
    """Configuration (subset) of a hub dataset."""

    split: str | None = None
    """Split to read. Unset: `train`, or the only one there is. With `splits_string`: `train`,
    `validation` or `test`."""

    revision: str | None = None
    """Commit, tag or branch of a hub dataset."""

    streaming: bool = False
    """Read a hub dataset while it is downloaded, without keeping a copy of its files."""

    trust_remote_code: Annotated[bool, AfterValidator(_no_loading_scripts)] = False
    """Whether a dataset may run code of its own. Only false: loading scripts are not run."""

    data_files: str | list[str] | None = None
    """The files to read, relative to `path`; one name or a list, globs allowed."""

    ds_type: FileKind | None = None
    """Format of the files: `json` (also lines of JSON), `csv`, `parquet`, `arrow`, `text`, or
    `megatron` (Megatron-LM's `<prefix>.idx` and `.bin`; `path` may be the prefix). Unset: told from
    their extensions. Compression (`.gz`, `.bz2`, `.xz`, `.zst`) is told from the name."""

    splits_string: Annotated[str | None, AfterValidator(_shares)] = None
    """`megatron`: shares of the documents, in order, that are train, validation and test, such as
    `980,10,10`; `split` says which of them is read (unset: `train`). Unset: all documents."""

    max_seq_len: int | None = Field(default=None, gt=0)
    """Longest sample, in tokens. What happens to longer ones is said by `data.truncation_mode`."""

    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Share of this source in the mix, relative to the others (see `data.mix_strategy`). 0 leaves
    it out."""

    max_samples: int | None = Field(default=None, gt=0)
    """Use only the first so many samples of this source."""

    shards: int | None = Field(default=None, gt=0)
    """Cut the dataset into this many pieces and use one (see `shards_idx`). Every record is in
    exactly one piece."""

    shards_idx: int | None = Field(default=None, ge=0)
    """Which piece of `shards` to use, counted from 0. Unset: 0."""

    preprocess_shards: int | None = Field(default=None, gt=0)
    """Prepare the dataset in this many slices, whatever its size. Not together with `shards`."""

    field_messages: str | None = Field(default=None, min_length=1)
    """`chat` and `sharegpt`: the column with the list of messages. Unset: `messages`, and
    `conversations` for `sharegpt`."""

    field_tools: str = Field(default="tools", min_length=1)
    """`chat`, `sharegpt`, `preference` and `kto`: the column with the tools the model may call,
    where a record has one."""

    field_instruction: str = Field(default="instruction", min_length=1)
    """`instruction` and `alpaca`, and `preference` without a prompt: the column with the
    question."""

    field_input: str | None = Field(default=None, min_length=1)
    """Beside `field_instruction`: an optional column with context for the question. Unset: `input`
    where a record has it, but none for `instruction`."""

    field_output: str = Field(default="output", min_length=1)
    """`instruction` and `alpaca`: the column with the answer."""

    field_system: str | None = Field(default=None, min_length=1)
    """An optional column with the system prompt. `sharegpt`, `alpaca`, `sft_turns`,
    `preference_turns`, and `preference` with an instruction, read `system` where this is unset and
    a record has it."""

    field_text: str = Field(default="text", min_length=1)
    """`text`: the column with the text, or with a list of texts that make up one document."""

    field_prompt: str = Field(default="prompt", min_length=1)
    """`preference` and `kto`: the column with the prompt, as text or messages. A record without it
    has the prompt in its answers, or in `field_messages` or `conversations`; for `preference` also
    in `field_instruction`."""

    field_chosen: str = Field(default="chosen", min_length=1)
    """`preference`: the column with the better answer, as text, a message or messages."""

    field_rejected: str = Field(default="rejected", min_length=1)
    """`preference`: the column with the worse answer."""

    field_chosen_score: str | None = Field(default=None, min_length=1)
    """`preference`: the column that says how good the better answer is, as a number, for
    `preference.offset_alpha`. Needs `field_rejected_score`, and both in every data set."""

    field_rejected_score: str | None = Field(default=None, min_length=1)
    """`preference`: the column that says how good the worse answer is. Records where that is better
    are left out as faulty."""

    field_completion: str = Field(default="completion", min_length=1)
    """`kto`: the column with the answer."""

    field_label: str = Field(default="label", min_length=1)
    """`kto`: the column that says whether the answer is good (true or false). `chat`: a list with a
    0 for each answer that is not to be trained and a 1 for each other, where a record has one."""

    @property
    def is_typed(self) -> bool:
        """Whether `type` was written, or told from records."""
        return self.type is not None

    @property
    def format(self) -> FormatName:
        """What a row holds, as far as that is known: token ids unless something else is said."""
        return self.type or "tokenized"

    @property
    def kind(self) -> Kind:
        """What its samples are for."""
        return KIND_OF_FORMAT.get(self.format, "sft")
