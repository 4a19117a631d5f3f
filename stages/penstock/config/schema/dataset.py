"""One data source: where its records are, their format, and which of them are used."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from penstock.config.schema.base import PATH, ConfigSection, require
from penstock.config.schema.effect import NotWith, OnlyWith
from penstock.config.schema.registered import Registered
from penstock.core.extensions import FORMATS
from penstock.core.sources.megatron_files import parse_splits

FileKind = Literal["json", "csv", "parquet", "arrow", "text", "tar", "megatron"]

FormatName = Literal[
    "tokenized", "chat", "sharegpt", "instruction", "alpaca", "text", "preference", "kto",
    "sft_turns", "preference_turns",
]  # fmt: skip

# Also the formats of installed packages.
AnyFormatName = Annotated[FormatName | str, Registered(FORMATS)]

# `tool_call`: a message of the assistant's whose content is tool calls, as JSON.
MessageRole = Literal["system", "user", "assistant", "tool", "tool_call"]

Kind = Literal["sft", "preference", "kto"]

TrainedRole = Literal["assistant", "user", "system", "tool"]

TrainedEos = Literal["turn", "all", "last", "none"]

# What samples of a format are used for; `sft` where it is not listed.
KIND_OF_FORMAT: Mapping[str, Kind] = {
    "preference": "preference",
    "preference_turns": "preference",
    "kto": "kto",
}


def kind_of_format(name: str) -> Kind:
    """What samples of a format are used for; a format of a package says it itself."""
    if FORMATS.find(name):
        return FORMATS.load(name).kind
    return KIND_OF_FORMAT.get(name, "sft")


MESSAGES: tuple[FormatName, ...] = ("chat", "sharegpt")
PAIRS: tuple[FormatName, ...] = ("preference", "kto")
TURNS: tuple[FormatName, ...] = ("sft_turns", "preference_turns")
QUESTIONS: tuple[FormatName, ...] = ("instruction", "alpaca", "preference")


def _read_by(*types: FormatName) -> OnlyWith:
    # The condition of a field that only these types read; one that is not known yet may.
    return OnlyWith(".type", (None, *types), why="type: {value} does not read it")


OF_MESSAGES = _read_by(*MESSAGES, *PAIRS)
OF_MEDIA = _read_by(*MESSAGES, "alpaca", *TURNS, *PAIRS)

OF_TURNS = NotWith(
    ".type",
    ("text", "tokenized", *KIND_OF_FORMAT),
    why="{value} samples are no conversations with turns to choose from",
    instead="leave {field} out",
)

# The smallest and the largest loss weight other than 0: the product of the weights of a message,
# its record and its source is a normal fp32 number.
LOSS_WEIGHT_LIMITS = 1e-12, 1e12

# Default of `data.max_record_bytes`.
MAX_RECORD_BYTES = 256 << 20

# Columns with the scores of the completions of a pair.
SCORES = ("field_chosen_score", "field_rejected_score")


def _check_message_roles(
    value: dict[MessageRole, list[str]] | None,
) -> dict[MessageRole, list[str]] | None:
    roles_of: dict[str, list[str]] = {}
    for role, names in (value or {}).items():
        for name in names:
            roles_of.setdefault(name, []).append(role)
    for name, roles in roles_of.items():
        if len(roles) > 1:
            raise ValueError(f"has {name!r} for {' and '.join(roles)}; a name has one role")
    return value


class DatasetConfig(ConfigSection):
    """One data source."""

    path: Annotated[str, PATH] = Field(min_length=1)
    """A file, a folder or a glob; a URL (`s3://`, `gs://`, `abfs://`, `https://`); a Hugging Face
    hub id (`org/name`); `builtin:arithmetic`, `builtin:shapes` (pictures), or `dummy` for
    synthetic token ids: 4,096 samples of 513 tokens, or of `max_seq_len`."""

    type: AnyFormatName | None = None
    """Format of the records. `chat`: a list of messages; loss on assistant turns. `sharegpt`: the
    same with `from` and `value`. `instruction` and `alpaca`: a question and an answer; loss on the
    answer. `text`: documents; loss on all tokens. `tokenized`: `input_ids` and `labels`.
    `preference`: a prompt, a chosen and a rejected completion. `kto`: a prompt, a completion and
    whether it is desirable. `sft_turns` and `preference_turns`: ERNIEKit's `src`, `tgt` and
    `response`. Or a format of an installed package. Unset: detected from the first records,
    `tokenized` where they have `input_ids`."""

    type_kwargs: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Options of a `type` of an installed package."""

    name: str | None = None
    """Configuration (subset) of a hub dataset."""

    split: str | None = None
    """Split to read. Unset: `train`, or the only one. With `splits_string`: `train`, `validation`
    or `test`."""

    revision: str | None = None
    """Commit, tag or branch of a hub dataset."""

    streaming: bool = False
    """Stream a hub dataset: read it while it is downloaded, without keeping a copy of its files."""

    trust_remote_code: Annotated[
        bool,
        require(
            lambda trusts: not trusts,
            "loading scripts are not run; convert the dataset to parquet or jsonl, and leave"
            " trust_remote_code out",
        ),
    ] = False
    """Must be false: loading scripts of datasets are not run."""

    data_files: Annotated[str | list[str] | None, PATH] = None
    """The files to read, relative to `path`: a name or a list; globs are allowed."""

    ds_type: FileKind | None = None
    """File format: `json` (also JSON lines), `csv`, `parquet`, `arrow`, `text`, `tar`
    (WebDataset) or `megatron` (Megatron-LM's `<prefix>.idx` and `.bin`; `path` may be the prefix).
    Unset: from the file extension. Compression (`.gz`, `.bz2`, `.xz`, `.zst`) is detected from the
    name."""

    splits_string: Annotated[
        str | None,
        # It raises ValueError, and what it returns is not empty.
        require(parse_splits, ""),
        NotWith(
            ".ds_type",
            unless=(None, "megatron"),
            why="is for Megatron-LM files, and ds_type is {value}",
            instead="leave {field} out",
        ),
    ] = None
    """`megatron`: fractions of the documents, in order, for train, validation and test, such as
    `980,10,10`; `split` selects the one that is read (unset: `train`). Unset: all documents."""

    image_folder: Annotated[str | None, PATH, OF_MEDIA] = Field(default=None, min_length=1)
    """Local folder to which paths of images are relative, and which holds them. Unset: the folder
    of the data file."""

    allow_private_urls: Annotated[bool, OF_MEDIA] = False
    """Whether URLs of images, audio and videos in the data may lead to private, link-local and
    loopback addresses, at once or by redirects. Whoever wrote the data can then have servers of
    your network read, such as the credentials at 169.254.169.254 in a cloud."""

    image_min_pixels: Annotated[int | None, OF_MEDIA] = Field(default=None, gt=0)
    """Fewest pixels of an image, height times width: smaller ones are enlarged. In place of
    `shortest_edge` in the size of the model's image processor, for processors that have one in
    pixels (Qwen-VL, GLM-V, Ernie-VL and others); for others it is refused."""

    image_max_pixels: Annotated[int | None, OF_MEDIA] = Field(default=None, gt=0)
    """Most pixels of an image: larger ones are made smaller. In place of `longest_edge`."""

    video_fps: Annotated[float | None, OF_MEDIA] = Field(default=None, gt=0, allow_inf_nan=False)
    """Frames per second that are used of a video. Unset: as the model's video processor says. Lists
    of frames are used whole."""

    video_min_frames: Annotated[int | None, OF_MEDIA] = Field(default=None, gt=0)
    """Fewest frames of a video, if it has them, of which frames are used by `video_fps`."""

    video_max_frames: Annotated[int | None, OF_MEDIA] = Field(default=None, gt=0)
    """Most frames of such a video."""

    max_seq_len: int | None = Field(default=None, gt=0)
    """Maximum length of a sample, in tokens. `data.truncation_mode` says what happens to longer
    ones."""

    weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Weight of this source in the mix, relative to the others (see `data.mix_strategy`). 0 leaves
    it out: it is not read."""

    loss_weight: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Loss weight of the tokens of this source. The loss of a step is the mean over its trained
    tokens, weighted by the product of the loss weights of a token's source, record (`field_weight`)
    and message (`weight`). With 0 its samples are read but not trained on."""

    max_samples: int | None = Field(default=None, gt=0)
    """Use only the first `max_samples` samples of this source."""

    shards: int | None = Field(default=None, gt=0)
    """Split the dataset into this many shards and use one (`shards_idx`). Every record is in
    exactly one shard."""

    shards_idx: int | None = Field(default=None, ge=0)
    """Index of the shard of `shards` to use, from 0. Unset: 0."""

    preprocess_shards: Annotated[
        int | None,
        NotWith(
            ".shards", unless=(None,), why="shards splits this dataset too, and uses one shard"
        ),
    ] = Field(default=None, gt=0)
    """Prepare the dataset in this many slices, whatever its size. Not together with `shards`."""

    field_messages: Annotated[str | None, OF_MESSAGES] = Field(default=None, min_length=1)
    """`chat` and `sharegpt`: column with the list of messages. Unset: `messages`, and
    `conversations` for `sharegpt`."""

    field_message_role: Annotated[str | None, OF_MESSAGES] = Field(default=None, min_length=1)
    """Key of a message's role. Unset: `role`, and for all types but `chat` also `from`. With it,
    `field_message_content` or `message_roles`, roles have the names of `sharegpt` too."""

    field_message_content: Annotated[str | None, OF_MESSAGES] = Field(default=None, min_length=1)
    """Key of a message's content. Unset: `content`, and beside `from` `value`."""

    field_message_training: Annotated[str | None, OF_MESSAGES] = Field(default=None, min_length=1)
    """Key of a message that says whether it is trained: true or false, 0 or 1. Unset: `weight`,
    `train`, `training`, `trainable`, `train_on`, `loss` and `loss_mask`, and with the opposite
    meaning `masked` and `mask`."""

    field_message_training_detail: Annotated[
        str | None,
        _read_by(*MESSAGES),
        NotWith(
            "data.train_on_prompt",
            why="names the characters that are trained, and data.train_on_prompt: true trains the"
            " others too",
        ),
    ] = Field(default=None, min_length=1)
    """`chat` and `sharegpt`: key of a message that says which characters of its content are
    trained: a list of `{begin_offset: 0, end_offset: 3, train: true}`, where the end is the last
    character. The others are not trained; the end of the turn is."""

    message_roles: Annotated[
        dict[MessageRole, list[str]] | None, AfterValidator(_check_message_roles), OF_MESSAGES
    ] = None
    """Names of roles in messages besides the known ones, such as `{assistant: [bot], user:
    [customer]}`. `tool_call`: messages whose content is tool calls of the assistant's, as JSON."""

    drop_system_message: Annotated[bool, _read_by(*MESSAGES, *PAIRS, "alpaca", *TURNS)] = False
    """Leave out system messages at the beginning of conversations, and system prompts in
    columns."""

    field_tools: Annotated[str, _read_by(*MESSAGES, "alpaca", *PAIRS)] = Field(
        default="tools", min_length=1
    )
    """`chat`, `sharegpt`, `preference` and `kto`: column with the tools that the model may call,
    where a record has it."""

    field_instruction: Annotated[str, _read_by(*QUESTIONS)] = Field(
        default="instruction", min_length=1
    )
    """`instruction` and `alpaca`, and `preference` without a prompt: column with the question."""

    field_input: Annotated[str | None, _read_by(*QUESTIONS, "kto")] = Field(
        default=None, min_length=1
    )
    """With `field_instruction`, or a `field_prompt` that is text: optional column with context for
    the question. Unset: `input` where a record has it, but none for `instruction`."""

    field_output: Annotated[str, _read_by("instruction", "alpaca")] = Field(
        default="output", min_length=1
    )
    """`instruction` and `alpaca`: column with the answer."""

    field_system: Annotated[
        str | None, _read_by(*MESSAGES, "instruction", "alpaca", *TURNS, *PAIRS)
    ] = Field(default=None, min_length=1)
    """Optional column with the system prompt. Unset: all types but `chat` and `instruction` read
    `system` where a record has it."""

    field_text: Annotated[str, _read_by("text")] = Field(default="text", min_length=1)
    """`text`: column with the text, or with a list of texts that form one document."""

    field_prompt: Annotated[str, _read_by(*PAIRS)] = Field(default="prompt", min_length=1)
    """`preference` and `kto`: column with the prompt, as text or messages. A record without it has
    the prompt in its completions, or in `field_messages` or `conversations`; for `preference` also
    in `field_instruction`."""

    field_chosen: Annotated[str, _read_by("preference")] = Field(default="chosen", min_length=1)
    """`preference`: column with the chosen completion, as text, a message or messages."""

    field_rejected: Annotated[str, _read_by("preference")] = Field(default="rejected", min_length=1)
    """`preference`: column with the rejected completion."""

    field_chosen_score: str | None = Field(default=None, min_length=1)
    """`preference`: column with the score of the chosen completion, a number, for
    `preference.offset_alpha`. Needs `field_rejected_score`, and both in every dataset."""

    field_rejected_score: str | None = Field(default=None, min_length=1)
    """`preference`: column with the score of the rejected completion. Records where it is higher
    than that of the chosen one are invalid."""

    field_weight: str | None = Field(default=None, min_length=1)
    """Column with the loss weight of a record, a number: 0, or from 1e-12 to 1e12; null is 1. Not
    for `preference` and `kto`. Unset: every record weighs 1."""

    field_completion: Annotated[str, _read_by("kto")] = Field(default="completion", min_length=1)
    """`kto`: column with the completion."""

    field_label: Annotated[str, _read_by("kto", "chat")] = Field(default="label", min_length=1)
    """`kto`: column that says whether the completion is desirable (true or false). `chat`: optional
    column with a list of 0 (not trained) or 1 (trained), one for each assistant turn."""

    roles_to_train: Annotated[
        list[TrainedRole],
        OF_TURNS,
        OnlyWith(
            ".type",
            unless=("instruction",),
            words="type: alpaca",
            why="of type: {value} the answer alone is trained",
            unmet="notice",
        ),
    ] = Field(default_factory=lambda: list[TrainedRole](["assistant"]), min_length=1)
    """Conversations: roles whose messages are trained (`assistant`, `user`, `system`, `tool`), with
    the token that ends their turn where the chat template has one. A message that the record
    excludes is not trained."""

    train_on_eos: Annotated[
        TrainedEos,
        OF_TURNS,
        NotWith(
            "data.mask_eos_in_loss",
            of=("all", "last"),
            why="is {own}, and data.mask_eos_in_loss: true trains none of these tokens",
        ),
    ] = "turn"
    """Conversations: which tokens that end a turn are trained. `turn`: those of trained turns;
    `all`: those of all turns, also of the user's; `last`: that of the last trained turn; `none`: no
    one, as with `data.mask_eos_in_loss`."""

    @property
    def is_typed(self) -> bool:
        return self.type is not None

    @property
    def format(self) -> str:
        """The format of records as far as it is known: `tokenized` unless something else is
        written."""
        return self.type or "tokenized"

    @property
    def is_read(self) -> bool:
        return self.weight > 0

    @property
    def kind(self) -> Kind:
        return kind_of_format(self.format)
