import os

import torch
import torch.distributed as dist
from shared import MICROBATCHES, OUT, ROWS, STEPS, Lines, tiny_llama
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if rank == 0:
    tiny_llama()
dist.barrier()
model = DistributedDataParallel(AutoModelForCausalLM.from_pretrained(tiny_llama()))
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
data = Lines()
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, batch_size=ROWS, sampler=sampler, drop_last=True)
steps_in_epoch = len(loader) // MICROBATCHES
newest, done = OUT / "newest.pt", 0
if newest.exists():
    state = torch.load(newest, weights_only=True)
    model.module.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    done = state["step"]


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


source = batches(done)
for step in range(done + 1, STEPS + 1):
    optimizer.zero_grad()
    micros = next(source)
    tokens = torch.tensor(float(sum(int((m["labels"][:, 1:] != -100).sum()) for m in micros)))
    dist.all_reduce(tokens)
    for number, batch in enumerate(micros):
        model.require_backward_grad_sync = number == len(micros) - 1
        count = int((batch["labels"][:, 1:] != -100).sum())
        loss = model(**batch, use_cache=False).loss * count * world / tokens  # DDP divides by world
        loss.backward()
    optimizer.step()
    if rank == 0 and (step % 10 == 0 or step == STEPS):
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        torch.save(state, OUT / "new.pt")
        os.replace(OUT / "new.pt", newest)
if rank == 0:
    model.module.save_pretrained(OUT / "tuned")
dist.destroy_process_group()
