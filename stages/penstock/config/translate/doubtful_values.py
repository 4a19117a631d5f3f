"""Values of a translated run that probably do not do what was intended, in any dialect.

Each is translated as its tool computes it; the report explains it, so that the user can decide.
"""

from typing import Any, cast

from penstock.config.translate.translation import Draft

SOURCES = ("data.datasets", "data.test_datasets")


def mark_doubtful(draft: Draft) -> None:
    """Mark the keys of such values as doubtful. Called after all settings are set."""
    _warmup_ends(draft)
    _texts_keep_their_ends(draft)
    _experts_compute_in_fp8(draft)


def _warmup_ends(draft: Draft) -> None:
    warmup, steps = draft.value("train.lr_warmup_steps"), draft.value("train.max_steps")
    if isinstance(warmup, int) and isinstance(steps, int) and 0 < steps < warmup:
        draft.mark_doubtful(
            "train.lr_warmup_steps",
            f"the warmup of {warmup} steps is longer than the run of {steps}, so the learning rate"
            " never reaches its peak",
        )


def _texts_keep_their_ends(draft: Draft) -> None:
    if draft.value("data.truncation_mode", "keep_start") == "drop":
        return
    for name in SOURCES:
        sources = cast("list[dict[str, Any]]", draft.value(name) or [])
        limits = {source.get("max_seq_len") for source in sources if source.get("type") == "text"}
        # Keys that name data sets are marked once, however many they name.
        for limit in sorted(limit for limit in limits if isinstance(limit, int)):
            draft.mark_doubtful(
                name,
                f"a document of more than {limit} tokens is truncated; tools that concatenate and"
                " split documents train on the rest too. Split long documents",
            )


def _experts_compute_in_fp8(draft: Draft) -> None:
    is_mixture = draft.value("model.foundation.num_local_experts") or draft.value(
        "model.foundation.num_experts"
    )
    if draft.value("train.enable_fp8_training"):
        every = "experts" if is_mixture else "if the model has experts, they"
        draft.mark_doubtful(
            "train.enable_fp8_training",
            f"{every} compute in bfloat16 here: FP8 is for the other linear layers",
        )
