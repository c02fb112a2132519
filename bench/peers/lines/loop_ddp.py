import os

import torch
import torch.distributed as dist
from shared import MICROBATCHES, OUT, ROWS, STEPS, Points, near, point_layers, rate, whole
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = DistributedDataParallel(whole(point_layers()))
average = AveragedModel(model.module, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda done: rate(done + 1))
data = Points("train")
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=ROWS, sampler=sampler, drop_last=True)
steps_in_epoch = len(loader) // MICROBATCHES
newest = OUT / "newest.pt"
done, best, since = 0, float("inf"), 0
parts = {"model": model.module, "average": average, "optimizer": optimizer, "scheduler": scheduler}
if newest.exists():
    state = torch.load(newest, weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    done, best, since = state["progress"]


def batches(done):
    epoch, skip = divmod(done, steps_in_epoch)
    while True:
        sampler.set_epoch(epoch)
        found = iter(loader)
        for number in range(steps_in_epoch):
            batch = [next(found) for _ in range(MICROBATCHES)]
            if number >= skip:
                yield batch
        epoch, skip = epoch + 1, 0


def validate():
    model.eval()
    total, val = torch.zeros(3), Points("val")
    with torch.no_grad():
        for x, y in DataLoader(val, batch_size=ROWS, sampler=DistributedSampler(val, shuffle=False)):
            output = model.module(x)
            total += torch.tensor([mse_loss(output, y) * len(x), near(output, y) * len(x), len(x)])
    dist.all_reduce(total)
    model.train()
    return float(total[0] / total[2]), float(total[1] / total[2])


source = batches(done)
for step in range(done + 1, STEPS + 1):
    optimizer.zero_grad()
    micros = next(source)
    for number, (x, y) in enumerate(micros):
        model.require_backward_grad_sync = number == len(micros) - 1
        (mse_loss(model(x), y) / len(micros)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    average.update_parameters(model.module)
    if step % 10 == 0 or step == STEPS:
        loss, share = validate()
        best, since = (loss, 0) if loss < best else (best, since + 1)
        if rank == 0:
            print(step, loss, share)
            state = {name: part.state_dict() for name, part in parts.items()}
            torch.save({**state, "progress": (step, best, since)}, OUT / "new.pt")
            os.replace(OUT / "new.pt", newest)
    if since >= 3:
        break
if rank == 0:
    print(len(average.module.state_dict()), "averaged tensors")
dist.destroy_process_group()
