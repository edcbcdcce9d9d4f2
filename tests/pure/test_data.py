"""Batches come from (seed, step) alone; the tail is held out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from npu_pipe.errors import DataError
from npu_pipe.train.data import DataConfig, load_corpus


def text_file(folder: Path, size: int) -> Path:
    path = folder / "text.txt"
    path.write_bytes(bytes(i % 251 for i in range(size)))
    return path


def test_the_default_text_is_the_language_reference() -> None:
    corpus = load_corpus(DataConfig())
    assert len(corpus.training) + len(corpus.validation) > 300_000
    assert b"generator" in corpus.training.tobytes()


def test_targets_are_the_bytes_that_follow() -> None:
    config = DataConfig(batch=4, sequence=16)
    corpus = load_corpus(config)
    inputs, targets = corpus.training_batch(config, seed=0, step=1)
    assert inputs.shape == targets.shape == (4, 16)
    assert inputs.dtype == targets.dtype == np.int64
    assert (inputs[:, 1:] == targets[:, :-1]).all()
    text = corpus.training.tobytes()
    for row, last in zip(inputs, targets[:, -1], strict=True):
        assert bytes([*row.tolist(), int(last)]) in text


def test_a_batch_depends_on_seed_and_step_alone() -> None:
    config = DataConfig(batch=4, sequence=16)
    again = [load_corpus(config).training_batch(config, seed=3, step=7).inputs for _ in range(2)]
    corpus = load_corpus(config)
    assert (again[0] == again[1]).all()
    assert (again[0] != corpus.training_batch(config, seed=3, step=8).inputs).any()
    assert (again[0] != corpus.training_batch(config, seed=4, step=7).inputs).any()


def test_the_held_out_tail_is_cut_into_whole_batches_without_overlap(tmp_path: Path) -> None:
    config = DataConfig(text_file(tmp_path, 1000), batch=3, sequence=8, validation_fraction=0.1)
    corpus = load_corpus(config)
    batches = corpus.validation_batches(config)
    seen = np.concatenate([batch.inputs.ravel() for batch in batches])
    assert len(corpus.validation) == 100
    assert len(batches) == 4
    assert (seen == corpus.validation[: len(seen)]).all()


def test_no_fraction_no_validation(tmp_path: Path) -> None:
    config = DataConfig(text_file(tmp_path, 100), batch=2, sequence=8, validation_fraction=0)
    corpus = load_corpus(config)
    assert len(corpus.training) == 100
    assert corpus.validation_batches(config) == ()


def test_every_byte_of_the_training_part_can_be_drawn(tmp_path: Path) -> None:
    config = DataConfig(text_file(tmp_path, 10), batch=64, sequence=8, validation_fraction=0)
    inputs, targets = load_corpus(config).training_batch(config, seed=0, step=0)
    assert set(inputs.ravel().tolist()) | set(targets.ravel().tolist()) == set(range(10))


def test_the_shortest_text_that_holds_one_batch_of_each_part_is_taken(tmp_path: Path) -> None:
    path = text_file(tmp_path, 2 * 17)
    config = DataConfig(path, batch=2, sequence=8, validation_fraction=0.5)
    corpus = load_corpus(config)
    assert len(corpus.validation_batches(config)) == 1
    with pytest.raises(DataError, match="validation takes at least 25 bytes"):
        load_corpus(DataConfig(path, batch=3, sequence=8, validation_fraction=0.5))


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "has 0 bytes"), (8, "training takes at least 9 bytes"), (20, "validation takes at least")],
)
def test_a_text_that_is_too_short_is_refused(tmp_path: Path, size: int, words: str) -> None:
    with pytest.raises(DataError, match=words):
        load_corpus(DataConfig(text_file(tmp_path, size), batch=2, sequence=8))


def test_a_missing_text_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No such file"):
        load_corpus(DataConfig(tmp_path / "missing"))
    with pytest.raises(DataError, match="Is a directory"):
        load_corpus(DataConfig(tmp_path))


def test_another_text_of_the_same_length_has_another_fingerprint(tmp_path: Path) -> None:
    path = text_file(tmp_path, 1000)
    config = DataConfig(path, batch=2, sequence=8)
    before = load_corpus(config).fingerprint
    assert load_corpus(config).fingerprint == before
    path.write_bytes(path.read_bytes()[::-1])
    assert load_corpus(config).fingerprint != before
