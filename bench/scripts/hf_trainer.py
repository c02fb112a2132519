"""transformers' Trainer on a small GPT-2, with its own checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint
from trial import SAVE_EVERY, STEPS, Trial


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 200_000

    def __getitem__(self, index: int) -> dict[str, Any]:
        row = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": row, "labels": row}


class Watch(TrainerCallback):
    def __init__(self, trial: Trial) -> None:
        self._trial = trial

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._trial.step(state.global_step)
        return control


def main() -> None:
    trial = Trial()
    folder = trial.folder / "hf"
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=STEPS,
        per_device_train_batch_size=2,
        save_steps=SAVE_EVERY,
        save_total_limit=3,
        use_cpu=True,
        ddp_backend="gloo",
        report_to="none",
        disable_tqdm=True,
        logging_steps=1_000_000,
        ignore_data_skip=True,
    )
    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[Watch(trial)])
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.is_dir() else None)


if __name__ == "__main__":
    main()
