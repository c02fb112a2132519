import os

import torch
import torch.distributed as dist
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
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = DistributedDataParallel(whole(char_layers()))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = Chars("train")
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=ROWS, sampler=sampler, drop_last=True)
steps_in_epoch = len(loader) // MICROBATCHES
newest = OUT / "newest.pt"
done, log = 0, []
if newest.exists():
    state = torch.load(newest, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done, log = state["step"], state["log"]


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
    total = torch.zeros(2)
    val = Chars("val")
    with torch.no_grad():
        for x, y in DataLoader(val, batch_size=ROWS, sampler=DistributedSampler(val, shuffle=False)):
            total += torch.tensor([char_loss(model.module(x), y) * len(x), len(x)])
    dist.all_reduce(total)
    model.train()
    return float(total[0] / total[1])


source = batches(done)
for step in range(done + 1, STEPS + 1):
    optimizer.zero_grad()
    mean = torch.zeros(())
    micros = next(source)
    for number, (x, y) in enumerate(micros):
        model.require_backward_grad_sync = number == len(micros) - 1
        loss = char_loss(model(x), y) / len(micros)
        loss.backward()
        mean += loss.detach()
    optimizer.step()
    dist.all_reduce(mean)
    log.append([step, float(mean) / world])
    if rank == 0 and (step % 10 == 0 or step == STEPS):
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**state, "step": step, "log": log}, OUT / "new.pt")
        os.replace(OUT / "new.pt", newest)
score = validate()
if rank == 0:
    write_csv("log.csv", log)
    print("validation", score)
    print(sample(model.module.eval()))
dist.destroy_process_group()
