"""DPO with the frozen reference model beside the trained one, on workers that heal.

    everstep run examples/dpo.py                       plain python runs it, too
    everstep run --kill stage=1,replica=0,step=7,op=F1 examples/dpo.py

Every layer is a pair: the policy's block, which is trained, and the reference's, which is not. Both run on
the same worker, one after the other, so the reference needs no machines of its own, and the hidden states of
both travel from stage to stage together. A worker that takes over builds the same reference from the seed.
"""

import argparse

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import everstep

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--beta", type=float, default=0.1)
options = parser.parse_args()

VOCAB, WIDTH, LENGTH, PAIRS = 32, 32, 12, 8


class Twice(nn.Module):
    """A layer of the policy, and the same layer of the reference as it was in the beginning."""

    def __init__(self, policy: nn.Module, reference: nn.Module) -> None:
        super().__init__()
        reference.load_state_dict(policy.state_dict())  # a real run loads both from the base model's folder
        self.policy, self.reference = policy, reference.requires_grad_(False).eval()

    def forward(self, value: Tensor | tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        policy, reference = value if isinstance(value, tuple) else (value, value)
        return self.policy(policy), self.reference(reference)


class Mixer(nn.Module):
    """A causal block, as small as can be: each token sees the mean of those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(2 * WIDTH, 64), nn.Linear(64, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        seen = self.norm(x)
        before = seen.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).unsqueeze(-1)
        return x + self.down(F.gelu(self.up(torch.cat((seen, before), -1))))


layers = {
    "embed": lambda: Twice(nn.Embedding(VOCAB, WIDTH), nn.Embedding(VOCAB, WIDTH)),
    **{f"blocks.{i}": lambda: Twice(Mixer(), Mixer()) for i in range(3)},
    "head": lambda: Twice(nn.Linear(WIDTH, VOCAB), nn.Linear(WIDTH, VOCAB)),
}


def batch(step: int, microbatch: int) -> tuple[Tensor, Tensor]:
    """Rows 0, 2, ... are preferred to rows 1, 3, ...: their second half counts upwards, the others' is noise.
    Of the targets the first half, the prompt, does not count.
    """
    draw = torch.Generator().manual_seed(1000 * step + microbatch)
    prompts = torch.randint(VOCAB, (PAIRS, LENGTH // 2), generator=draw)
    good = (prompts[:, -1:] + torch.arange(1, LENGTH // 2 + 1)) % VOCAB
    bad = torch.randint(VOCAB, good.shape, generator=draw)
    rows = torch.stack((torch.cat((prompts, good), 1), torch.cat((prompts, bad), 1)), 1).flatten(0, 1)
    targets = rows.clone()
    targets[:, : LENGTH // 2] = -100
    return rows, targets


def log_probability(logits: Tensor, targets: Tensor) -> Tensor:
    """Of every row, over its tokens that count."""
    picked = -F.cross_entropy(logits[:, :-1].transpose(1, 2), targets[:, 1:], reduction="none")
    return picked.sum(-1)  # 0 where a target is -100


def gains(output: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    """By how much the policy prefers each row more than the reference does; the preferred ones' lead."""
    policy, reference = (log_probability(logits, targets) for logits in output)
    gain = policy - reference
    return gain[0::2] - gain[1::2]


def dpo(output: tuple[Tensor, Tensor], targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over pairs, and how many they are: every pair of a step counts alike."""
    losses = -F.logsigmoid(options.beta * gains(output, targets))
    return losses.sum(), torch.tensor(float(len(losses)), device=losses.device)


result = everstep.train(
    model=everstep.Model(layers=layers, loss=dpo),
    data=batch,
    lr=3e-3,
    replicas=2,
    stages=2,
    microbatches=4,
    steps=options.steps,
)
print(
    f"loss {result.losses[1]:.6f} -> {result.losses[options.steps]:.6f}; "
    f"{len(result.incidents)} incidents healed"
)
