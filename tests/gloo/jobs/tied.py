"""Models whose stages hold copies of one parameter."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from npu_pipe import MeanLoss, Pipeline, Schedule, Tied, World, build_schedule

VOCABULARY, WIDTH, TOKENS = 11, 6, 4


class Piece(nn.Module):
    """A stage: embedding in the first, a layer with a gain, the projection in the last."""

    def __init__(self, index: int, stages: int) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False) if index == stages - 1 else None
        generator = torch.Generator().manual_seed(index)
        with torch.no_grad():
            for parameter in self.double().parameters():
                size = parameter.shape
                parameter.copy_(torch.randn(size, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.embedding is None else self.embedding(x)
        x = x + torch.tanh(self.linear(x)) * self.gain
        return x if self.head is None else self.head(x)


def ties(stages: int) -> tuple[Tied, Tied]:
    """The embedding with the head, and the gains of some stages, first one not the first."""
    gains = [(0, "gain"), (stages - 1, "gain"), *([(1, "gain")] if stages > 2 else [])]
    return Tied((stages - 1, "head.weight"), (0, "embedding.weight")), Tied(*gains)


def share(modules: Mapping[int, nn.Module], tied: Iterable[Tied]) -> None:
    """Make the copies that are here one Parameter."""
    for each in tied:
        here = [(stage, name) for stage, name in each.copies if stage in modules]
        for stage, name in here[1:]:
            path, _, last = name.rpartition(".")
            first = modules[here[0][0]].get_parameter(here[0][1])
            setattr(modules[stage].get_submodule(path), last, first)


def loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batch(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, targets = torch.randint(VOCABULARY, (2, rows, TOKENS), generator=generator)
    return ids, targets


def digest(parameters: Iterable[Tensor]) -> list[str]:
    return [hashlib.sha256(p.detach().numpy().tobytes()).hexdigest()[:16] for p in parameters]


def close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    assert ours is not None
    assert theirs is not None
    return float((ours - theirs).abs().max()) <= 1e-12 * float(theirs.abs().max())


def build(
    world: World, name: str, chunks: int | None, microbatches: int
) -> tuple[Schedule, dict[int, nn.Module]]:
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches, chunks=chunks)
    return schedule, {i: Piece(i, schedule.stages) for i in schedule.stages_of(world.rank)}


def trains_as_unsplit(
    world: World, *, name: str, chunks: int | None, microbatches: int, shared: bool
) -> list[list[str]]:
    """Three updates: of one step, of two windows, of two steps. The hashes of all copies."""
    schedule, mine = build(world, name, chunks, microbatches)
    stages = schedule.stages
    tied = ties(stages)
    whole = nn.Sequential(*(Piece(i, stages) for i in range(stages)))
    share(dict(enumerate(whole)), tied)
    if shared:
        share(mine, tied)
    copies = [mine[s].get_parameter(n) for each in tied for s, n in each.copies if s in mine]
    hashes = []
    rows = 2 * microbatches
    with Pipeline(
        mine, schedule=schedule, loss=MeanLoss(loss), world=world, tied=tied, timeout_s=20
    ) as pipe:
        for module in mine.values():
            assert digest(module.parameters())  # what is here may be hashed
        own = nn.ModuleList(mine.values())
        optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (own, whole)]
        for update, steps in enumerate(((1,), (2,), (1, 1))):
            for optimizer in optimizers:
                optimizer.zero_grad()
            for step, windows in enumerate(steps):
                batches = [batch(rows, 100 * update + 10 * step + w) for w in range(windows)]
                pipe.step(*batches)
                ids, targets = (torch.cat(each) for each in zip(*batches, strict=True))
                loss(whole(ids), targets).backward()
            for index, module in mine.items():
                pairs = zip(module.parameters(), whole[index].parameters(), strict=True)
                assert all(close(ours.grad, theirs.grad) for ours, theirs in pairs), index
            norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.05)
            assert abs(pipe.clip_gradients(0.05) / float(norm) - 1) < 1e-12
            hashes.append(digest(p.grad for p in copies if p.grad is not None))
            for optimizer in optimizers:
                optimizer.step()
            hashes.append(digest(copies))
    return hashes


def expected_sums(world: World, *, name: str, microbatches: int) -> None:
    """The gradient of a copy is, bit for bit, the sum of those that it would have untied."""
    schedule, mine = build(world, name, None, microbatches)
    stages = schedule.stages
    (head, _) = ties(stages)
    untied = nn.Sequential(*(Piece(i, stages) for i in range(stages)))
    untied[-1].head.weight.data.copy_(untied[0].embedding.weight)
    for ids, targets in zip(*(each.split(1) for each in batch(microbatches, 5)), strict=True):
        (loss(untied(ids), targets) / microbatches).backward()
    wanted = untied[0].embedding.weight.grad + untied[-1].head.weight.grad
    with Pipeline(mine, schedule=schedule, loss=loss, world=world, tied=(head,)) as pipe:
        pipe.step(batch(microbatches, 5))
    for stage, parameter in head.copies:
        if stage in mine:
            assert torch.equal(mine[stage].get_parameter(parameter).grad, wanted)


def frozen(world: World, *, everywhere: bool) -> list[bool]:
    """Whether each copy here has a gradient after a step with one or all copies frozen."""
    schedule, mine = build(world, "1f1b", None, 2)
    (head, _) = ties(2)
    copies = [mine[s].get_parameter(n) for s, n in head.copies if s in mine]
    if everywhere:
        for each in copies:
            each.requires_grad_(False)
    with Pipeline(mine, schedule=schedule, loss=loss, world=world, tied=(head,)) as pipe:
        pipe.step(batch(4, 0))
        if not everywhere and world.rank == 1:
            copies[0].requires_grad_(False)
        pipe.step(batch(4, 0))
    return [each.grad is not None for each in copies]


class Spare(nn.Module):
    """A stage with a parameter that one of the stages uses, and one that none does."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.uses = uses
        self.some = nn.Parameter(torch.ones(3))
        self.none = nn.Parameter(torch.ones(3))
        self.own = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.own * (self.some if self.uses else 1)


def unused(world: World, *, name: str) -> list[list[float] | None]:
    """The gradients of a copy of each."""
    schedule = build_schedule(name, ranks=world.size, microbatches=4)
    mine = {i: Spare(uses=i == 0) for i in schedule.stages_of(world.rank)}
    tied = [Tied((0, each), (1, each)) for each in ("some", "none")]
    x = torch.ones(4, 3)
    with Pipeline(
        mine, schedule=schedule, loss=lambda y, _: y.mean(), world=world, tied=tied
    ) as pipe:
        pipe.step((x, x))
    module = mine[0] if 0 in mine else mine[1]
    found = (module.some.grad, module.none.grad)
    return [None if each is None else each.tolist() for each in found]


WRONG: dict[str, tuple[tuple[Any, ...], ...]] = {
    "no such stage": ((0, "gain"), (7, "gain")),
    "no such parameter": ((0, "gain"), (1, "gains")),
    "other shape": ((0, "gain"), (1, "linear.weight")),
}


def refused(world: World, *, what: str) -> None:
    """Pipelines with ties that cannot be: refused when they are made."""
    schedule, mine = build(world, "1f1b", None, 2)
    tied = [Tied(*WRONG[what])] if what in WRONG else [Tied((0, "gain"), (1, "gain"))]
    if what == "only here" and world.rank == 1:
        tied = []
    if what == "frozen here" and world.rank == 1:
        mine[1].gain.requires_grad_(False)
    if what == "other dtype" and world.rank == 1:
        mine[1].float()
    if what == "twice":
        tied.append(Tied((0, "linear.bias"), (1, "gain")))
    if what == "one object in two" and world.rank == 0:
        mine[0].linear.bias = mine[0].gain
    if what == "one object in two":
        tied.append(Tied((0, "linear.bias"), (1, "linear.bias")))
    Pipeline(mine, schedule=schedule, loss=loss, world=world, tied=tied).close()


def replicas_differ(world: World) -> None:
    """One replica shares its embedding with its head, the other has two of them."""
    schedule, mine = build(world, "dualpipe", None, 4)
    tied = ties(schedule.stages)
    if world.rank == 0:
        share(mine, tied)
    Pipeline(mine, schedule=schedule, loss=loss, world=world, tied=tied).close()
