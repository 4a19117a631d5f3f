"""Optimizers, their learning rates, and the precision of what they keep."""

from tests.register.places import (
    DECAY,
    IN_LAYOUTS,
    KEEPING,
    MORE_OF_SCHEDULES,
    OF_MUON,
    OF_SCHEDULES,
    OPTIM,
    RATES,
    SMALL_STEPS,
    STEP,
    STEPPED,
)

OF_OPTIMIZING: dict[str, dict[str, tuple[str, ...]]] = {
    "train": {
        "optimizer": (
            *DECAY,
            f"{STEP}test_without_another_word_the_optimizer_is_adamw",
            STEPPED,
            IN_LAYOUTS,
        ),
        "optimizer_dtype": (
            KEEPING,
            "optim/test_muon.py::test_momentum_in_bf16_is_near_that_in_float32",
        ),
        "optimizer_kwargs": (STEPPED, IN_LAYOUTS, SMALL_STEPS),
        "muon_lr": OF_MUON,
        "muon_momentum": OF_MUON,
        "muon_nesterov": OF_MUON,
        "muon_ns_steps": OF_MUON,
        "muon_adjust_lr_fn": OF_MUON,
        "lr": (*RATES, *DECAY),
        "lr_min": RATES,
        "lr_start": RATES,
        "lr_warmup_ratio": RATES,
        "lr_warmup_steps": (*RATES, *OF_SCHEDULES),
        "lr_decay_style": (*RATES, *OF_SCHEDULES),
        "layerwise_lr_decay_bound": (
            f"{OPTIM}test_layers_learn_as_fast_as_their_depth_says",
            "optim/test_build.py::test_layers_learn_the_faster_the_nearer_to_the_end_they_are",
        ),
        "lr_decay_ratio": RATES,
        "weight_decay": DECAY,
        "no_decay_modules": DECAY,
        "no_decay_params": DECAY,
        "precision": (KEEPING,),
        "master_weights": (KEEPING,),
        "grad_accum_dtype": (KEEPING,),
        "stochastic_rounding": (
            SMALL_STEPS,
            "engine/step/test_optimizers.py::test_what_is_rounded_is_rounded_alike_in_every_layout",
        ),
        "optimizer_offload": (
            f"{OPTIM}test_an_optimizer_in_host_memory_steps_copies_to_the_same_bits",
            f"{OPTIM}test_what_this_machine_cannot_step_is_refused",
        ),
        "fuse_optimizer_step": (
            f"{OPTIM}test_a_fused_step_uses_one_gradient_at_a_time_and_learns_the_same",
            f"{OPTIM}test_what_this_machine_cannot_step_is_refused",
        ),
        "loss_scale_init": (f"{OPTIM}test_a_step_that_overflows_is_left_out_and_the_scale_halved",),
    },
    "train.lr_schedule_kwargs": dict.fromkeys(MORE_OF_SCHEDULES, (*RATES, *OF_SCHEDULES)),
}
"""Parts of the tables of training."""
