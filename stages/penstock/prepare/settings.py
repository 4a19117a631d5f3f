"""Settings that determine the content of prepared data, besides the data and the tokenizer."""

from dataclasses import fields
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    field_validator,
    model_serializer,
    model_validator,
)

from penstock.config.schema.base import Settings
from penstock.config.schema.dataset import (
    MAX_RECORD_BYTES,
    SCORES,
    FileKind,
    Kind,
    MessageRole,
    TrainedEos,
    TrainedRole,
    kind_of_format,
)
from penstock.media.bounds import MediaBounds
from penstock.rows.chat_template import ChatTemplate

# Settings that were added later: their defaults are not in keys, so that earlier keys stay valid.
LATER = (
    *SCORES,
    "document_split",
    "chat_template",
    "turn_rendering",
    "roles_to_train",
    "train_on_eos",
    "field_message_role",
    "field_message_content",
    "field_message_training",
    "field_message_training_detail",
    "message_roles",
    "drop_system_message",
    "field_weight",
    "allow_private_urls",
    "part",
    *(field.name for field in fields(MediaBounds)),
)

USUAL_MESSAGES = {"chat": "messages", "sharegpt": "conversations"}
"""Column of messages where `field_messages` is unset, of types that read one column."""

MixStrategy = Literal["concat", "random", "interleave_under", "interleave_over"]


class DatasetSettings(Settings):
    """How records of one source become samples; part of the cache key of its slices.

    The records themselves are identified by the source's pin. The fields are documented in the
    config schema; those of the section `data` are the same for all sources.
    """

    type: str = "tokenized"
    part: dict[str, Any] | None = None
    """Package, version and options of a type that is not ours."""

    ds_type: FileKind | None = None
    max_seq_len: int | None = Field(default=None, gt=0)
    shards: int | None = Field(default=None, gt=0)
    shards_idx: int | None = Field(default=None, ge=0)
    preprocess_shards: int | None = Field(default=None, gt=0)
    streaming: bool = False
    document_split: tuple[str, Literal["train", "validation", "test"]] | None = None
    """(`splits_string`, name of the split that is read), for Megatron files."""

    image_folder: str | None = Field(default=None, exclude=True)
    """Not part of any key: images are identified by their content."""

    max_record_bytes: int = Field(default=MAX_RECORD_BYTES, gt=0, exclude=True)
    """Not part of any key: what is read does not depend on it."""

    allow_private_urls: bool = False
    image_min_pixels: int | None = Field(default=None, gt=0)
    image_max_pixels: int | None = Field(default=None, gt=0)
    video_fps: float | None = Field(default=None, gt=0)
    video_min_frames: int | None = Field(default=None, gt=0)
    video_max_frames: int | None = Field(default=None, gt=0)

    field_messages: str | None = None
    field_message_role: str | None = None
    field_message_content: str | None = None
    field_message_training: str | None = None
    field_message_training_detail: str | None = None
    message_roles: dict[MessageRole, list[str]] | None = None
    drop_system_message: bool = False
    field_tools: str = "tools"
    field_instruction: str = "instruction"
    field_input: str | None = None
    field_output: str = "output"
    field_system: str | None = None
    field_text: str = "text"
    field_prompt: str = "prompt"
    field_chosen: str = "chosen"
    field_rejected: str = "rejected"
    field_chosen_score: str | None = None
    field_rejected_score: str | None = None
    field_weight: str | None = None
    field_completion: str = "completion"
    field_label: str = "label"

    truncation_mode: Literal["keep_start", "keep_end", "drop", "drop_turns"] = "keep_start"
    max_prompt_len: int | None = Field(default=None, gt=0)
    train_on_prompt: bool = False
    train_on_turns: Literal["all", "last"] = "all"
    turn_rendering: Literal["auto", "whole", "per_turn"] = "auto"
    chat_template: ChatTemplate | None = None
    """None: the tokenizer's own, without variables."""

    add_eos: bool = True
    mask_eos_in_loss: bool = False
    roles_to_train: tuple[TrainedRole, ...] = ("assistant",)
    train_on_eos: TrainedEos = "turn"
    dataset_shard_num: int | None = Field(default=None, gt=0)
    dataset_shard_idx: int | None = Field(default=None, ge=0)
    """Set for training sources only."""

    def __hash__(self) -> int:
        # pydantic's own hash is of the fields, and some are mappings, which have none.
        return hash(self.model_dump_json())

    @property
    def kind(self) -> Kind:
        """Kind of its samples: SFT, preference or KTO."""
        return kind_of_format(self.type)

    @property
    def media_bounds(self) -> MediaBounds:
        """Bounds on the size of its images and the frames of its videos."""
        return MediaBounds(
            **{field.name: getattr(self, field.name) for field in fields(MediaBounds)}
        )

    @property
    def is_scored(self) -> bool:
        """Whether its pairs have scores."""
        return self.field_chosen_score is not None

    @property
    def trained_ends(self) -> TrainedEos:
        """Which tokens that end a turn are trained."""
        return "none" if self.mask_eos_in_loss else self.train_on_eos

    @model_validator(mode="before")
    @classmethod
    def _spell_once(cls, values: dict[str, Any]) -> dict[str, Any]:
        # One spelling of values that mean the same: they are part of keys.
        values = dict(values)
        for count, index in (
            ("shards", "shards_idx"),
            ("dataset_shard_num", "dataset_shard_idx"),
        ):
            if values.get(count) == 1:
                values |= {count: None, index: None}
        usual = USUAL_MESSAGES.get(values.get("type", ""))
        if usual and values.get("field_messages") == usual:
            values["field_messages"] = None
        if values.get("train_on_eos") == "none":
            values |= {"train_on_eos": "turn", "mask_eos_in_loss": True}
        # Slices read None as shard 0, so an index of 0 must not be another key.
        values["shards_idx"] = values.get("shards_idx") or None
        named = {
            role: names for role, names in (values.get("message_roles") or {}).items() if names
        }
        values["message_roles"] = named or None
        return values

    @field_validator("roles_to_train")
    @classmethod
    def _sort_roles(cls, roles: tuple[TrainedRole, ...]) -> tuple[TrainedRole, ...]:
        # One spelling of a set of roles: it is part of keys.
        return tuple(sorted(set(roles)))

    @property
    def parsed_by(self) -> dict[str, Any]:
        """The settings that decide what is read of a record, as JSON."""
        values = self.model_dump(mode="json")
        names = ("message_roles", "drop_system_message", "part")
        return {
            name: value
            for name, value in values.items()
            if name.startswith("field_") or name in names
        }

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Without later settings that have their default: keys from before them stay valid.
        declared = type(self).model_fields
        return {
            name: value
            for name, value in dump(self).items()
            if name not in LATER or getattr(self, name) != declared[name].default
        }


class MixSettings(Settings):
    """How much of one source is used; not part of slice keys, so a change tokenizes nothing."""

    weight: float = Field(default=1.0, ge=0)
    """Share in the mix, relative to the other sources."""

    max_samples: int | None = Field(default=None, gt=0)
    """Use only this many samples, from the start."""

    loss_weight: float = Field(default=1.0, ge=0)
    """Loss weight of its tokens."""

    @model_serializer(mode="wrap")
    def _as_written(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Without a loss weight of 1: keys from before there were loss weights stay valid.
        values = dump(self)
        return {n: v for n, v in values.items() if (n, v) != ("loss_weight", 1.0)}


class PrepareSettings(Settings):
    """Cache identity of prepared data."""

    datasets: tuple[DatasetSettings, ...]
    """One for each training source, in the order of the sources."""

    test_datasets: tuple[DatasetSettings, ...] = ()
    """One for each validation source, in the order of the sources."""

    decontaminate_datasets: tuple[DatasetSettings, ...] = ()
    """One for each source that must not be trained on."""

    mix: tuple[MixSettings, ...] = ()
    """One for each training source; empty: all of each, equally weighted."""

    test_mix: tuple[MixSettings, ...] = ()
    """One for each validation source; only `max_samples` and `loss_weight` are used."""

    mix_strategy: MixStrategy = "concat"
    """How training sources are merged."""

    weight_unit: Literal["samples", "tokens"] = "samples"
    """Unit of the weights."""

    samples_per_epoch: int | None = Field(default=None, gt=0)
    """`random`: samples per epoch; None: the number of all samples."""

    epochs: int = Field(default=1, gt=0)
    """`random`: number of planned epochs; 1 for every other strategy."""

    deduplicate: Literal["exact", "near"] | None = None
    """Which duplicate training samples are dropped."""

    near_duplicate_threshold: float = Field(default=0.8, gt=0, le=1)
    """`near`: minimum Jaccard similarity of duplicates."""

    decontaminate_ngram: int = Field(default=13, gt=0)
    """Samples that share this many consecutive tokens with `decontaminate_datasets` are dropped."""

    select_columns: tuple[str, ...] | None = None
    """The only columns a record may use; a record that lacks one of them is unusable."""

    val_set_size: Annotated[int, Field(ge=1)] | Annotated[float, Field(gt=0, lt=1)] | None = None
    """Samples moved from training to validation: a number or a share."""

    split_by: str | None = None
    """Column whose values are not split across training and validation."""

    shuffle_merged_datasets: bool = True
    """Shuffle the samples after merging the sources."""

    shuffle_before_merging_datasets: bool = True
    """Shuffle each source before merging."""

    num_dataset_shards_to_save: int | None = Field(default=None, gt=0)
    """Number of training data files; None: one per slice."""

    bad_rows_allowed: float = Field(default=0.0, ge=0, le=1)
    """Maximum share of unusable records of a source."""

    seed: int = 42
    """Random seed of the validation split and of shuffling."""

    @property
    def kind(self) -> Kind:
        """Kind of the samples, the same for all sources."""
        return self.first_read.kind

    @property
    def first_read(self) -> DatasetSettings:
        """Settings of the first training source that has a weight."""
        if not self.mix:
            return self.datasets[0]
        return next(s for s, mix in zip(self.datasets, self.mix, strict=True) if mix.weight)
