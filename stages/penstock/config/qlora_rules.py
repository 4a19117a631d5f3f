"""Combinations of settings of quantised base weights that cannot be honoured."""

from penstock.config.data_rules import Faults
from penstock.config.faults import Fault
from penstock.config.quantising import GROUPS
from penstock.config.run import RunConfig, written

OF_QUANTISED = ("quant_format", "quant_group_size", "exclude_modules", "enable_aqn")
"""Settings that mean something only where base weights are quantised."""


def _base_is_quantised(run: RunConfig) -> Faults:
    lora = run.lora
    if not lora.enable_qlora:
        for name in OF_QUANTISED:
            if lora.asks_for(name):
                yield Fault(
                    ("lora", name),
                    "nothing is quantised with enable_qlora: false;"
                    f" write enable_qlora: true or leave {name} out",
                    ("lora.enable_qlora",),
                )
    if lora.asks_for("aqn_alpha") and not lora.enable_aqn:
        yield Fault(
            ("lora", "aqn_alpha"),
            "no noise is added with enable_aqn: false; write enable_aqn: true or leave aqn_alpha"
            " out",
            ("lora.enable_aqn",),
        )


def _groups_are_the_formats(run: RunConfig) -> Faults:
    lora = run.lora
    if not (lora.enable_qlora and written(run, "lora.quant_group_size")):
        return
    allowed = sorted(set(GROUPS[lora.quant_format]))
    if lora.quant_group_size not in allowed:
        has = f"groups of {', '.join(map(str, allowed))}" if allowed else "one scale for each row"
        yield Fault(
            ("lora", "quant_group_size"),
            f"{lora.quant_group_size} columns cannot share a scale in {lora.quant_format}, which"
            f" has {has}; leave quant_group_size out",
            ("lora.quant_format",),
        )


def _noise_leaves_norms(run: RunConfig) -> Faults:
    if run.lora.enable_aqn and run.lora.use_dora:
        yield Fault(
            ("lora", "enable_aqn"),
            "use_dora: true gives weights norms, which noise would change from step to step; leave"
            " one of the two out",
            ("lora.use_dora",),
        )


QLORA_RULES = (_base_is_quantised, _groups_are_the_formats, _noise_leaves_norms)
