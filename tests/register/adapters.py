"""Adapters."""

from tests.register.places import (
    ADAPTERS,
    ARRIVES,
    DROPPED,
    FOLDERS,
    GONE_ON_WITH,
    IN_COMMON,
    MERGING,
    NOISY,
    OF_FORM,
    OF_PEFT,
    QLORA,
    QUANTISED,
    REACHED,
    RUN,
)

OF_ADAPTERS: dict[str, dict[str, tuple[str, ...]]] = {
    "lora": {
        "enable_lora": (ADAPTERS, f"{RUN}test_a_run_with_adapters_saves_them_alone"),
        "lora_rank": (ADAPTERS,),
        "lora_alpha": (ADAPTERS, f"{ARRIVES}[lora.lora_alpha]"),
        "use_rslora": (*OF_PEFT, f"{ARRIVES}[lora.use_rslora]"),
        "use_dora": (OF_FORM, *OF_PEFT, f"{ARRIVES}[lora.use_dora]"),
        "lora_plus_ratio": (OF_FORM, f"{ARRIVES}[lora.lora_plus_ratio]"),
        "lora_bias": (OF_FORM, *OF_PEFT, f"{ARRIVES}[lora.lora_bias]"),
        "lora_dropout": (DROPPED, f"{ARRIVES}[lora.lora_dropout]"),
        "lora_target_modules": (ADAPTERS, OF_FORM, *REACHED),
        "init_adapter_path": (*GONE_ON_WITH, f"{ARRIVES}[lora.init_adapter_path]"),
        "moe_shared_lora": (*IN_COMMON, f"{ARRIVES}[lora.moe_shared_lora]"),
        "moe_hybrid_shared_lora": (*IN_COMMON, f"{ARRIVES}[lora.moe_hybrid_shared_lora]"),
        "save_lora_only": (FOLDERS, f"{ARRIVES}[lora.save_lora_only]"),
        "enable_qlora": (QUANTISED, f"{ARRIVES}[lora.enable_qlora]"),
        "quant_format": (QUANTISED, f"{ARRIVES}[lora.quant_format]"),
        "quant_group_size": (QUANTISED, f"{ARRIVES}[lora.quant_group_size]"),
        "exclude_modules": (
            f"{QLORA}test_modules_that_are_excluded_stay_as_they_are",
            f"{ARRIVES}[lora.exclude_modules]",
        ),
        "enable_aqn": (NOISY, f"{ARRIVES}[lora.enable_aqn]"),
        "aqn_alpha": (NOISY, f"{ARRIVES}[lora.aqn_alpha]"),
        "merge_lora_interval": (
            f"{MERGING}test_weights_are_those_of_a_loop_that_merges_with_peft",
            f"{MERGING}test_adapters_of_every_form_become_part_of_their_weights",
            FOLDERS,
            f"{ARRIVES}[lora.merge_lora_interval]",
        ),
        "reset_optimizer_on_merge": (
            f"{MERGING}test_the_optimizer_forgets_adapters_alone_at_a_merge_if_that_is_written",
            f"{ARRIVES}[lora.reset_optimizer_on_merge]",
        ),
    },
}
