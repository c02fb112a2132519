from shared import MICROBATCHES, OUT, ROWS, STEPS, Lines, tiny_llama
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

if __name__ == "__main__":
    folder = OUT / "checkpoints"
    trainer = Trainer(
        AutoModelForCausalLM.from_pretrained(tiny_llama()),
        TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            gradient_accumulation_steps=MICROBATCHES,
            learning_rate=3e-3,
            lr_scheduler_type="constant",
            average_tokens_across_devices=True,
            save_steps=10,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=Lines(),
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint(str(folder)) if folder.exists() else None)
    trainer.save_model(str(OUT / "tuned"))
