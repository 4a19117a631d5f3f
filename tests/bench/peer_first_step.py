"""transformers' Trainer on chats, to its first step and on from a checkpoint: `python -m
tests.bench.peer_first_step DATA FOLDER SAVE_STEPS`. It writes FOLDER/steps after each step."""

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback
from transformers.trainer_callback import TrainerControl, TrainerState
from transformers.training_args import TrainingArguments

from penstock.models.builtin import CONFIGS

LENGTH = 512


class MarkSteps(TrainerCallback):
    """Writes the number of the step."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **more: Any
    ) -> None:
        """After its update."""
        del args, control, more
        self.file.write_text(str(state.global_step))


def main() -> None:
    data, folder, save_steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    config: dict[str, Any] = dict(CONFIGS["tiny-qwen3"])
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(config.pop("model_type"), **config)
    )

    def encode(batch: dict[str, list[Any]]) -> dict[str, Any]:
        texts = ["".join(turn["content"] for turn in chat) for chat in batch["messages"]]
        ids = [list(text.encode())[:LENGTH] for text in texts]
        padded = [each + [0] * (32 - len(each)) for each in ids]
        return {"input_ids": padded, "labels": padded}

    loaded = load_dataset("json", data_files=data, cache_dir=str(folder / "data"), split="train")
    rows = loaded.map(encode, batched=True, remove_columns=loaded.column_names)
    args = TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=64,
        num_train_epochs=50,
        save_steps=save_steps,
        report_to="none",
        disable_tqdm=True,
    )
    callbacks: list[TrainerCallback] = [MarkSteps(folder / "steps")]
    trainer = Trainer(model=model, args=args, train_dataset=rows, callbacks=callbacks)
    has_checkpoint = any(folder.glob("checkpoint-*/trainer_state.json"))
    trainer.train(resume_from_checkpoint=has_checkpoint or None)


if __name__ == "__main__":
    main()
