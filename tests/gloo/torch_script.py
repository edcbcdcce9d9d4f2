"""A script for torch.distributed.pipelining, as a guide to pipeline parallelism shows it.

    torchrun --nproc-per-node 2 torch_script.py FOLDER

Test code: what it has trained goes to FOLDER, a file a rank.
"""

import sys

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
world = torch.distributed.get_world_size()
assert world == 2
device = torch.device("cpu")


def build_stage_module(rank: int) -> nn.Module:
    torch.manual_seed(rank)
    if rank == 0:
        return nn.Sequential(nn.Embedding(17, 8), nn.Linear(8, 8), nn.Tanh())
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 17))


stage_module = build_stage_module(rank).to(device)
stage = PipelineStage(
    stage_module,
    stage_index=rank,
    num_stages=world,
    device=device,
)


def loss_fn(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="mean")


schedule = Schedule1F1B(
    stage,
    n_microbatches=4,
    loss_fn=loss_fn,
    scale_grads=True,
)

optimizer = torch.optim.AdamW(stage_module.parameters(), lr=3e-4)
losses: list[torch.Tensor] = []
logits = None
for step in range(3):
    generator = torch.Generator().manual_seed(step)
    input_ids = torch.randint(17, (8, 5), generator=generator)
    labels = torch.randint(17, (8, 5), generator=generator)
    optimizer.zero_grad(set_to_none=True)
    if rank == 0:
        schedule.step(input_ids.to(device))
    else:
        losses = []
        logits = schedule.step(target=labels.to(device), losses=losses)
    optimizer.step()

torch.save(
    {
        "parameters": {name: p.detach() for name, p in stage_module.named_parameters()},
        "losses": [loss.detach() for loss in losses],
        "logits": None if logits is None else logits.detach(),
    },
    f"{sys.argv[1]}/rank{rank}.pt",
)
torch.distributed.destroy_process_group()
