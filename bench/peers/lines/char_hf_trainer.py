from shared import (
    MICROBATCHES,
    OUT,
    ROWS,
    STEPS,
    Chars,
    char_layers,
    char_loss,
    sample,
    whole,
    write_csv,
)
from torch import nn
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = whole(char_layers())

    def forward(self, input_ids, labels):
        output = self.inner(input_ids)
        return {"loss": char_loss(output, labels), "logits": output}


def collate(rows):
    from torch import stack

    return {"input_ids": stack([x for x, _ in rows]), "labels": stack([y for _, y in rows])}


if __name__ == "__main__":
    folder = OUT / "checkpoints"
    trainer = Trainer(
        WithLoss(),
        TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS,
            gradient_accumulation_steps=MICROBATCHES,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            save_steps=10,
            logging_steps=1,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=Chars("train"),
        eval_dataset=Chars("val"),
        data_collator=collate,
    )
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    trainer.train(resume_from_checkpoint=last)
    scores = trainer.evaluate()
    if trainer.is_world_process_zero():
        write_csv(
            "log.csv", [[row["step"], row["loss"]] for row in trainer.state.log_history if "loss" in row]
        )
        print("validation", scores["eval_loss"])
        print(sample(trainer.model.inner.eval()))
