"""The folder of a run, which holds all that comes of it. Imports no torch.

config.toml     the job as it ran, flags included
metrics.jsonl   one line an update, one a validation
window.json     the last measured window, for npu-pipe trace
trace.json      the same for Perfetto or MindStudio Insight
timeline.svg    its picture, and timeline.png
comparison.svg  its picture below what was predicted, with the critical paths
costs.toml      what each of its stages took in it, for npu-pipe plan --profile
profile/        of one update on each rank, if it was asked for
checkpoints/    see npu_pipe.train.manifest
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from npu_pipe.errors import ConfigError
from npu_pipe.train.bounds import at_least, between

__all__ = ["RunConfig", "RunFolder", "check_run"]


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How long, how often, and where to."""

    folder: Path = Path("runs/job")
    """Where everything goes; a folder that holds a run is never overwritten."""
    device: str = "auto"
    """Kind of device to compute on; auto takes an accelerator that can be used, else the CPU."""
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
    profile: int | None = None
    """Update to take a profile of, by the device's own profiler, into the run folder."""


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
    if config.profile is not None:
        between(1, config.steps, run__profile=config.profile)
    try:
        str(config.folder).encode()  # it is written into the folder's own config.toml
        os.lstat(config.folder)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:
        raise ConfigError(
            "run.folder is a path that a folder can have",
            f"{str(config.folder)!a:.80}: {getattr(error, 'strerror', None) or error}",
            "give another run.folder",
        ) from error


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
    def window(self) -> Path:
        return self.path / "window.json"

    @property
    def comparison(self) -> Path:
        return self.path / "comparison.svg"

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
    def costs(self) -> Path:
        return self.path / "costs.toml"

    @property
    def profile(self) -> Path:
        return self.path / "profile"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def check_free(self) -> None:
        """Raise ConfigError if a new run may not go here."""
        for path in (self.path, *self.path.parents):
            if path.exists() and not path.is_dir():
                raise ConfigError(
                    "run.folder is a folder", f"{path} is a file", "give another run.folder"
                )
        if self.path.is_dir() and any(self.path.iterdir()):
            raise ConfigError(
                "a run folder is never overwritten",
                f"{self.path} is not empty",
                "go on with --resume, or give another folder (--run.folder)",
            )

    def check_run(self) -> None:
        """Raise ConfigError if no run is here."""
        if self.config.is_file():
            return
        state = "holds no run" if self.path.is_dir() else "is not there"
        if self.path.exists() and not self.path.is_dir():
            state = "is a file"
        raise ConfigError(
            "RUN is a folder that npu-pipe train has made",
            f"{self.path} {state}",
            "give the run.folder of a run",
        )

    @contextmanager
    def held(self) -> Iterator[None]:
        """Make the folder, if need be, and keep other runs out of it.

        Raises ConfigError where it cannot be made, or another run is in it. The hold ends with
        this process, however that ends.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise ConfigError(
                "run.folder can be made", f"{self.path}: {error.strerror}", "give another folder"
            ) from error
        try:
            _lock(descriptor, self.path)
            yield
        finally:
            os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ConfigError(
            "one run at a time goes on in a run folder",
            f"another one is in {path}",
            "wait for it or end it, or give another folder (--run.folder)",
        ) from error
    except OSError:
        pass  # a file system without locks
