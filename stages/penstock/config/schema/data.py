"""What is trained on, and how it is laid into rows."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, PrivateAttr

from penstock.config.schema.base import ConfigSection
from penstock.config.schema.dataset import DatasetConfig
from penstock.config.schema.pipeline import Root

LastBatch = Literal["drop", "drop_few", "keep"]
"""`drop_few`: dropped where that loses at most `rows.sizing.FEW_ROWS` of an epoch, else kept."""

LONGEST_ROW = 32_000
"""Most tokens of a row whose length is chosen from the samples."""

WORKERS, PREFETCH = 8, 2
"""Loading processes, and steps that each keeps ready, where one of the two alone is written."""


def _size_or_share(value: int | float | None) -> int | float | None:
    """None when nothing is set aside; otherwise a number of samples or a share below 1."""
    if value is None or value == 0:
        return None
    if value < 0 or (isinstance(value, float) and value >= 1):
        raise ValueError(
            f"is {value}; write a whole number of samples (500) or a share between 0 and 1 (0.05)"
        )
    return value


class DataConfig(ConfigSection):
    """Sources, their preparation, packing and loading."""

    datasets: list[DatasetConfig] = Field(min_length=1)
    """The sources to train on."""

    test_datasets: list[DatasetConfig] = Field(default_factory=list[DatasetConfig])
    """Sources to evaluate on, written like `datasets`. Not together with `val_set_size`."""

    dataset_prepared_path: Root = Field(default="last_prepared_dataset", min_length=1)
    """Folder for prepared and packed datasets; runs that share it share them. May be the URL of an
    object store (`s3://`, `gs://`, `abfs://`), which machines can share."""

    bad_rows_allowed: float = Field(default=0.0, ge=0, le=1)
    """Share of a source's rows, 0 to 1, that may be unusable before preparing fails. Unusable rows
    are left out and counted."""

    mix_strategy: Literal["concat", "random", "interleave_under", "interleave_over"] = "concat"
    """How several sources are put together. `concat`: every sample once. `random`: each source
    gives its share (`weight`) of an epoch, again from the start when it runs out.
    `interleave_under` draws sources by weight until one has run out, `interleave_over` until all
    have, those that ran out starting again."""

    weight_unit: Literal["samples", "tokens"] = "samples"
    """What each source's `weight` is a share of: the samples that are drawn, or their tokens, where
    a source whose samples are twice as long gives half as many."""

    samples_per_epoch: int | None = Field(default=None, gt=0)
    """`mix_strategy: random`: samples in an epoch. Unset: as many as all sources have. Every one of
    `train.num_train_epochs` epochs draws on where the last one stopped."""

    deduplicate: Literal["exact", "near"] | None = None
    """Leave out training samples that are there already, in `datasets` or `test_datasets`: with
    the same tokens, or (`near`) nearly the same. The first of them stays."""

    near_duplicate_threshold: float = Field(default=0.8, gt=0, le=1)
    """`deduplicate: near`: the share of common runs of 5 tokens (Jaccard similarity) from which on
    two samples count as one."""

    decontaminate_datasets: list[DatasetConfig] = Field(default_factory=list[DatasetConfig])
    """Sources that must not be trained on, written like `datasets`: training samples that share a
    run of `decontaminate_ngram` tokens with them are left out. What more than a tenth of their
    samples have in common (a chat template, a system prompt) does not count."""

    decontaminate_ngram: int = Field(default=13, gt=0)
    """Length of the shared run of tokens that leaves a sample out."""

    truncation_mode: Literal["keep_start", "keep_end", "drop", "drop_turns"] = "keep_start"
    """What becomes of a sample longer than `max_seq_len`: it loses its end, its start, is left out,
    or loses its oldest turns (a system prompt stays). All of it is counted."""

    max_prompt_len: int | None = Field(default=None, gt=0)
    """Tokens that a prompt (what comes before the first trained token) keeps when the sample is
    longer than `max_seq_len`; of a longer prompt `keep_start` keeps the start, all other modes the
    end."""

    train_on_prompt: bool = False
    """Train on the prompt's tokens too, not only on the answers."""

    train_on_turns: Literal["all", "last"] = "all"
    """Train on all turns of the assistant or only on the last one."""

    chat_template: Literal["auto", "published", "training"] = "auto"
    """How the tokenizer's chat template renders conversations. Some templates change earlier
    answers once others follow (Qwen3's takes their reasoning out). `training`: every answer stands
    as the template renders it when it is the last, so all turns can be trained. `published`: as the
    template renders the whole; conversations whose trained answers change are unusable. `auto`:
    `training` for those, `published` for all others, which both render alike."""

    add_eos: bool = True
    """End documents of `text`, and answers without a chat template, with the end-of-sequence
    token."""

    mask_eos_in_loss: bool = False
    """Do not train the token that ends an answer or a document."""

    select_columns: list[str] | None = None
    """Columns kept of each source, for example `[input_ids, labels]`. Unset: all of them."""

    sample_packing_method: Literal["sequential", "multipack", "greedy", "wrapped"] = "sequential"
    """How samples share a row: `sequential` fills rows in the order of the data, `multipack` looks
    for samples that fit and fills rows best, `greedy` puts each sample into the row with the most
    room, and `wrapped` lays samples end to end and cuts them where a row is full, as pre-training
    does."""

    sample_packing_sequence_len: int | None = Field(default=None, gt=0)
    """Tokens of a packed row, at most. Unset: chosen from the samples, up to 32000: enough for the
    longest one, and small enough for 512 rows in an epoch where that is possible."""

    sample_packing_group_size: int = Field(default=100_000, gt=0)
    """`multipack` and `greedy`: samples that are packed together; larger groups fill rows slightly
    better, and 1 gives each sample a row of its own."""

    sample_packing_sequentially: bool | None = None
    """True packs sequentially whatever `sample_packing_method` says."""

    sample_packing_mp_start_method: Literal["fork", "spawn", "forkserver"] | None = None
    """How processes that write packed rows are started. Unset: `spawn`."""

    eval_sample_packing: bool | None = None
    """False keeps evaluation samples unpacked, one to a row."""

    isolate_samples: bool = True
    """Keep samples of one row from seeing each other. `false` lets each one see all that is before
    it in its row, as text that is cut from one stream may; no token is trained to foretell another
    sample's. Evaluations keep samples apart."""

    share_prompts: bool = True
    """Samples with two answers: lay the prompt into a row once for both, which do not see each
    other. False lays it before each of them. What is learnt is the same; it takes more tokens, and
    suits attention (`flash_attention_*`) that cannot hide one answer from the other."""

    dataloader_num_workers: int | None = Field(default=None, ge=0)
    """Processes that load rows for one training process. Unset: none, for rows are mapped into
    memory and read faster than any step takes; but 8 with `dataloader_prefetch_factor`."""

    dataloader_prefetch_factor: int | None = Field(default=None, gt=0)
    """Steps that each loading process keeps ready. Unset: 2."""

    dataloader_pin_memory: bool = True
    """Load batches into pinned memory, from which copies to a GPU are faster."""

    dataloader_drop_last: bool | None = None
    """Leave out the rows at the end of an epoch that do not fill a step, unless they are all
    there is. Unset: true with `sample_packing_sequence_len`; without, only where they are at most
    5 % of the epoch."""

    pad_to_multiple_of: int = Field(default=128, gt=0)
    """Rows are padded to a multiple of this many tokens when they are loaded."""

    val_set_size: Annotated[int | float | None, AfterValidator(_size_or_share)] = None
    """Samples set aside for evaluation: a whole number of them, or a share between 0 and 1."""

    shuffle_merged_datasets: bool = True
    """Shuffle the samples after the sources have been put together."""

    shuffle_before_merging_datasets: bool = True
    """Shuffle each source before they are put together."""

    dataset_num_proc: int | None = Field(default=None, gt=0)
    """Processes for preparing, at most: a few megabytes are done sooner by one. Unset:
    `PENSTOCK_NUM_PROC` or `XORL_DATASET_NUM_PROC`, else the number of CPUs."""

    dataset_shard_num: int | None = Field(default=None, gt=0)
    """Cut the training data into this many pieces and use one (see `dataset_shard_idx`). Every
    record is in exactly one piece."""

    dataset_shard_idx: int | None = Field(default=None, ge=0)
    """Which piece of `dataset_shard_num` to use, counted from 0."""

    num_dataset_shards_to_save: int | None = Field(default=None, gt=0)
    """Files the prepared training data is written to, in all. Unset: one for each slice."""

    skip_prepare_dataset: bool = False
    """Take the prepared data that lies in `dataset_prepared_path` as it is; sources are not looked
    at."""

    push_dataset_to_hub: str | None = None
    """Hub dataset (`org/name`) the prepared data is pushed to, in a private repository. Needs
    `hf_use_auth_token: true`."""

    hf_use_auth_token: bool | None = None
    """Whether the hub's login is used for datasets: true needs one, false uses none. Unset: it is
    used where there is one."""

    _chosen_row_length: int | None = PrivateAttr(default=None)

    @property
    def last_batch(self) -> LastBatch:
        """What becomes of the rows at the end of an epoch that do not fill a step."""
        if self.dataloader_drop_last is None:
            return "drop_few" if self.sample_packing_sequence_len is None else "drop"
        return "drop" if self.dataloader_drop_last else "keep"

    @property
    def row_length(self) -> int:
        """Most tokens of a row: as written, else as chosen from the samples, else the longest that
        may be chosen."""
        return self.sample_packing_sequence_len or self._chosen_row_length or LONGEST_ROW

    def with_row_length(self, length: int) -> "DataConfig":
        """The section with `row_length` as it was chosen from the samples, which no field holds:
        printed, the section still leaves it to them."""
        chosen = self.model_copy()
        chosen._chosen_row_length = length
        return chosen

    @property
    def num_workers(self) -> int:
        """Processes that load rows for one training process."""
        if self.dataloader_num_workers is None:
            return 0 if self.dataloader_prefetch_factor is None else WORKERS
        return self.dataloader_num_workers

    @property
    def prefetch_factor(self) -> int:
        """Steps that each of them keeps ready."""
        return self.dataloader_prefetch_factor or PREFETCH

    @property
    def shares_prompts(self) -> bool:
        """Whether documents branch: their samples have two answers, which share the prompt."""
        return self.share_prompts and self.datasets[0].kind != "sft"
