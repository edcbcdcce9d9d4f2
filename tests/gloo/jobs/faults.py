"""Jobs in which something is wrong on one rank. What each rank raises is the answer."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from jobs.models import data, stage
from npu_pipe import (
    MeanLoss,
    NpuPipeError,
    PeerError,
    Pipeline,
    SumLoss,
    TokenLoss,
    World,
    build_schedule,
)

LOSS = MeanLoss(nn.functional.mse_loss)


class Faulty(nn.Module):
    """Raises in its n-th forward."""

    def __init__(self, calls: int) -> None:
        super().__init__()
        self.inner = stage(0)
        self.calls = calls

    def forward(self, x: Tensor) -> Tensor:
        self.calls -= 1
        if self.calls == 0:
            raise ValueError("the third forward is broken")
        return self.inner(x)


def ranks_differ(world: World, *, fact: str, odd: int) -> str:
    """Rank `odd` was built with another schedule, m, placement or loss."""
    is_odd = world.rank == odd
    name = "gpipe" if fact == "schedule" and is_odd else "1f1b"
    microbatches = 6 if fact == "number of microbatches" and is_odd else 4
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    loss: Any = SumLoss(LOSS.function) if fact == "loss" and is_odd else LOSS
    prefetch = 3 if fact == "prefetch" and is_odd else 2
    index = world.rank
    with Pipeline(
        {index: stage(index)}, schedule=schedule, loss=loss, world=world, prefetch=prefetch
    ):
        return "connected"


def wrong_stages(world: World) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    index = 0 if world.rank == 1 else world.rank
    with Pipeline({index: stage(index)}, schedule=schedule, loss=LOSS, world=world):
        return "connected"


def bad_batch(world: World, *, kind: str) -> list[str]:
    """A batch that is wrong on one rank only; then a good one, with the same pipeline."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    inputs, targets = data(8)
    batches: dict[str, Any] = {
        "fewer rows than microbatches": (inputs[:3], targets),
        "fewer targets than microbatches": (inputs, targets[:3]),
        "targets of other rows": (inputs, targets[:6]),
        "targets of half the rows": (inputs, targets[:4]),
        "twice as many targets": (inputs, torch.cat([targets, targets])),
        "no tensor": (None, targets),
        "tensors of different rows": ((inputs, inputs[:4]), targets),
        "not a pair": inputs,
        "zero rows": (inputs[:0], targets),
        "a sparse tensor": (inputs.to_sparse(), targets),
    }
    said = []
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world) as p:
        for batch in (batches[kind], (inputs, targets)):
            try:
                said.append(f"loss {p.step(batch).loss:.6f}")
            except NpuPipeError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said


def no_valid_token(world: World) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    loss = TokenLoss(lambda output, target: output.sum(), lambda target: 0)
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=loss, world=world) as p:
        return str(p.step(data(8)))


def calls_differ(world: World, *, odd: int) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world) as p:
        return str(p.evaluate(data(8)) if world.rank == odd else p.step(data(8)))


def stage_raises(world: World, *, rank: int, calls: int) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    module = Faulty(calls) if world.rank == rank else stage(world.rank)
    with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
        return str(pipe.step(data(16)))


def loss_is_no_scalar(world: World) -> str:
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    loss = MeanLoss(lambda output, target: output - target)
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=loss, world=world) as p:
        return str(p.step(data(8)))


class Counting:
    """The count of a TokenLoss; raises when it is called for the first time."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, target: Tensor) -> int:
        self.calls += 1
        if self.calls == 1:
            raise TypeError("the first count is broken")
        return target.numel()


def count_raises_once(world: World) -> list[Any]:
    """The last rank fails before a step, once; every rank goes on with the next batch."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    loss = TokenLoss(lambda output, target: (output - target).square().sum(), Counting())
    said: list[Any] = []
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=loss, world=world) as p:
        for seed in range(3):
            try:
                said.append(p.step(data(8, seed=seed)).loss)
            except (NpuPipeError, TypeError) as error:
                said.append(str(error))
    return said


class WordlessError(RuntimeError):
    def __str__(self) -> str:
        raise TypeError("no words for it")


def wordless(world: World, *, where: str) -> list[str]:
    """Rank 1 raises an error whose text cannot be made, in a stage or when its batch is made; then
    all go on. What it was, and what came after."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    module = stage(world.rank)
    forward = module.forward

    def broken(*_: Any) -> Any:
        raise WordlessError

    def batch() -> tuple[Tensor, Tensor]:
        return broken() if where == "batch" and world.rank == 1 else data(8)

    if where == "stage" and world.rank == 1:
        module.forward = broken
    with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
        try:
            pipe.step(batch)
        except (PeerError, WordlessError) as error:
            found = type(error).__name__ if isinstance(error, WordlessError) else str(error)
        module.forward = forward
        if not pipe.is_open:
            pipe.reset()
        return [found, str(pipe.step(data(8)).loss)]


def interrupted_at_its_batch(world: World) -> list[Any]:
    """As `count_raises_once`, by Ctrl-C."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    batches = [data(8, seed=seed) for seed in range(3)]

    def first() -> tuple[Tensor, Tensor]:
        if world.rank == 1:
            raise KeyboardInterrupt
        return batches[0]

    found: list[Any] = []
    with Pipeline({world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world) as p:
        try:
            p.step(first)
        except (PeerError, KeyboardInterrupt) as error:
            found.append(f"{type(error).__name__}: {error}")
        return found + [p.step(batch).loss for batch in batches[1:]]


def call_raises(world: World, *, call: str, rank: int, stays: bool) -> str:
    """One rank raises in a call, or between two; it leaves the pipeline, or stays in it."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    module = stage(world.rank)
    odd = world.rank == rank

    def broken(*_: Any) -> Any:
        raise ValueError("broken")

    def once(pipe: Pipeline) -> None:
        pipe.step(data(8))
        if odd:
            module.forward = broken
        if call == "evaluate":
            pipe.evaluate(data(8))
        if call == "predict":
            pipe.predict(data(8)[0])
        if call == "gather":
            pipe.gather(module if odd else 1)
        if call == "clip_gradients":
            if odd:
                module.parameters = broken
            pipe.clip_gradients(1.0)
        if call == "nothing" and odd:
            broken()
        pipe.step(data(8))

    start = time.monotonic()
    with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
        try:
            once(pipe)
        except (NpuPipeError, ValueError, TypeError) as error:
            if not stays:
                raise
            assert time.monotonic() - start < 2.5
            if odd:
                time.sleep(3)
            return f"{type(error).__name__}: {error}"
    raise AssertionError("nobody has failed")


def works_after_a_failure(world: World) -> float:
    """A failed pipeline is closed; a new one works in the same processes."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    faulty = Faulty(3) if world.rank == world.size - 1 else stage(world.rank)
    try:
        with Pipeline({world.rank: faulty}, schedule=schedule, loss=LOSS, world=world) as pipe:
            pipe.step(data(16))
    except (NpuPipeError, ValueError):
        with Pipeline(
            {world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world
        ) as pipe:
            return pipe.step(data(16)).loss
    raise AssertionError("the first pipeline did not fail")


def killed(world: World, *, rank: int) -> str:
    """One rank is killed in the middle of a step."""

    class Killed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            os.kill(os.getpid(), signal.SIGKILL)
            return x

    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    module = Killed() if world.rank == rank else stage(world.rank)
    start = time.monotonic()
    try:
        with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
            pipe.step(data(16))
    except NpuPipeError as error:
        assert time.monotonic() - start < 10
        return type(error).__name__
    raise AssertionError("nobody noticed")


def killed_with_a_worker(world: World) -> tuple[float, str]:
    """Rank 1 is killed, and leaves a forked process behind. When rank 0 knows, and what."""

    class Killed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            os.kill(os.getpid(), signal.SIGKILL)
            return x

    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    module = Killed() if world.rank == 1 else stage(world.rank)
    with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
        worker = os.fork() if world.rank == 1 else None
        if worker == 0:
            time.sleep(30)
            os._exit(0)
        worker = pipe.gather(worker)[1]
        start = time.monotonic()
        try:
            pipe.step(data(16))
        except PeerError as error:
            return time.monotonic() - start, str(error)
        finally:
            os.kill(worker, signal.SIGKILL)
    raise AssertionError("nobody noticed")


def gradients_are_off(world: World, *, rank: int) -> list[str]:
    """One rank, or each (-1), calls step where gradients are disabled; then all as they should."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    said = []
    with Pipeline(
        {world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world
    ) as pipe:
        for off in (torch.no_grad, torch.inference_mode):
            with off() if rank in (-1, world.rank) else nullcontext():
                try:
                    pipe.step(data(8))
                except NpuPipeError as error:
                    said.append(f"{type(error).__name__}: {error}")
        pipe.step(data(8))
    return said


def never_comes(world: World, *, rank: int) -> str:
    """One rank does not call step; the others wait for the time-out that they were given."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    with Pipeline(
        {world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world, timeout_s=2
    ) as pipe:
        if world.rank == rank:
            time.sleep(4)
            return "was away"
        return str(pipe.step(data(16)))


def waited_for(world: World, *, rank: int) -> float:
    """One rank does not call step for longer than the time-out; but in a block with patience."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=8)
    with Pipeline(
        {world.rank: stage(world.rank)}, schedule=schedule, loss=LOSS, world=world, timeout_s=1
    ) as pipe:
        with pipe.patience(30):
            if world.rank == rank:
                time.sleep(3)
            pipe.gather(None)
        return pipe.step(data(16)).loss


def calls_in_calls(world: World) -> str:
    """A stage that evaluates the pipeline that runs it."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    module = stage(world.rank)
    if world.rank == world.size - 1:
        module.register_forward_hook(lambda *_: str(pipe.evaluate(data(8))))
    with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
        return str(pipe.step(data(8)))


def calls_from_two_threads(world: World) -> list[str]:
    """One calls while the other one's step is in its first stage, or waits for it."""
    schedule = build_schedule("1f1b", ranks=world.size, microbatches=4)
    module = stage(world.rank)
    said = []
    with Pipeline({world.rank: module}, schedule=schedule, loss=LOSS, world=world) as pipe:
        inside, told = threading.Event(), threading.Event()

        def wait(*_: Any) -> None:
            inside.set()
            told.wait(30)

        def step() -> None:
            said.append(f"loss {pipe.step(data(8)).loss:.6f}")

        module.register_forward_hook(wait)
        other = threading.Thread(target=step)
        other.start()
        inside.wait(30)
        try:
            pipe.evaluate(data(8))
        except RuntimeError as error:
            said.append(str(error))
        told.set()
        other.join()
    return said


def threads(world: World) -> int:
    del world
    return torch.get_num_threads()
