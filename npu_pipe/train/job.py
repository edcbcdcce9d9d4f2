"""Job: everything that decides a training run, from one TOML file and flags.

Each part owns its settings; here they are only put together. Imports no torch.

    job = read_toml(Job, "configs/gpt_tiny.toml")
    check_job(job)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from npu_pipe.ir.files import schedule_hash
from npu_pipe.train.data import Corpus, DataConfig, check_data, load_corpus
from npu_pipe.train.model_config import ModelConfig, check_model, layer_flops
from npu_pipe.train.optimizer import OptimizerConfig, check_optimizer
from npu_pipe.train.plan import PipelineConfig, Plan, make_plan
from npu_pipe.train.run_folder import RunConfig, check_run
from npu_pipe.train.toml import flatten

__all__ = ["Identity", "Job", "check_job", "identity", "plan_of"]

Identity = dict[str, str | int | float | bool | None]

# What may change when a run goes on: where it lies, how long it is, what is written and when.
_FREE = ("run.", "data.path", "pipeline.prefetch", "pipeline.timeout_s")


@dataclass(frozen=True, slots=True)
class Job:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    run: RunConfig = field(default_factory=RunConfig)


def plan_of(job: Job) -> Plan:
    """The schedule, and the layers of each stage. Raises UsageError for sizes that do not fit."""
    costs = layer_flops(job.model, job.data.sequence)
    return make_plan(job.pipeline, costs, batch=job.data.batch)


def check_job(job: Job) -> None:
    """Refuse with a UsageError whatever can be known to be wrong before anything starts."""
    check_model(job.model)
    check_data(job.data)
    check_optimizer(job.optimizer)
    check_run(job.run)
    plan_of(job)
    load_corpus(job.data)


def identity(job: Job, corpus: Corpus) -> Identity:
    """What decides the numbers of a run, by key: a checkpoint belongs to jobs that agree on it."""
    settings = {key: value for key, value in flatten(job).items() if not key.startswith(_FREE)}
    plan = plan_of(job)
    return {
        **settings,
        "run.seed": job.run.seed,
        "text": corpus.fingerprint,
        "schedule": schedule_hash(plan.schedule),
        "layers of stages": " ".join(f"{part.start}-{part.stop - 1}" for part in plan.layers),
    }
