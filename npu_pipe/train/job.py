"""Job: everything that decides a training run, from one TOML file and flags.

Each part owns its settings; here they are only put together. Imports no torch.

    job = read_toml(Job, "configs/gpt_tiny.toml")
    check_job(job)
"""

from __future__ import annotations

from dataclasses import dataclass, field

from npu_pipe.device.kinds import require_known
from npu_pipe.device.lanes import LaneOptions, check_lanes
from npu_pipe.ir.files import schedule_hash
from npu_pipe.launch.mesh import Mesh
from npu_pipe.train.cluster import ClusterConfig, check_cluster
from npu_pipe.train.data import Corpus, DataConfig, check_data, load_corpus
from npu_pipe.train.mesh import MeshConfig, check_mesh
from npu_pipe.train.model_config import ModelConfig, check_model, layer_flops
from npu_pipe.train.optimizer import OptimizerConfig, check_optimizer
from npu_pipe.train.plan import PipelineConfig, Plan, make_plan
from npu_pipe.train.run_folder import RunConfig, check_run
from npu_pipe.train.toml import flatten

__all__ = [
    "Identity",
    "Job",
    "check_job",
    "check_settings",
    "identity",
    "mesh_of",
    "plan_of",
    "settings_of",
]

Identity = dict[str, str | int | float | bool | None]

# What may change when a run goes on: where it lies, how long it is, what is written and when.
_FREE = ("run.", "lanes.", "cluster.", "data.path", "pipeline.prefetch", "pipeline.timeout_s")


@dataclass(frozen=True, slots=True)
class Job:
    """A training run."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lanes: LaneOptions = field(default_factory=LaneOptions)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    run: RunConfig = field(default_factory=RunConfig)


def plan_of(job: Job) -> Plan:
    """The schedule, and the layers of each stage. Raises UsageError for sizes that do not fit."""
    costs = layer_flops(job.model, job.data.sequence)
    return make_plan(job.pipeline, costs, batch=job.data.batch, replicas=job.mesh.dp)


def mesh_of(job: Job) -> Mesh:
    """All ranks of the job."""
    return Mesh(dp=job.mesh.dp, pp=job.pipeline.ranks, tp=job.mesh.tp)


def check_job(job: Job) -> None:
    """Refuse with a UsageError whatever can be known to be wrong before anything starts."""
    check_settings(job)
    load_corpus(job.data)


def check_settings(job: Job) -> None:
    """Refuse with a UsageError what is wrong in itself, on whichever machine the job will run."""
    check_model(job.model)
    check_data(job.data)
    check_optimizer(job.optimizer)
    check_mesh(job.mesh, job.model, job.data)
    check_lanes(job.lanes)
    require_known(job.run.device)
    check_cluster(job.cluster)
    check_run(job.run)
    plan_of(job)


def settings_of(job: Job) -> Identity:
    """The settings that decide the numbers of a run, by key."""
    settings = {key: value for key, value in flatten(job).items() if not key.startswith(_FREE)}
    return {**settings, "run.seed": job.run.seed}


def identity(job: Job, corpus: Corpus) -> Identity:
    """What decides the numbers of a run, by key: a checkpoint belongs to jobs that agree on it."""
    plan = plan_of(job)
    return {
        **settings_of(job),
        "text": corpus.fingerprint,
        "schedule": schedule_hash(plan.schedule),
        "layers of stages": " ".join(f"{part.start}-{part.stop - 1}" for part in plan.layers),
    }
