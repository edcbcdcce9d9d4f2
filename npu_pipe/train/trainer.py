"""Train a job on the ranks of a world."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from npu_pipe.comm.data_parallel import Replicas
from npu_pipe.comm.handshake import require_equal
from npu_pipe.comm.links import link_for
from npu_pipe.device.choose import Choice, choose
from npu_pipe.device.inventory import room_on
from npu_pipe.errors import RunError
from npu_pipe.files import write_whole
from npu_pipe.launch.group import join, most_restarts, open_replicas
from npu_pipe.launch.mesh import check_nodes
from npu_pipe.launch.preflight import preflight
from npu_pipe.launch.world import World
from npu_pipe.pipeline import Pipeline
from npu_pipe.planner.workload_file import write_workload
from npu_pipe.runtime.loss import MeanLoss
from npu_pipe.simulator.footprint import Footprint
from npu_pipe.timeline.phase import Phase
from npu_pipe.timeline.picture import write_png, write_svg
from npu_pipe.timeline.timeline import Timeline
from npu_pipe.timeline.trace import write_trace
from npu_pipe.train.adamw import build_adamw, set_learning_rate
from npu_pipe.train.analysis import analyse, write_comparison
from npu_pipe.train.checkpoint import RankState, load_checkpoint, save_checkpoint
from npu_pipe.train.computing import computing
from npu_pipe.train.data import Batch, Corpus, load_corpus
from npu_pipe.train.job import Job, check_job, identity, mesh_of, plan_of
from npu_pipe.train.manifest import sweep
from npu_pipe.train.metrics import MetricsLog
from npu_pipe.train.model_config import layer_flops
from npu_pipe.train.optimizer import learning_rate
from npu_pipe.train.output import open_console
from npu_pipe.train.profile import profile
from npu_pipe.train.progress import ProgressLine
from npu_pipe.train.report import predict, report
from npu_pipe.train.run_folder import RunFolder
from npu_pipe.train.stages import open_parts
from npu_pipe.train.start import Start, check_unchanged, find_start
from npu_pipe.train.toml import flatten, to_toml
from npu_pipe.train.window import MeasuredWindow, write_window

__all__ = ["Trainer", "train"]

_PATIENCE_S = 600


def train(job: Job, world: World, *, resume: bool = False) -> None:
    """Train from the start, or with `resume` from the latest checkpoint, to `job.run.steps`.

    Every rank calls it; rank 0 prints, and writes what is common. Raises UsageError for a job
    that cannot run, HandshakeError when ranks were given different jobs, PeerError when another
    rank fails, RunError when the loss is not finite.
    """
    check_job(job)
    mesh = mesh_of(job)
    here, replica = mesh.pipeline_world(world), mesh.coordinates(world.rank).dp
    words = check_nodes(mesh, per_node=world.local_size) if world.local_size else ()
    chosen = choose(job.run.device, index=world.local_rank)
    chosen.device.select()
    torch.manual_seed(job.run.seed + replica)
    corpus, plan = load_corpus(job.data), plan_of(job)
    limits = preflight(
        plan.schedule,
        backend=chosen.device.backend,
        local_rank=world.local_rank,
        mesh=mesh,
        lanes=job.lanes,
        prefetch=job.pipeline.prefetch,
        room_bytes=room_on(chosen.device),
    )
    parts = open_parts(mesh, world, device=chosen.device)
    stages = {
        stage: parts.build(job.model, plan.layers[stage], seed=job.run.seed).to(chosen.device.place)
        for stage in plan.schedule.stages_of(here.rank)
    }
    writes = [s for s in stages if replica == 0 and plan.schedule.placement[s] == here.rank]
    optimizer = build_adamw(job.optimizer, stages.values())
    state = RankState(world.rank, stages, optimizer, writes, chosen.device, parts.part)
    join(world)
    start = find_start(job, corpus, resume=resume, restarts=most_restarts(world))
    if start.point is not None:
        load_checkpoint(start.point.checkpoint, start.point.manifest, state)
    with (
        open_replicas(mesh, world, stages, device=chosen.device) as replicas,
        Pipeline(
            stages,
            schedule=plan.schedule,
            loss=replicas.loss(MeanLoss(parts.loss)),
            world=here,
            prefetch=job.pipeline.prefetch,
            timeout_s=job.pipeline.timeout_s,
            tensor_parallel=parts.ranks,
            link=replicas.watched(
                link_for(stages.values(), schedule=plan.schedule, options=job.lanes)
            ),
        ) as pipe,
    ):
        trainer = Trainer(job, corpus, state, pipe, replicas, chosen)
        where = f"on {chosen.device.place.type}: {chosen.why}"
        trainer.say(where, parts.words(job), limits, *words, start.why)
        trainer.agree(start.done)  # from here on every rank has looked at the folder
        trainer.run(start)


@dataclass(frozen=True, slots=True)
class Update:
    """What one update was like."""

    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float


class Trainer:
    """One rank of a run, from its first update to its last. Every method is collective."""

    def __init__(
        self,
        job: Job,
        corpus: Corpus,
        state: RankState,
        pipe: Pipeline,
        replicas: Replicas,
        chosen: Choice,
    ) -> None:
        self._job = job
        self._chosen = chosen
        self._computing = partial(computing, job.model.precision, chosen.device)
        self._corpus = corpus
        self._state = state
        self._pipe = pipe
        self._replicas = replicas
        self._identity = identity(job, corpus)
        self._held_out = corpus.validation_batches(job.data)
        self._folder = RunFolder(job.run.folder)
        # All ranks go through the same motions; only the first has somebody to tell.
        self._console = open_console(quiet=state.rank != 0)
        self._metrics = self._folder.metrics if state.rank == 0 else Path(os.devnull)
        self._footprint: Footprint | None = None

    def say(self, *texts: str | None) -> None:
        """Print on the first rank."""
        for text in filter(None, texts):
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def agree(self, done: int) -> None:
        """Raise HandshakeError, on every rank, unless all have one job, one text and one start."""
        mine = {**self._identity, **flatten(self._job), "updates done": done}
        for path in ("data.path", "run.folder"):  # may be mounted elsewhere on another machine
            del mine[path]
        require_equal(self._gather(mine), cure="start all ranks with the same job and folder")

    def run(self, start: Start) -> None:
        """Run the updates after those that are done, and all that is due between them."""
        if self._state.rank == 0:
            with self._folder.held():
                check_unchanged(self._folder, start)
                write_whole(to_toml(self._job), self._folder.config)
                sweep(self._folder.checkpoints)
                self._run(start.done)
        else:
            self._run(start.done)

    def _run(self, done: int) -> None:
        run = self._job.run
        timeline: Timeline | None = None
        speeds: list[float] = []
        with (
            MetricsLog(self._metrics, after_step=done) as log,
            ProgressLine(self._console, done=done, steps=run.steps) as line,
        ):
            for step in range(done + 1, run.steps + 1):
                with (
                    # A device may compile operators in the first update; a profile takes time.
                    self._patience() if step in (done + 1, run.profile) else nullcontext(),
                    self._profile() if step == run.profile else nullcontext(),
                ):
                    # In the first update, whose times count for nothing, memory is measured.
                    update = self._update(step, watch=step == done + 1 < run.steps)
                speeds.append(update.tokens_per_s)
                log.write("update", step, **asdict(update))
                if self._due(step, run.measure_every):
                    timeline = self._pipe.timeline()
                    log.write("bubble", step, measured=timeline.bubble_ratio)
                line.update(step, update.loss, update.tokens_per_s, timeline)
                if self._held_out and self._due(step, run.validate_every):
                    with self._computing():
                        parts = [self._pipe.evaluate(self._tensors(b)).loss for b in self._held_out]
                    loss = self._replicas.total(fmean(parts))
                    log.write("validation", step, loss=loss)
                    line.say(f"step {step}: validation loss {loss:.4f} nats a byte")
                if self._due(step, run.checkpoint_every):
                    self._save(step)
        if timeline is None:
            self._console.print(f"{done} of {run.steps} updates were done already: nothing to do")
        elif self._state.rank == 0:
            self._conclude(timeline, median(speeds))

    def _update(self, step: int, *, watch: bool) -> Update:
        start_s = time.perf_counter()
        settings, data, windows = self._job.optimizer, self._job.data, self._job.pipeline.windows
        batches = (
            self._corpus.training_batch(data, seed=self._job.run.seed, step=number)
            for number in range((step - 1) * windows + 1, step * windows + 1)
        )
        with self._computing(), self._pipe.watching_memory() if watch else nullcontext():
            loss = self._pipe.step(*map(self._tensors, batches)).loss
        if self._replicas.size > 1:
            with self._pipe.phase(Phase.REDUCTION):
                loss = self._replicas.add(loss)
        if watch:
            self._footprint = self._pipe.footprint()
        norm = self._pipe.clip_gradients(settings.clip_norm)
        if not math.isfinite(loss + norm):
            raise RunError(
                "loss and gradient are finite",
                f"at update {step} the loss is {loss} and the norm of the gradient {norm}",
                "start a new run with a lower optimizer.learning_rate",
            )
        lr = learning_rate(settings, step, steps=self._job.run.steps)
        set_learning_rate(self._state.optimizer, lr)
        with self._pipe.phase(Phase.OPTIMIZER):
            self._state.optimizer.step()
            self._state.optimizer.zero_grad()
        seconds = time.perf_counter() - start_s
        return Update(loss, lr, norm, windows * data.batch * data.sequence / seconds)

    def _profile(self) -> AbstractContextManager[object]:
        rank = self._state.rank
        return self._chosen.device.profile(self._folder.profile, name=f"rank-{rank}")

    @contextmanager
    def _patience(self) -> Iterator[None]:
        """For what may take one rank longer than others; all leave it together."""
        with self._pipe.patience(_PATIENCE_S):
            yield
            self._gather(None)

    def _save(self, step: int) -> None:
        with self._patience():  # some ranks write for longer than others
            save_checkpoint(
                self._folder.checkpoints,
                self._state,
                step=step,
                job=self._identity,
                keep=self._job.run.keep_checkpoints,
                gather=self._gather,
            )

    def _gather(self, value: Any) -> list[Any]:
        """A JSON value of each rank of the job, on every rank."""
        pipelines = self._replicas.gather(self._pipe.gather(value))
        return [each for pipeline in pipelines for each in pipeline]

    def _conclude(self, measured: Timeline, tokens_per_s: float) -> None:
        plan, costs = plan_of(self._job), layer_flops(self._job.model, self._job.data.sequence)
        window = MeasuredWindow(
            step=self._job.run.steps,
            prefetch=self._job.pipeline.prefetch,
            layers=tuple(tuple(costs[layer] for layer in part) for part in plan.layers),
            timeline=measured,
            footprint=self._footprint,
        )
        write_window(window, self._folder.window)
        write_comparison(analyse(window), self._folder.comparison, folder=self._folder.path)
        write_trace(measured, self._folder.trace)
        write_svg(measured, self._folder.picture)
        if find_spec("matplotlib") is not None:  # of the extra `plot`
            write_png(measured, self._folder.bitmap)
        write_workload(profile(measured), self._folder.costs)
        self.say(f"{self._folder.path}: {tokens_per_s:,.0f} tokens/s")
        self._console.print(report(predict(measured), measured))

    def _due(self, step: int, every: int) -> bool:
        return step % every == 0 or step == self._job.run.steps

    def _tensors(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The rows of this replica."""
        place, rows = self._chosen.device.place, len(batch.inputs) // self._replicas.size
        mine = slice(self._replicas.index * rows, (self._replicas.index + 1) * rows)
        inputs, targets = batch.inputs[mine], batch.targets[mine]
        return torch.from_numpy(inputs).to(place), torch.from_numpy(targets).to(place)
