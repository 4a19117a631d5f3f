"""Columns of a dataset that its type does not read."""

from collections.abc import Mapping

from penstock.config.loading.fault import ConfigIssue, dotted
from penstock.config.rules.data import Issues
from penstock.config.schema.dataset import FormatName
from penstock.config.schema.run import RunConfig

PAIRS = ("preference", "kto")
QUESTIONS = ("instruction", "alpaca", "preference")

WITH_MEDIA = ("chat", "sharegpt", "alpaca", "sft_turns", "preference_turns", *PAIRS)

MESSAGES = ("chat", "sharegpt", *PAIRS)

TYPES_OF_FIELD: Mapping[str, tuple[FormatName, ...]] = {
    "image_folder": WITH_MEDIA,
    "allow_private_urls": WITH_MEDIA,
    **dict.fromkeys(("image_min_pixels", "image_max_pixels"), WITH_MEDIA),
    **dict.fromkeys(("video_fps", "video_min_frames", "video_max_frames"), WITH_MEDIA),
    "field_messages": MESSAGES,
    "field_message_role": MESSAGES,
    "field_message_content": MESSAGES,
    "field_message_training": MESSAGES,
    "field_message_training_detail": ("chat", "sharegpt"),
    "message_roles": MESSAGES,
    "drop_system_message": (*MESSAGES, "alpaca", "sft_turns", "preference_turns"),
    "field_tools": ("chat", "sharegpt", "alpaca", *PAIRS),
    "field_instruction": QUESTIONS,
    "field_input": (*QUESTIONS, "kto"),
    "field_output": ("instruction", "alpaca"),
    "field_text": ("text",),
    "field_prompt": PAIRS,
    "field_chosen": ("preference",),
    "field_rejected": ("preference",),
    "field_completion": ("kto",),
    "field_label": ("kto", "chat"),
}
"""The types that read each field; `field_system` and scores are checked elsewhere."""


def check_dataset_columns(run: RunConfig) -> Issues:
    """Name of a column that the dataset's type does not read."""
    for field in ("datasets", "test_datasets", "decontaminate_datasets"):
        for index, entry in enumerate(getattr(run.data, field)):
            if not entry.is_typed:
                continue
            for name, types in TYPES_OF_FIELD.items():
                if entry.is_non_default(name) and entry.type not in types:
                    at = ("data", field, index)
                    yield ConfigIssue(
                        (*at, name),
                        f"type: {entry.type} does not read it; leave it out, or write type:"
                        f" {' or '.join(types)}",
                        (dotted((*at, "type")),),
                    )


def check_media_bounds(run: RunConfig) -> Issues:
    """A smallest number above the largest."""
    for field in ("datasets", "test_datasets", "decontaminate_datasets"):
        for index, entry in enumerate(getattr(run.data, field)):
            for least, most in BOUNDS:
                low, high = getattr(entry, least), getattr(entry, most)
                if low is not None and high is not None and low > high:
                    at = ("data", field, index)
                    yield ConfigIssue(
                        (*at, least), f"is {low}, above {most}, which is {high}; swap them"
                    )


BOUNDS = (("image_min_pixels", "image_max_pixels"), ("video_min_frames", "video_max_frames"))
"""Fields with the smallest and the largest number."""
