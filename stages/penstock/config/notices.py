"""What is worth a line before a run begins: settings that only part of the model can honour."""

from collections.abc import Iterator

from penstock.config.run import RunConfig


def notices_of(run: RunConfig) -> Iterator[str]:
    """A line for each of them, in which the setting stands first."""
    if run.train.optimizer == "muon" and run.lora.enable_lora:
        yield (
            "train.optimizer: muon steps whole weight matrices, and with enable_lora: true none are"
            " trained: AdamW steps the adapters, at train.lr, and muon_lr is not used"
        )
