"""The folder of a run, which holds all that comes of it. Imports no torch.

config.toml     the job as it ran, flags included
metrics.jsonl   one line an update, one a validation
trace.json      the last measured window, for Perfetto or MindStudio Insight
timeline.svg    its picture, and timeline.png
checkpoints/    see npu_pipe.train.manifest
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from npu_pipe.errors import ConfigError
from npu_pipe.files import write_whole
from npu_pipe.train.bounds import at_least

__all__ = ["RunConfig", "RunFolder", "check_run"]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How long, how often, and where to."""

    folder: Path = Path("runs/job")
    """Where everything goes; a folder that holds a run is never overwritten."""
    steps: int = 200
    """Updates."""
    seed: int = 0
    """Of parameters and batches."""
    validate_every: int = 50
    """Updates between validations; there is one after the last too."""
    checkpoint_every: int = 100
    """Updates between checkpoints; there is one after the last too."""
    keep_checkpoints: int = 2
    """Newest checkpoints to keep."""
    measure_every: int = 10
    """Updates between measurements of the bubble; the last is measured too."""


def check_run(config: RunConfig) -> None:
    """Raise ConfigError for settings outside their bounds."""
    at_least(
        1,
        run__steps=config.steps,
        run__validate_every=config.validate_every,
        run__checkpoint_every=config.checkpoint_every,
        run__keep_checkpoints=config.keep_checkpoints,
        run__measure_every=config.measure_every,
    )
    at_least(0, run__seed=config.seed)


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of a run."""

    path: Path

    @property
    def config(self) -> Path:
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def trace(self) -> Path:
        return self.path / "trace.json"

    @property
    def picture(self) -> Path:
        return self.path / "timeline.svg"

    @property
    def bitmap(self) -> Path:
        return self.path / "timeline.png"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check_free(self) -> None:
        """Raise ConfigError if a new run may not go here."""
        if self.path.exists() and not self.path.is_dir():
            raise ConfigError(
                "run.folder is a folder", f"{self.path} is a file", "give another run.folder"
            )
        if self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(
                "a run folder is never overwritten",
                f"{self.path} is not empty",
                "go on with --resume, or give another folder (--run.folder)",
            )

    def prepare(self, config: str) -> None:
        """Make the folder and write the job's text. Raises ConfigError where that is refused."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "run.folder can be made", f"{self.path}: {error.strerror}", "give another folder"
            ) from error
        write_whole(config, self.config)
