"""ERNIEKit's recipes for images (stage VL-SFT)."""

from collections.abc import Mapping

from penstock.config.translate.dialect import (
    Rule,
    by_reason,
    if_on,
    no_effect,
    put,
    refused,
    when,
)
from penstock.config.translate.shared import ALONE, OF_PYTHON
from penstock.config.translate.translation import Entry

STAGE = "VL-SFT"

NOT_SAID = (
    "it is a factor of the rate of some parameters; leave it out, and write the vision tower's rate"
    " as train.vision_lr"
)


def is_of_images(entry: Entry) -> bool:
    """Whether the file is a recipe for images."""
    return entry.get("stage") == STAGE


def if_of_images(rule: Rule) -> Rule:
    """The rule of a key that recipes for images alone read."""
    return when(is_of_images, rule, f"read by stage {STAGE} alone")


def _freeze(entry: Entry) -> None:
    parts = str(entry.value or "").split()
    if other_parts := [part for part in parts if part != "freeze_vision"]:
        entry.refuse(f"{', '.join(other_parts)}: it takes freeze_vision")
    elif entry.get("fine_tuning") == "LoRA":
        entry.approximated(
            "with adapters all of the model's own weights are frozen, and adapters are of the"
            " language model; there the resampler has some too"
        )
    else:
        entry.put("model.freeze", ["vision"] if parts else [])


def _own_rate(entry: Entry) -> None:
    """Factors of the learning rate of routers and of the vision tower's layers."""
    adapted = entry.get("fine_tuning") == "LoRA"
    frozen = "freeze_vision" in str(entry.get("freeze_config", ""))
    if adapted or (frozen and entry.key != "moe_gate_lr_ratio"):
        entry.no_effect("what it is of is frozen")
    elif entry.value == 1:
        entry.no_effect("is the rate of all parts")
    else:
        entry.refuse(NOT_SAID)


def has_samples_alone(entry: Entry) -> bool:
    """Whether each sample has a sequence of its own, whatever `packing` says."""
    return is_of_images(entry) and bool(entry.get("one_sample_in_one_seq"))


IMAGES: Mapping[str, Rule] = {
    "multimodal": when(
        is_of_images,
        no_effect("data with images says it"),
        if_on(
            lambda entry: entry.refuse(
                f"stage {entry.get('stage')} reads text; write stage: {STAGE}, or leave it out"
            ),
            "is off",
        ),
    ),
    "freeze_config": if_of_images(_freeze),
    "modality_ratio": if_of_images(
        when(
            lambda entry: entry.get("text_dataset_path") and entry.get("train_dataset_path"),
            lambda entry: entry.refuse(
                "sources are mixed by train_dataset_prob; write all sources there"
            ),
            "there are no text sources beside others with images",
        )
    ),
    "variable_resolution": if_of_images(
        when(
            lambda entry: not entry.value,
            lambda entry: entry.refuse("one size of all images is not set here; write 1"),
            "images have the size that the image processor gives them",
        )
    ),
    "one_sample_in_one_seq": if_of_images(if_on(ALONE, "packing says it")),
    "prefetch_factor": if_of_images(put("data.dataloader_prefetch_factor")),
    "moe_use_aux_free_update_coef": if_of_images(
        when(
            lambda entry: entry.value and entry.get("moe_use_aux_free", True),
            put("train.moe_bias_update_rate", float),
            "biases of routers are left as they are",
        )
    ),
    **dict.fromkeys(("moe_gate_lr_ratio", "visual_ld", "vit_lr_ratio"), if_of_images(_own_rate)),
    "from_scratch": if_of_images(refused("weights are those of model_name_or_path; write 0")),
    **{
        key: if_of_images(no_effect(why))
        for key, why in by_reason(
            f"""
            moe_use_aux_free: moe_use_aux_free_update_coef says how much
            render_timestamp: of videos, which data here has none of
            use_moe moe_use_hard_gate: as the model's config.json says
            add_sys_token: the tokenizer's chat template says it
            drop_history_with_k: turns are left out where a sample is too long
            same_data: a run that goes on reads the data where it stopped
            trigger_data_prob: every record is read
            pad_to_max_seqlen: sequences are padded to whole 128 tokens, which changes no result
            use_recompute_loss_fn serialize_output gc_interval pre_alloc_memory pp_need_data
            pp_need_data_degree disable_pipeline_warmup
            save_sharding_stage1_model_include_freeze_params: {OF_PYTHON}
            """
        ).items()
    },
}
