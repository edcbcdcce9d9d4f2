"""Bytes of a text file as batches. Imports no torch.

    bytes      t h e   q u i c k ...                                   | held out
    inputs    [t h e   q]                  the tail is for validation,
    targets   [h e   q u]                  cut into batches once

A training batch is drawn from (seed, step) alone, so the step number is the whole position in
the data: every rank draws the same batch, and a resumed run goes on where it stood.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from pydoc_data import topics
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from npu_pipe.errors import DataError
from npu_pipe.train.bounds import between

__all__ = ["Batch", "Corpus", "DataConfig", "check_data", "load_corpus"]

Bytes = npt.NDArray[np.uint8]
Ids = npt.NDArray[np.int64]

_BLOCK_BYTES = 1 << 16


class Batch(NamedTuple):
    """Token ids, each of shape (batch, sequence), int64; a target is the byte that follows."""

    inputs: Ids
    targets: Ids


@dataclass(frozen=True, slots=True)
class DataConfig:
    """Where the text is and how it is cut."""

    path: Path | None = None
    """A text file of any kind; the language reference that comes with Python if left out."""
    batch: int = 32
    """Sequences an update."""
    sequence: int = 128
    """Bytes a sequence."""
    validation_fraction: float = 0.05
    """Share of the text, at its end, that is held out; 0 for no validation."""


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """The text in two parts.

    fingerprint: SHA-256 (hex) of the length and of 64 blocks spread over the text, which tells
        one file from another without reading all of a long one.
    """

    training: Bytes
    validation: Bytes
    fingerprint: str

    def training_batch(self, config: DataConfig, *, seed: int, step: int) -> Batch:
        """The batch number `step`, from 1: sequences from anywhere in the training part."""
        last = len(self.training) - config.sequence
        starts = np.random.default_rng((seed, step)).integers(last, size=config.batch)
        return _batch(self.training, starts, config.sequence)

    def validation_batches(self, config: DataConfig) -> tuple[Batch, ...]:
        """Every whole batch of the held-out part, in order."""
        starts = np.arange(0, len(self.validation) - config.sequence, config.sequence)
        whole = len(starts) // config.batch
        return tuple(
            _batch(self.validation, part, config.sequence)
            for part in starts[: whole * config.batch].reshape(whole, config.batch)
        )


def check_data(config: DataConfig) -> None:
    """Raise ConfigError for settings outside their bounds."""
    between(1, 2**31 - 1, data__batch=config.batch, data__sequence=config.sequence)
    between(0, 0.5, data__validation_fraction=config.validation_fraction)


def load_corpus(config: DataConfig) -> Corpus:
    """Read the text; a file is mapped, not copied.

    Raises DataError when it cannot be read, or is too short for one batch of either part.
    """
    source = config.path or "the language reference of Python"
    text = _language_reference() if config.path is None else _map(config.path)
    held_out = int(len(text) * config.validation_fraction)
    training, validation = text[: len(text) - held_out], text[len(text) - held_out :]
    needs = [(training, config.sequence + 1, "training")]
    if config.validation_fraction:
        needs.append((validation, config.batch * config.sequence + 1, "validation"))
    for part, least, name in needs:
        if len(part) < least:
            raise DataError(
                f"{name} takes at least {least} bytes of text for data.batch {config.batch} and "
                f"data.sequence {config.sequence}",
                f"{source} has {len(text)} bytes, {len(part)} of them for {name}",
                "give a longer text, a smaller batch or sequence, or another "
                "data.validation_fraction (0 for no validation)",
            )
    return Corpus(training, validation, _fingerprint(text))


def _batch(text: Bytes, starts: Ids, sequence: int) -> Batch:
    windows = text[starts[:, None] + np.arange(sequence + 1)].astype(np.int64)
    return Batch(windows[:, :-1].copy(), windows[:, 1:].copy())


def _language_reference() -> Bytes:
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    return np.frombuffer(text.encode(), dtype=np.uint8)


def _map(path: Path) -> Bytes:
    try:
        if path.stat().st_size == 0:  # which cannot be mapped
            return np.empty(0, dtype=np.uint8)
        return np.memmap(path, dtype=np.uint8, mode="r")
    except (OSError, ValueError) as error:  # the latter: a path that no file can have
        raise DataError(
            "data.path names a text file that can be read",
            f"{path}: {getattr(error, 'strerror', None) or error}",
            "check the path, or leave data.path out for the text that comes with Python",
        ) from error


def _fingerprint(text: Bytes) -> str:
    digest = hashlib.sha256(str(len(text)).encode())
    for start in np.linspace(0, max(len(text) - _BLOCK_BYTES, 0), 64, dtype=np.int64):
        digest.update(text[start : start + _BLOCK_BYTES].tobytes())
    return digest.hexdigest()
