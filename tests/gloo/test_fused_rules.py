"""Which provider serves what, and what is said of those that do not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory

from npu_pipe.errors import ConfigError, PeerError
from npu_pipe.ops.choose import table, told
from npu_pipe.ops.need import Need, Operator
from npu_pipe.ops.operators import Operators
from npu_pipe.ops.provider import Refusal
from npu_pipe.ops.ranks import Ranks
from npu_pipe.ops.reference import Reference
from npu_pipe_kernels.cuda import SideStreams, SymmetricMemory
from npu_pipe_kernels.npu import Npu
from npu_pipe_kernels.portable import Portable
from npu_pipe_kernels.providers import providers

GATHER, SCATTER, REDUCE = Operator
TWO = Ranks(group=None, rank=0, size=2, place=torch.device("cpu"))
A2 = replace(TWO, chip="Ascend910B1")


def need(
    operator: Operator = GATHER, *, rows: int = 4, dtype: torch.dtype = torch.bfloat16
) -> Need:
    return Need(operator, rows, 256, 8, dtype)


class Even(Reference):
    """A provider with a rule."""

    name = "even"

    def refusal(self, need: Need, ranks: Ranks) -> Refusal | None:
        if need.rows % 2 == 0:
            return None
        return Refusal("rows are even", f"there are {need.rows}", "add one")


def test_the_first_that_serves_is_chosen_and_the_reason_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    operators = Operators(TWO, [Even(), Reference()])
    with caplog.at_level(logging.WARNING):
        choices = operators.plan([need(), need(rows=3), need(rows=5), need(SCATTER, rows=3)])
        operators.plan([need(rows=3)])
    assert [each.provider.name for each in choices] == ["even", *["reference"] * 3]
    (record,) = caplog.records
    assert record.getMessage() == (
        "all_gather_matmul (3, 256) @ (256, 8) bfloat16 is done by provider reference, not even: "
        "rows are even; there are 3; add one"
    )
    assert table(choices)[1][1:] == ("reference", "not even: rows are even, and there are 3")
    assert operators.rows()[0] == ("all_gather_matmul (4, 256) @ (256, 8) bfloat16", "even", "")
    assert told(operators.rows()).splitlines()[:4] == [
        "even:",
        "  all_gather_matmul (4, 256) @ (256, 8) bfloat16",
        "reference, not even: rows are even, and there are 3:",
        "  all_gather_matmul (3, 256) @ (256, 8) bfloat16",
    ]


def test_of_lengths_that_change_all_the_time_the_latest_are_known() -> None:
    operators = Operators(TWO, [Reference()])
    operators.plan(need(rows=rows) for rows in range(3000))
    rows = operators.rows()
    assert len(rows) == 1024
    assert rows[-1][0].startswith("all_gather_matmul (2999, 256)")


def test_a_rank_that_has_left_begins_no_product_whoever_does_them() -> None:
    """An operator of a device's library looks at no flag of ours: it waited for ever."""
    left = replace(TWO, left=threading.Event())
    left.left.set()
    operators = Operators(left, [Even(), Reference()])
    x = torch.zeros(4, 3)
    for product in (
        operators.all_gather_matmul,
        operators.matmul_reduce_scatter,
        operators.matmul_all_reduce,
    ):
        with pytest.raises(PeerError, match="end together; rank 0 of 2 has left"):
            product(x, x.t())


def test_a_provider_for_another_device_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        (choice,) = Operators(TWO, providers()).plan([need()])
    assert choice.provider.name == "portable"
    assert not caplog.records


def test_a_forced_provider_that_cannot_serve_is_refused_with_its_reason() -> None:
    operators = Operators(TWO, [Even(), Reference()], wanted="even")
    operators.plan([need()])
    words = r"provider even: rows are even; there are 3, in all_gather_matmul \(3, 256\).*; add one"
    with pytest.raises(ConfigError, match=words):
        operators.plan([need(rows=3)])


def test_an_unknown_provider_is_refused_with_the_names() -> None:
    with pytest.raises(ConfigError, match="are even, reference; 'odd' was asked for"):
        Operators(TWO, [Even(), Reference()], wanted="odd")


def test_one_rank_needs_no_provider() -> None:
    operators = Operators(Ranks.single(torch.device("cpu")), [])
    x, right = torch.randn(3, 4), torch.randn(4, 5)
    out, gathered = operators.all_gather_matmul(x, right)
    assert torch.equal(out, x @ right)
    assert gathered is x
    assert torch.equal(operators.matmul_reduce_scatter(x, right), x @ right)
    assert torch.equal(operators.matmul_all_reduce(x, right), x @ right)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (replace(A2, chip="Ascend310P3"), "run on chips Ascend910B, Ascend910_93"),
        (replace(A2, chip=""), "this is none"),
        (replace(A2, size=16), "on Atlas A2 fused operators join 2, 4, 8 ranks; these are 16"),
        (
            replace(A2, size=6, chip="Ascend910_9391"),
            "on Atlas A3 fused operators join 2, 4, 8,",
        ),
        (replace(A2, hosts=2), "on Atlas A2 the ranks of a fused operator are on one host"),
    ],
)
def test_npu_names_the_rule_of_the_chip(ranks: Ranks, words: str) -> None:
    """Those of shapes are tried on the emulator."""
    refusal = Npu().refusal(need(), ranks)
    assert refusal is not None
    assert words in str(refusal.error())


def test_npu_needs_a_torch_npu_that_has_the_operator() -> None:
    refusal = Npu().refusal(need(), A2)
    assert refusal is not None
    assert "npu_all_gather_base_mm" in refusal.rule
    assert "torch_npu does not have it" in refusal.facts


@pytest.mark.parametrize(
    ("asked", "ranks", "words"),
    [
        (need(REDUCE), TWO, "torch fuses all_gather_matmul and matmul_reduce_scatter"),
        (need(), replace(TWO, hosts=2), "symmetric memory joins the ranks of one host"),
        (need(dtype=torch.float64), TWO, "the matrices are float64"),
        (need(rows=0), TWO, "matrices that hold something; they are (0, 256)"),
    ],
)
def test_symmetric_memory_names_its_rules(asked: Need, ranks: Ranks, words: str) -> None:
    refusal = SymmetricMemory().refusal(asked, ranks)
    assert refusal is not None
    assert words in str(refusal.error())


def test_side_streams_serve_what_symmetric_memory_does_not() -> None:
    assert SymmetricMemory().refusal(need(), TWO) is None
    assert SideStreams().refusal(need(REDUCE, rows=0), replace(TWO, hosts=2)) is None
    assert (SideStreams().name, SideStreams().kind) == ("cuda-side-streams", "cuda")


@pytest.fixture
def alone() -> Iterator[Ranks]:
    """One rank with no device: for shapes only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield Ranks(group=dist.group.WORLD, rank=0, size=1, place=torch.device("meta"))
    dist.destroy_process_group()


def test_symmetric_memory_calls_torchs_operators_as_they_are_declared(alone: Ranks) -> None:
    """On a device without memory: their numbers need a GPU."""
    x, right = torch.empty(4, 8, device="meta"), torch.empty(6, 8, device="meta").t()
    with symmetric_memory._test_mode({alone.group.group_name}):
        out, gathered = SymmetricMemory().all_gather_matmul(x, right, alone)
        share = SymmetricMemory().matmul_reduce_scatter(x, right, alone)
    assert (out.shape, gathered.shape, share.shape) == ((4, 6), (4, 8), (4, 6))


def test_less_than_one_tile_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least one tile; 0 were asked for"):
        Portable(0)


def test_layers_that_are_cut_have_a_provider() -> None:
    with pytest.raises(ConfigError, match="has a provider; none was given for all_gather_matmul"):
        Operators(TWO, []).plan([need()])


def test_one_rank_plans_nothing_whoever_was_asked_for() -> None:
    """Its products are plain: a forced provider was refused for them, and the table named one."""
    operators = Operators(replace(TWO, size=1), providers(), wanted="npu")
    assert operators.plan([need()]) == ()
    assert operators.rows() == ()


class Joined:
    """Stands for a process group."""


def test_on_a2_a_plan_takes_the_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups that were planned before either ran both got the fused operators."""
    for name in ("npu_all_gather_base_mm", "npu_mm_reduce_scatter_base"):
        monkeypatch.setattr(torch.ops.npu, name, None, raising=False)
    first, second = (replace(A2, group=Joined()) for _ in range(2))
    npu = Npu()
    assert npu.refusal(need(dtype=torch.float32), second) is not None  # takes nothing
    assert npu.refusal(need(), first) is None
    refusal = npu.refusal(need(), second)
    assert refusal is not None
    assert "use one communicator; another group has it" in str(refusal.error())
    assert npu.refusal(need(SCATTER), first) is None
    npu = Npu()
    for group in (first, second):
        assert npu.refusal(need(), replace(group, chip="Ascend910_9391")) is None
