"""Learning from preferences."""

TOLD = "engine/losses/test_preference_fields.py::test_a_step_tells_the_loss_that_is_written"
OTHERWISE = "engine/losses/test_preference_fields.py::test_every_setting_gives_another_loss"
TRL = "engine/losses/test_preferences_of_trl.py::test_"
VECTORS = "losses/test_preference.py::test_a_loss_is_what_others_give"
UNUSED = "config/rules/test_preference_rules.py::test_a_field_that_the_loss_does_not_use_is_refused"
RULED = (
    "config/rules/test_preference_rules.py::test_an_impossible_combination_is_refused_and_mended"
)


def _told(name: str) -> tuple[str, ...]:
    return f"{TOLD}[{name}]", OTHERWISE, f"{UNUSED}[{name}]"


OF_PREFERENCE: dict[str, dict[str, tuple[str, ...]]] = {
    "preference": {
        "loss_type": (VECTORS, TOLD, f"{TRL}pairs_are_learnt_from_as_trl_does"),
        "beta": (*_told("beta"), f"{TRL}pairs_are_learnt_from_as_trl_does"),
        "label_smoothing": _told("label_smoothing"),
        "offset_alpha": (VECTORS, RULED, f"{TOLD}[offset_alpha]", OTHERWISE),
        "simpo_gamma": (*_told("simpo_gamma"), f"{TRL}pairs_are_learnt_from_as_trl_does"),
        "dpop_lambda": _told("dpop_lambda"),
        "dpop_penalty": _told("dpop_penalty"),
        "desirable_weight": (
            *_told("desirable_weight"),
            f"{TRL}judged_answers_are_learnt_from_as_trl_does",
        ),
        "undesirable_weight": (
            *_told("undesirable_weight"),
            f"{TRL}judged_answers_are_learnt_from_as_trl_does",
        ),
        "kl_pairing": (
            "stages/pack/test_branched.py::test_rotated_answers_are_those_of_the_sample_before_within_a_group",
            f"{TRL}ten_steps_of_kto_are_those_of_trl",
            f"{UNUSED}[kl_pairing]",
        ),
        "kl_rotation_size": (
            "stages/pack/test_branched.py::test_rotated_answers_are_those_of_the_sample_before_within_a_group",
            f"{TRL}ten_steps_of_kto_are_those_of_trl",
            f"{UNUSED}[kl_rotation_size]",
            RULED,
        ),
        "sft_loss_scope": (
            f"{TOLD}[sft_loss_scope]",
            f"{TRL}ten_steps_of_orpo_are_those_of_trl",
            OTHERWISE,
            RULED,
        ),
        "pref_loss_ratio": (f"{TOLD}[pref_loss_ratio]", OTHERWISE),
        "sft_loss_ratio": (f"{TOLD}[sft_loss_ratio]", f"{TOLD}[kto, sft]", OTHERWISE),
        "reference_free": (
            *_told("reference_free"),
            "config/rules/test_preference_rules.py::test_a_run_that_is_free_of_a_reference_has_no_stage_for_it",
        ),
        "ref_update_steps": (
            "engine/losses/test_preferences.py::test_the_model_becomes_its_own_reference_every_so_many_steps",
            RULED,
        ),
        "precompute_ref_logps": (RULED,),
        "length_normalize": (f"{TOLD}[mean]", f"{TOLD}[pair_mean]", OTHERWISE),
    }
}
