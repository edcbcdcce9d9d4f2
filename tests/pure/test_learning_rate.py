"""The learning rate is a function of the step."""

from __future__ import annotations

from itertools import pairwise

import pytest

from npu_pipe.train.optimizer import OptimizerConfig, learning_rate

CONFIG = OptimizerConfig(learning_rate=2.0, floor=0.1, warmup_steps=4)


def test_it_rises_in_a_line_to_the_peak_and_falls_to_the_floor() -> None:
    rates = [learning_rate(CONFIG, step, steps=20) for step in range(1, 21)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    assert all(before > after for before, after in pairwise(rates[3:]))
    assert rates[11] == pytest.approx(2.0 * (0.1 + 0.9 / 2))  # half-way down
    assert rates[-1] == pytest.approx(0.2)


def test_without_warmup_the_first_step_is_just_below_the_peak() -> None:
    config = OptimizerConfig(learning_rate=2.0, floor=0.0, warmup_steps=0)
    assert 1.9 < learning_rate(config, 1, steps=20) < 2.0


def test_a_run_shorter_than_its_warmup_only_rises() -> None:
    assert [learning_rate(CONFIG, step, steps=2) for step in (1, 2)] == [0.5, 1.0]
