"""Data: sources, filters, truncation, packing, data loading."""

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from penstock.config.schema.base import PATH, ConfigSection
from penstock.config.schema.dataset import (
    KIND_OF_FORMAT,
    MAX_RECORD_BYTES,
    DatasetConfig,
    FormatName,
)
from penstock.config.schema.effect import TRAINS, NotWith, OnlyWith
from penstock.config.schema.pipeline import Root
from penstock.config.schema.served import Served

# `drop_few`: dropped where that loses at most `rows.sizing.FEW_ROWS` of an epoch, else kept.
LastBatch = Literal["drop", "drop_few", "keep"]

# Maximum length of a packed sequence where the length is chosen from the samples.
LONGEST_ROW = 32_000

# DataLoader workers and prefetch factor where only the other one of the two is set.
WORKERS, PREFETCH = 8, 2


# The `chat_template` that is the tokenizer's own.
TOKENIZER_TEMPLATE = "tokenizer"

# Values that `chat_template` had before `turn_rendering`.
FORMER_RENDERINGS = {"auto": "auto", "published": "whole", "training": "per_turn"}

# Arguments of transformers' `apply_chat_template` that are no variables of the template, or are set
# from the conversation.
RENDERING_ARGUMENTS = frozenset(
    {
        *("messages", "conversation", "conversations", "tools", "documents", "chat_template"),
        *("add_generation_prompt", "continue_final_message", "return_assistant_tokens_mask"),
        *("tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict"),
        "tokenizer_kwargs",
    }
)


# Words that are no variables in Jinja.
JINJA_WORDS = frozenset(
    {
        *("true", "false", "none", "True", "False", "None", "and", "or", "not", "in", "is"),
        *("if", "else", "elif", "for", "recursive", "import", "as", "loop", "self", "caller"),
    }
)


def _check_val_set_size(value: int | float | None) -> int | float | None:
    # None when nothing is held out; otherwise a number of samples or a fraction below 1.
    if value is None or value == 0:
        return None
    if value < 0 or (isinstance(value, float) and value >= 1):
        raise ValueError(
            f"is {value}; write a whole number of samples (500) or a fraction between 0 and 1"
            " (0.05)"
        )
    return value


def is_inline_template(value: str) -> bool:
    """Whether a `chat_template` is the text of a Jinja template, not a name or a path."""
    return "{%" in value or "{{" in value


def _check_chat_template(value: str) -> str:
    # The value. Raises ValueError for an empty one, and for the former name of a rendering.
    if value in FORMER_RENDERINGS:
        raise ValueError(
            f"is {value}, which is now data.turn_rendering: {FORMER_RENDERINGS[value]}; write that"
            " instead, and chat_template for another template than the tokenizer's"
        )
    if not value.strip():
        raise ValueError("is empty; write tokenizer, a name, a path or a Jinja template")
    return value


def _check_chat_template_kwargs(value: dict[str, Any]) -> dict[str, Any]:
    # The value. Raises ValueError for a name that a template cannot read, or that is not the user's
    # to set, and for values that JSON does not have.
    for name in value:
        if reason := why_not_a_template_variable(name):
            raise ValueError(f"has {name!r}, {reason}")
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"holds a value that JSON does not have: {error}") from None
    return value


def why_not_a_template_variable(name: str) -> str | None:
    """Why `chat_template_kwargs` may not have the name; None if they may."""
    if name in RENDERING_ARGUMENTS:
        return "which comes from the conversation; leave it out"
    if not name.isidentifier() or name in JINJA_WORDS:
        return "which is no name that a template can read; write letters, digits and _"
    return None


TRUNCATES = OnlyWith(
    "data.limits_samples",
    words="max_seq_len in datasets",
    why="no dataset has a max_seq_len, so nothing is truncated",
    reads=("data.datasets", "data.test_datasets", "data.decontaminate_datasets"),
)


def _unread_by(
    *types: FormatName, why: str, unmet: Literal["notice", "silent"] = "notice"
) -> OnlyWith:
    # The condition of a field without effect on samples of these types.
    read_by = f"datasets of another type than {', '.join(types)}"
    return OnlyWith("data.types", unless=types, words=read_by, why=why, unmet=unmet)


def _not_of_completions(why: str, instead: str, of: tuple[Any, ...] | None = None) -> NotWith:
    # What does not go with samples whose loss is one of whole completions.
    reads = ("data.datasets.0.type",)
    return NotWith(
        "data.sample_type", (*KIND_OF_FORMAT,), of=of, why=why, instead=instead, reads=reads
    )


WHOLE_COMPLETIONS = _not_of_completions(
    "{value} samples always train complete completions and nothing else", "leave {field} out"
)


class DataConfig(ConfigSection):
    """Data sources, their preparation, packing and loading."""

    datasets: list[DatasetConfig] = Field(min_length=1)
    """The data sources to train on."""

    test_datasets: list[DatasetConfig] = Field(default_factory=list[DatasetConfig])
    """Data sources to evaluate on, with the same fields as `datasets`. Not together with
    `val_set_size`."""

    dataset_prepared_path: Root = Field(default="last_prepared_dataset", min_length=1)
    """Folder for prepared and packed datasets; runs with the same folder reuse them. May be the URL
    of an object store (`s3://`, `gs://`, `abfs://`), which several machines can use."""

    bad_rows_allowed: float = Field(default=0.0, ge=0, le=1)
    """Fraction of a source's records, 0 to 1, that may be invalid before `prepare` fails. Invalid
    records are left out and counted."""

    mix_strategy: Literal["concat", "random", "interleave_under", "interleave_over"] = "concat"
    """How several sources are mixed. `concat`: every sample once. `random`: each source contributes
    its `weight` to an epoch, and starts over when it runs out. `interleave_under` samples sources
    by weight until the first one runs out, `interleave_over` until all have; sources that run out
    earlier start over."""

    weight_unit: Annotated[
        Literal["samples", "tokens"],
        OnlyWith(
            "data.mix_strategy",
            unless=("concat",),
            words="mix_strategy: random (or interleave_under, interleave_over)",
            why="mix_strategy: concat uses every sample once and ignores weights",
        ),
    ] = "samples"
    """Unit of each source's `weight`: samples, or tokens. With `tokens`, a source whose samples are
    twice as long contributes half as many samples."""

    samples_per_epoch: Annotated[
        int | None,
        OnlyWith(
            "data.mix_strategy",
            ("random",),
            why="the sources determine an epoch of mix_strategy: {value}",
        ),
    ] = Field(default=None, gt=0)
    """`mix_strategy: random`: number of samples in an epoch. Unset: the number of samples of all
    sources. Each of the `train.num_train_epochs` epochs continues in the sources where the last one
    stopped."""

    deduplicate: Literal["exact", "near"] | None = None
    """Drop duplicates: training samples with the same tokens as an earlier sample or one of
    `test_datasets` (`exact`), or with nearly the same (`near`). The first one is kept."""

    near_duplicate_threshold: Annotated[
        float, OnlyWith("data.deduplicate", ("near",), why="is only used with deduplicate: near")
    ] = Field(default=0.8, gt=0, le=1)
    """`deduplicate: near`: Jaccard similarity of the sets of 5-grams of tokens, 0 to 1, at which
    two samples are duplicates."""

    decontaminate_datasets: list[DatasetConfig] = Field(default_factory=list[DatasetConfig])
    """Decontamination: data sources that must not be trained on, with the same fields as
    `datasets`. Training samples that share an n-gram of `decontaminate_ngram` tokens with them are
    dropped. N-grams that are in more than a tenth of their samples (a chat template, a system
    prompt) do not count."""

    decontaminate_ngram: Annotated[
        int,
        OnlyWith(
            "data.decontaminate_datasets",
            unless=([],),
            words="decontaminate_datasets",
            why="is only used with {name}",
        ),
    ] = Field(default=13, gt=0)
    """Decontamination: length of the shared n-gram, in tokens, for which a sample is dropped."""

    truncation_mode: Annotated[
        Literal["keep_start", "keep_end", "drop", "drop_turns"],
        TRUNCATES,
        OnlyWith(
            "data.drops_turns",
            of=("drop_turns",),
            words="datasets of conversations",
            why="no dataset has conversations whose turns could be dropped",
            unmet="notice",
        ),
    ] = "keep_start"
    """Truncation of samples longer than `max_seq_len`: `keep_start` and `keep_end` cut off the
    other end, `drop` leaves out the sample, `drop_turns` leaves out its oldest turns but keeps the
    system prompt. What is cut off or left out is counted."""

    max_prompt_len: Annotated[
        int | None, TRUNCATES, _unread_by("text", why="no dataset has prompts that are not trained")
    ] = Field(default=None, gt=0)
    """Maximum length in tokens of the prompt (what comes before the first trained token) of a
    sample that is longer than `max_seq_len`. Of a longer prompt, `truncation_mode: keep_start`
    keeps the start, all other modes the end."""

    train_on_prompt: Annotated[
        bool, WHOLE_COMPLETIONS, _unread_by("text", why="texts have no prompt", unmet="silent")
    ] = False
    """Train on prompt tokens too, not only on completions."""

    train_on_turns: Annotated[
        Literal["all", "last"],
        WHOLE_COMPLETIONS,
        _unread_by("text", "tokenized", "instruction", why="no dataset has turns to choose from"),
    ] = "all"
    """Train on all assistant turns or only on the last one."""

    chat_template: Annotated[str, PATH, AfterValidator(_check_chat_template)] = TOKENIZER_TEMPLATE
    """Chat template that renders conversations: `tokenizer` for the tokenizer's own, the name of
    one that Penstock includes (`chatml`, `llama3`, `qwen3`; docs/reference/chat-templates.md lists
    all), a path to a `.jinja` file, or the text of a Jinja template. The exported tokenizer has
    it too."""

    chat_template_kwargs: Annotated[dict[str, Any], AfterValidator(_check_chat_template_kwargs)] = (
        Field(default_factory=dict[str, Any])
    )
    """Variables of the chat template, such as `enable_thinking: false`. In the exported template
    they are defaults. The column `chat_template_kwargs` of a record sets its own, by name."""

    turn_rendering: Annotated[
        Literal["auto", "whole", "per_turn"],
        _unread_by("text", "tokenized", why="no dataset has conversations to render"),
    ] = "auto"
    """How conversations are rendered. Some chat templates change earlier assistant turns once
    others follow (Qwen3's removes their reasoning). `per_turn`: every turn is rendered as if it
    were the last, so all turns can be trained. `whole`: the template renders the whole
    conversation; conversations whose trained turns change are invalid. `auto`: `per_turn` for
    templates that change turns, `whole` for all others, for which both give the same."""

    add_eos: Annotated[
        bool,
        _unread_by(
            *("tokenized", "chat", "sharegpt", "sft_turns"),
            why="tokens that are given, and those of a chat template, stay as they are",
        ),
    ] = True
    """Append the end-of-sequence token to `text` documents and to completions without a chat
    template."""

    mask_eos_in_loss: Annotated[
        bool,
        _unread_by("tokenized", why="the labels of tokenized data say what is trained"),
        NotWith(
            "train.objective",
            ("pretrain",),
            why="masks tokens, but train.objective: pretrain trains on all",
            instead="leave it out",
        ),
    ] = False
    """Mask the token that ends a completion or a document in the loss."""

    select_columns: list[str] | None = None
    """Columns of each source to keep, for example `[input_ids, labels]`. Unset: all."""

    sample_packing_method: Annotated[
        Literal["sequential", "multipack", "greedy", "wrapped"],
        _not_of_completions(
            "wrapped splits samples where a packed sequence is full, and completions of {value}"
            " samples must stay complete",
            "write sequential or multipack",
            of=("wrapped",),
        ),
    ] = "sequential"
    """Sequence packing: `sequential` fills sequences in the order of the data; `multipack` finds
    samples that fit together (bin packing) and fills sequences best; `greedy` puts each sample into
    the sequence with the most room; `wrapped` concatenates samples and splits them where a sequence
    is full, as in pre-training."""

    sample_packing_sequence_len: int | None = Field(default=None, gt=0, lt=1 << 31)
    """Maximum length of a packed sequence, in tokens. Unset: chosen from the samples, up to 32000:
    enough for the longest one, and short enough for 512 packed sequences in an epoch where that is
    possible; but long enough for 8 samples and 512 tokens in an optimizer step, where an epoch then
    has 30 steps and it takes at most 4096 tokens."""

    sample_packing_group_size: Annotated[
        int,
        OnlyWith(
            "data.packing_method",
            ("multipack", "greedy"),
            words="sample_packing_method: multipack or greedy",
            why="samples are packed in their order by {value}, without groups",
            unmet="notice",
        ),
    ] = Field(default=100_000, gt=0)
    """`multipack` and `greedy`: number of samples that are packed together. Larger groups fill
    sequences slightly better; 1 gives each sample a sequence of its own."""

    sample_packing_sequentially: bool | None = None
    """True: pack sequentially, whatever `sample_packing_method` is."""

    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """`multiprocessing` start method of the processes that write packed sequences. Unset:
    `spawn`."""

    eval_sample_packing: Annotated[
        bool | None,
        OnlyWith(
            "data.has_held_out_data",
            words="val_set_size or test_datasets",
            why="there are no evaluation samples",
            unmet="notice",
        ),
    ] = None
    """False: do not pack evaluation samples; each has a sequence of its own."""

    isolate_samples: Annotated[
        bool,
        TRAINS,
        _not_of_completions(
            "completions of {value} samples must not attend to other samples", "leave {field} out"
        ),
    ] = True
    """Mask attention between the samples of a packed sequence. `false` lets a sample attend to all
    tokens before it in the sequence, for example for pieces of one text; the first token of a
    sample is still not a target of the sample before it. Evaluations always isolate samples."""

    share_prompts: Annotated[
        bool | None,
        NotWith(
            "data.sample_type",
            unless=(None, *KIND_OF_FORMAT),
            of=(False,),
            why="samples of type {value} have one completion",
            instead="leave {field} out",
            reads=("data.datasets.0.type",),
        ),
    ] = None
    """Preference pairs: store the prompt once for both completions, which do not attend to each
    other. False stores it before each of them. The loss is the same; it takes more tokens, and
    works with attention backends (`flash_attention_*`) that cannot mask one completion from the
    other. Unset: true; false for models of the transformers backend."""

    encode_images: Annotated[
        bool,
        NotWith(
            "model.backend",
            ("transformers",),
            why="is true, and model.backend transformers computes images in every step",
            instead="write backend: native, or encode_images: false",
        ),
        NotWith(
            "train.load_checkpoint_path",
            unless=(None,),
            why="is true, and the vision tower of train.load_checkpoint_path may be another than"
            " that of model.model_path",
            instead="export the checkpoint and write its folder as model.model_path, or"
            " encode_images: false",
        ),
    ] = False
    """Compute the features of all images once, in the stage `encode`, and train on these instead of
    the images. Needs a vision tower that is frozen (`model.freeze`). Of a frozen projector the
    outputs are stored; of one that is trained, its inputs, for models of type llava, internvl and
    qwen2_vl. Each image is encoded alone."""

    encode_dtype: Annotated[
        Literal["float32", "bfloat16"] | None,
        OnlyWith("data.encode_images", why="no images are encoded"),
    ] = None
    """`encode_images`: data type in which features are computed and stored. Unset: that in which
    training computes."""

    dataloader_num_workers: int | None = Field(default=None, ge=0)
    """DataLoader workers of each training process. Unset: 0, because packed sequences are
    memory-mapped and read faster than any step; with `dataloader_prefetch_factor`, 8."""

    dataloader_prefetch_factor: Annotated[
        int | None,
        NotWith(
            "data.dataloader_num_workers",
            (0,),
            spares=(PREFETCH,),
            why="no worker can load {own} steps ahead with dataloader_num_workers: 0",
            instead="write 1 or more, or leave {field} out",
        ),
    ] = Field(default=None, gt=0)
    """Steps that each DataLoader worker loads ahead. Unset: 2."""

    dataloader_pin_memory: bool = True
    """Load batches into pinned memory, from which copies to a GPU are faster."""

    dataloader_drop_last: Annotated[bool | None, TRAINS] = None
    """Drop the packed sequences at the end of an epoch that do not fill a step, unless there are no
    others. Unset: true with `sample_packing_sequence_len`; without it, only where they are at most
    5 % of the epoch."""

    pad_to_multiple_of: Annotated[int, Served()] = Field(default=128, gt=0)
    """Pad packed sequences to a multiple of this many tokens when they are loaded."""

    val_set_size: Annotated[
        int | float | None,
        AfterValidator(_check_val_set_size),
        NotWith("data.test_datasets", unless=([],), why="test_datasets are set too"),
    ] = None
    """Validation split: samples to hold out for evaluation, as a number or as a fraction between 0
    and 1."""

    split_by: Annotated[
        str | None,
        OnlyWith(
            "data.val_set_size",
            unless=(None,),
            words="val_set_size",
            why="is only used with {name}",
        ),
    ] = Field(default=None, min_length=1)
    """Group split: a column whose values are not split across training and validation, such as a
    user or a document. Samples with the same value are held out together, until they are at least
    `val_set_size`. Every record needs a value."""

    shuffle_merged_datasets: bool = True
    """Shuffle the samples after mixing the sources."""

    shuffle_before_merging_datasets: Annotated[
        bool, OnlyWith("data.mixes_samples", words="several datasets", unmet="silent")
    ] = True
    """Shuffle each source before mixing."""

    max_record_bytes: int = Field(default=MAX_RECORD_BYTES, gt=0)
    """Largest size of one record in a file of data: a line, a JSON value, a field of a CSV file, or
    the members of a record in an archive. A larger one is an error, before memory runs out."""

    dataset_num_proc: int | None = Field(default=None, gt=0, le=1024)
    """Maximum number of processes that prepare data; a few megabytes are faster with one. Unset:
    `PENSTOCK_NUM_PROC` or `XORL_DATASET_NUM_PROC`, else the number of CPUs."""

    dataset_shard_num: int | None = Field(default=None, gt=0)
    """Split the training data into this many shards and use one (`dataset_shard_idx`). Every record
    is in exactly one shard."""

    dataset_shard_idx: int | None = Field(default=None, ge=0)
    """Index of the shard of `dataset_shard_num` to use, from 0."""

    num_dataset_shards_to_save: int | None = Field(default=None, gt=0)
    """Number of files of the prepared training data. Unset: one for each slice."""

    skip_prepare_dataset: Annotated[
        bool,
        NotWith(
            "release.name",
            unless=(None,),
            why="releases follow changes of the sources, which this ignores",
            instead="leave it out",
        ),
    ] = False
    """Use the prepared data in `dataset_prepared_path` as it is, without looking at the sources."""

    push_dataset_to_hub: Annotated[
        str | None, OnlyWith("data.hf_use_auth_token", why="needs the hub login")
    ] = None
    """Hub dataset (`org/name`) that the prepared data is pushed to, in a private repository. Needs
    `hf_use_auth_token: true`."""

    hf_use_auth_token: bool | None = None
    """Whether the hub login is used for datasets: true requires one, false uses none. Unset: it is
    used if there is one."""

    _chosen_row_length: int | None = PrivateAttr(default=None)

    @property
    def sample_type(self) -> str | None:
        return next((source.type for source in self.read_datasets), None)

    @property
    def read_datasets(self) -> tuple[DatasetConfig, ...]:
        """The training sources whose records are used."""
        return tuple(source for source in self.datasets if source.is_read)

    @property
    def sources(self) -> tuple[DatasetConfig, ...]:
        return (*self.read_datasets, *self.test_datasets, *self.decontaminate_datasets)

    @property
    def types(self) -> frozenset[str | None]:
        """Formats of the data sources; None is one that is not known yet."""
        return frozenset(source.type for source in self.sources)

    @property
    def limits_samples(self) -> bool:
        return any(source.max_seq_len for source in self.sources)

    @property
    def drops_turns(self) -> bool:
        """Whether `truncation_mode: drop_turns` is another than `keep_start`. Of samples without
        turns the two keep other parts of a prompt that has a maximum length."""
        without_turns = {"text", "tokenized", "instruction"}
        without_parts = without_turns if self.max_prompt_len is None else {"text"}
        return not self.types <= without_parts

    @property
    def mixes_samples(self) -> bool:
        """Whether samples are drawn from several sources, or from one repeatedly."""
        return len(self.datasets) > 1 or self.mix_strategy != "concat"

    @property
    def draws_samples(self) -> bool:
        """Whether the prepared samples, or their order, are random."""
        shuffles_each = self.mixes_samples and self.shuffle_before_merging_datasets
        is_interleaved = self.mix_strategy in ("interleave_under", "interleave_over")
        return bool(
            self.val_set_size or self.shuffle_merged_datasets or shuffles_each or is_interleaved
        )

    @property
    def has_held_out_data(self) -> bool:
        """Whether there is, or may be, data to evaluate on. Whether prepared data has a validation
        split is known only when it is read."""
        return bool(self.test_datasets or self.val_set_size or self.skip_prepare_dataset)

    @property
    def last_batch(self) -> LastBatch:
        """What happens to the packed sequences at the end of an epoch that do not fill a step."""
        if self.dataloader_drop_last is None:
            return "drop_few" if self.sample_packing_sequence_len is None else "drop"
        return "drop" if self.dataloader_drop_last else "keep"

    @property
    def packing_method(self) -> Literal["sequential", "multipack", "greedy", "wrapped"]:
        return "sequential" if self.sample_packing_sequentially else self.sample_packing_method

    @property
    def splits_samples(self) -> bool:
        """Whether a sample that is longer than a row continues in the next one."""
        return self.packing_method == "wrapped"

    @property
    def row_length(self) -> int:
        """Maximum tokens of a packed sequence: as written, else as chosen from the samples, else
        the largest length that may be chosen."""
        return self.sample_packing_sequence_len or self._chosen_row_length or LONGEST_ROW

    def with_row_length(self, length: int) -> "DataConfig":
        """A copy with the `row_length` that was chosen from the samples. No field holds it:
        printed, the section still leaves the length to the samples."""
        chosen = self.model_copy()
        # pydantic's `frozen` does not hold for private attributes.
        chosen._chosen_row_length = length
        return chosen

    @property
    def num_workers(self) -> int:
        if self.dataloader_num_workers is None:
            return 0 if self.dataloader_prefetch_factor is None else WORKERS
        return self.dataloader_num_workers

    @property
    def prefetch_factor(self) -> int:
        return self.dataloader_prefetch_factor or PREFETCH

    @property
    def shares_prompts(self) -> bool:
        is_sft = all(source.kind == "sft" for source in self.read_datasets[:1])
        return self.share_prompts is not False and not is_sft
