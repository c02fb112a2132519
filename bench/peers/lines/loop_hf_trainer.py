import torch
from shared import MICROBATCHES, OUT, ROWS, STEPS, Points, near, point_layers, rate, whole
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = whole(point_layers())

    def forward(self, x, labels):
        output = self.inner(x)
        return {"loss": nn.functional.mse_loss(output, labels), "logits": output}


class Average(TrainerCallback):
    """It is saved beside the Trainer's own checkpoints, which do not know it."""

    def __init__(self, model):
        self.average = AveragedModel(model.inner, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def on_step_end(self, args, state, control, model=None, **more):
        self.average.update_parameters(getattr(model, "module", model).inner)

    def on_save(self, args, state, control, **more):
        if state.is_world_process_zero:
            torch.save(
                self.average.state_dict(), f"{args.output_dir}/checkpoint-{state.global_step}/average.pt"
            )

    def load(self, folder):
        self.average.load_state_dict(torch.load(f"{folder}/average.pt", weights_only=True))


class Told(TrainerCallback):
    def on_evaluate(self, args, state, control, metrics=None, **more):
        if state.is_world_process_zero:
            print(state.global_step, metrics["eval_loss"], metrics["eval_near"])


def collate(rows):
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.stack([y for _, y in rows])}


def scores(found):
    return {"near": float(near(torch.tensor(found.predictions), torch.tensor(found.label_ids)))}


if __name__ == "__main__":
    folder = OUT / "checkpoints"
    model = WithLoss()
    average = Average(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate(done + 1))
    trainer = Trainer(
        model,
        TrainingArguments(
            output_dir=str(folder),
            max_steps=STEPS,
            per_device_train_batch_size=ROWS,
            per_device_eval_batch_size=ROWS,
            gradient_accumulation_steps=MICROBATCHES,
            max_grad_norm=1.0,
            eval_strategy="steps",
            eval_steps=10,
            save_steps=10,
            metric_for_best_model="eval_loss",
            load_best_model_at_end=True,
            report_to="none",
            use_cpu=True,
        ),
        train_dataset=Points("train"),
        eval_dataset=Points("val"),
        data_collator=collate,
        compute_metrics=scores,
        optimizers=(optimizer, scheduler),
        callbacks=[average, Told(), EarlyStoppingCallback(3)],
    )
    last = get_last_checkpoint(str(folder)) if folder.exists() else None
    if last is not None:
        average.load(last)
    trainer.train(resume_from_checkpoint=last)
    if trainer.is_world_process_zero():
        print(len(average.average.module.state_dict()), "averaged tensors")
