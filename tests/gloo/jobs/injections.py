"""A fault at a given action of the second step of a schedule, and what the other ranks say."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from torch import nn

from jobs.models import data, stage
from npu_pipe import MeanLoss, NpuPipeError, Pipeline, Schedule, World, build_schedule
from npu_pipe.comm.links import OpenLink, fastest_link, gloo_link
from npu_pipe.ir.action import Action, Kind, flatten

FAULTS = ("raise", "kill", "stall", "stop")
SCHEDULES = (
    "1f1b",
    "gpipe",
    "interleaved-1f1b",
    "looped-bfs",
    "zb-h1",
    "interleaved-zb",
    "zb-v",
    "v-half",
    "dualpipe",
    "dualpipe-v",
    "chimera",
)
LINKS: Mapping[str, OpenLink] = {"fastest": fastest_link, "gloo": gloo_link}
RUNS: Mapping[Kind, str] = {
    Kind.F: "forward",
    Kind.B: "backward",
    Kind.I: "input_backward",
    Kind.W: "weight_backward",
}


class Injection(NamedTuple):
    schedule: str
    ranks: int
    rank: int
    action: str
    fault: str
    link: str


def injection(seed: int, *, ranks: int | None = None) -> Injection:
    """A random one; faults and schedules take turns."""
    rng = Random(seed)
    ranks = ranks or rng.choice((2, 3, 4))
    names = [n for n in SCHEDULES if ranks % 2 == 0 or n not in ("dualpipe", "chimera")]
    name = names[seed // len(FAULTS) % len(names)]
    schedule = build_schedule(name, ranks=ranks, microbatches=2 * ranks)
    rank = rng.randrange(ranks)
    actions = [action for step in schedule.orders[rank] for action in flatten(step)]
    action, link = str(rng.choice(actions)), rng.choice(tuple(LINKS))
    return Injection(name, ranks, rank, action, FAULTS[seed % len(FAULTS)], link)


def inject(
    world: World,
    *,
    schedule: str,
    rank: int,
    action: str,
    fault: str,
    link: str,
    limit_s: float,
    note: str,
) -> dict[str, Any]:
    """What this rank raised in the second step, how long after the fault, and what it printed.

    limit_s: the time-out of the pipeline. note: a file in which the rank at fault writes when.
    """
    built = build_schedule(schedule, ranks=world.size, microbatches=2 * world.size)
    with redirect_stderr(io.StringIO()) as printed:
        try:
            with pipeline(world, built, limit_s, link=LINKS[link]) as pipe:
                pipe.step(data(4 * world.size))
                if world.rank == rank:
                    arm(pipe, action, lambda: strike(fault, limit_s, Path(note)))
                pipe.step(data(4 * world.size))
        except (NpuPipeError, ValueError) as error:
            return {
                "error": type(error).__name__,
                "text": str(error),
                "seconds": time.monotonic() - float(Path(note).read_text()),
                "printed": printed.getvalue(),
            }
    raise AssertionError("nobody has failed")


def mistakes(case: Injection, said: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong with what the other ranks said."""
    found = []
    for each in said:
        text = each["text"]
        if each["error"] != "PeerError":
            found.append(f"it was {each['error']}")
        if f"; rank {case.rank} " not in text:
            found.append(f"the rank is not named: {text}")
        if f" in {case.action} of step 2 (stage " not in text:
            found.append(f"the action is not named: {text}")
        if ("ValueError: the injected fault" in text) != (case.fault == "raise"):
            found.append(f"the message is not told: {text}")
    if len({each["text"] for each in said}) > 1:
        found.append("they do not agree")
    tables = [each["printed"] for each in said if each["printed"]]
    if len(tables) != (case.fault in ("stall", "stop")):
        found.append(f"{len(tables)} tables were printed")
    if tables and not all(f"\n{rank} " in tables[0] for rank in range(case.ranks)):
        found.append(f"the table lacks a rank: {tables[0]}")
    return found


def pipeline(
    world: World, schedule: Schedule, timeout_s: float, *, link: OpenLink = fastest_link
) -> Pipeline:
    return Pipeline(
        {index: stage(index) for index in schedule.stages_of(world.rank)},
        schedule=schedule,
        loss=MeanLoss(nn.functional.mse_loss),
        world=world,
        timeout_s=timeout_s,
        link=link,
    )


def arm(pipe: Pipeline, action: str, blow: Callable[[], None]) -> None:
    """Have this happen, once, when the action begins."""
    (found,) = (
        each
        for step in pipe.schedule.orders[pipe.world.rank]
        for each in flatten(step)
        if str(each) == action
    )
    assert isinstance(found, Action)
    part = pipe._stages[found.stage]
    run = getattr(part, RUNS[found.kind])

    def armed(microbatch: int, *arguments: Any, **keywords: Any) -> Any:
        if microbatch == found.microbatch:
            setattr(part, RUNS[found.kind], run)
            blow()
        return run(microbatch, *arguments, **keywords)

    setattr(part, RUNS[found.kind], armed)


def strike(fault: str, timeout_s: float, note: Path) -> None:
    note.write_text(str(time.monotonic()))
    if fault == "raise":
        raise ValueError("the injected fault")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "stall":
        time.sleep(timeout_s + 3)


def reset_after(
    world: World, *, schedule: str, rank: int, action: str, fault: str, limit_s: float, note: str
) -> dict[str, Any]:
    """Every rank catches what it raised, resets, and goes on: its losses, and what it said."""
    built = build_schedule(schedule, ranks=world.size, microbatches=2 * world.size)
    batch = data(4 * world.size)
    said = []
    with pipeline(world, built, limit_s) as pipe:
        losses = [pipe.step(batch).loss]
        for _ in range(2):
            if world.rank == rank:
                arm(pipe, action, lambda: strike(fault, limit_s, Path(note)))
            try:
                pipe.step(batch)
            except (NpuPipeError, ValueError) as error:
                said.append(f"{type(error).__name__}: {error}")
            pipe.reset()
            losses += [pipe.step(batch).loss, pipe.evaluate(batch).loss]
    return {"losses": losses, "said": said}


def leaves_early(world: World, *, rank: int) -> str:
    """One rank runs fewer steps than the others."""
    built = build_schedule("1f1b", ranks=world.size, microbatches=4)
    try:
        with pipeline(world, built, 8) as pipe:
            for _ in range(2 if world.rank == rank else 3):
                pipe.step(data(8))
    except NpuPipeError as error:
        return f"{type(error).__name__}: {error}"
    return "done"


def loses_a_connection(world: World, *, rank: int, link: str) -> dict[str, Any]:
    """The groups of one rank break, while all processes live and are heard of."""
    built = build_schedule("1f1b", ranks=world.size, microbatches=4)
    start = time.monotonic()
    try:
        with pipeline(world, built, 8, link=LINKS[link]) as pipe:
            if world.rank == rank:
                arm(pipe, f"{rank}F1", pipe._team._interrupt)
            pipe.step(data(8))
    except NpuPipeError as error:
        return {"text": str(error), "seconds": time.monotonic() - start}
    raise AssertionError("nobody has failed")


def threads_and_files(world: World) -> list[Any]:
    """What pipelines leave behind: of threads, of open files, of shared memory.

    The thread that looks for the launcher is the process's own, and stays.
    """
    built = build_schedule("1f1b", ranks=world.size, microbatches=4)
    pipeline(world, built, 8).close()
    stay = {each.ident for each in threading.enumerate() if each.name == "npu_pipe lifeline"}
    counts = []
    for fails in (False, True, False):
        failed = False
        try:
            with pipeline(world, built, 8) as pipe:
                pipe.step(data(8))
                if fails and world.rank == 0:
                    raise ValueError("a fault between two calls")
                pipe.step(data(8))
        except (NpuPipeError, ValueError):
            failed = True  # the error itself, if it was kept, would hold what it came through
        assert failed == fails
        watching = [
            each.name
            for each in threading.enumerate()
            if "npu_pipe" in each.name and each.ident not in stay
        ]
        files = [os.readlink(each) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        counts.append([watching, [each for each in files if "npu_pipe" in each]])
    return counts


def runs_until(world: World, *, end: str, started: str) -> int:
    """Steps until the file is there; a slow one, so that a pause falls into it."""
    built = build_schedule("1f1b", ranks=world.size, microbatches=4)
    steps = 0
    with pipeline(world, built, 2) as pipe:
        while not any(pipe.gather(Path(end).exists())):
            arm(pipe, f"{world.rank}F1", lambda: time.sleep(0.05))
            pipe.step(data(8))
            steps += 1
            Path(started).touch()
    return steps


def forks(world: World, *, rank: int, note: str) -> dict[str, Any]:
    """A rank is killed that has a child, which holds all its connections open."""
    built = build_schedule("1f1b", ranks=world.size, microbatches=4)
    with redirect_stderr(io.StringIO()):
        try:
            with pipeline(world, built, 2) as pipe:
                pipe.step(data(8))
                if world.rank == rank:
                    child = os.fork()
                    if child == 0:
                        time.sleep(8)
                        os._exit(0)
                    arm(pipe, f"{rank}F2", lambda: strike("kill", 2, Path(note)))
                pipe.step(data(8))
        except NpuPipeError as error:
            seconds = time.monotonic() - float(Path(note).read_text())
            return {"text": str(error), "seconds": seconds}
    raise AssertionError("nobody has failed")


def never_connects(world: World, *, rank: int) -> str:
    """One rank makes no pipeline."""
    if world.rank == rank:
        time.sleep(2)
        return "was away"
    built = build_schedule("1f1b", ranks=world.size, microbatches=4)
    start = time.monotonic()
    try:
        Pipeline(
            {world.rank: stage(world.rank)},
            schedule=built,
            loss=MeanLoss(nn.functional.mse_loss),
            world=world,
            connect_s=4,  # new ranks do not come at the same time
        )
    except NpuPipeError as error:
        assert time.monotonic() - start < 9
        return f"{type(error).__name__}: {error}"
    raise AssertionError("it connected")


def loses_a_message(world: World, *, rank: int, link: str) -> dict[str, Any]:
    """Transfers of one rank never go out, and everybody lives."""
    built = build_schedule("1f1b", ranks=world.size, microbatches=4)
    with redirect_stderr(io.StringIO()) as printed:
        try:
            with pipeline(world, built, 2, link=LINKS[link]) as pipe:
                pipe.step(data(8))
                send = pipe._link.send

                def lose(transfer: Action, parcel: Any) -> None:
                    if transfer.microbatch < 2 or world.rank != rank:
                        send(transfer, parcel)

                pipe._link.send = lose
                pipe.step(data(8))
        except NpuPipeError as error:
            return {"text": str(error), "printed": printed.getvalue()}
    raise AssertionError("nobody has failed")
