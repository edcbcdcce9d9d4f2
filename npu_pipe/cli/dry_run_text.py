"""A dry run, for a person."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from npu_pipe.doctor.columns import INDENT, columns, some
from npu_pipe.launch.mesh import mesh_rows
from npu_pipe.train.dry_run import DryRun
from npu_pipe.train.estimate import copy_bytes

__all__ = ["lines"]

T = TypeVar("T")

_GIB = 1 << 30
_MOST_ROWS = 8
_NAME = INDENT - 1


def lines(run: DryRun) -> Iterator[str]:
    """The screen: what would run where, what it takes, and what is checked when it starts."""
    job, schedule = run.job, run.plan.schedule
    model = job.model
    experts = f", {model.experts} experts, {model.experts_per_token} a token"
    yield _named(
        "model",
        f"{_many(model.parameters)} parameters: {model.blocks} blocks, dim {model.dim}, "
        f"hidden {model.hidden}{experts * (model.experts > 1)}, in {model.precision}",
    )
    yield _named("mesh", f"{run.mesh}, {job.cluster.ranks_per_node} a node")
    yield from _mesh(run)
    share = job.data.batch // (job.pipeline.microbatches * job.mesh.dp)
    yield _named(
        "schedule",
        f"{schedule.name}: {schedule.stages} stages, {schedule.microbatches} microbatches of "
        f"{share} x {job.data.sequence} tokens; proved: it cannot hang",
    )
    left_out = " and the sum over replicas" * (run.mesh.dp > 1)
    yield _named(
        "estimate",
        f"{_time(run.update_us)} an update, {run.tokens_per_s:,.0f} tokens/s, bubble "
        f"{run.bubble_ratio:.1%}, without the optimizer{left_out}",
    )
    within = f", {job.cluster.node_gb_s:g} GB/s between those that share layers"
    yield _named("", f"of {job.cluster}{within * (run.mesh.tp > 1)}")
    yield _named("", "and from the model's shape, not measured: set [cluster]")
    yield _named("memory", f"GiB of {job.cluster.memory_gib:g} a device, estimated:")
    yield from _memory(run)
    yield from (_named("note", word) for word in run.words)
    yield _named(
        "at a start", "every rank compares job, code and torch with the others, looks at its"
    )
    yield _named("", "device, ports and variables, and connects to its neighbours before the first")
    yield _named("", "update. npu-pipe doctor CONFIG tries all that, on the nodes themselves")


def _mesh(run: DryRun) -> Iterator[str]:
    rows = mesh_rows(
        run.mesh,
        per_node=min(run.job.cluster.ranks_per_node, run.mesh.size),
        schedule=run.plan.schedule,
    )
    head = ("rank", "node", "local", "(dp, pp, tp)", "stages", "dp group", "pp group", "tp group")
    shown = _ends(rows)
    cells = [
        (
            str(row.rank),
            str(row.node),
            str(row.local_rank),
            f"({row.coordinates.dp}, {row.coordinates.pp}, {row.coordinates.tp})",
            " ".join(map(str, row.stages)),
            *(some(group, most=4) for group in (row.dp_group, row.pp_group, row.tp_group)),
        )
        for row in shown
    ]
    yield from columns(head, cells)
    yield from _left_out(len(rows) - len(shown))


def _memory(run: DryRun) -> Iterator[str]:
    fullest = max(run.memory, key=lambda each: each.total)
    shown = _ends(run.memory)
    if fullest not in shown:
        shown = sorted((*shown[:-1], fullest, shown[-1]), key=lambda each: each.rank)
    head = ("pp rank", "layers", "state", "activations", "a layer", "lanes", "reserve", "total", "")
    rows = []
    for each in shown:
        sizes = (each.state, each.activations, each.working, each.communicators, each.reserve)
        is_over = each.total > run.limit
        rows.append(
            (
                str(each.rank),
                " ".join(f"{part.start}-{part.stop - 1}" for part in each.layers),
                *(f"{size / _GIB:.1f}" for size in (*sizes, each.total)),
                "over" if is_over else "fullest" if each is fullest else "",
            )
        )
    yield from columns(head, rows)
    yield from _left_out(len(run.memory) - len(shown))
    most = max(run.needs, key=lambda need: need.communicators)
    yield _named("", f"state: parameters, gradients, AdamW in float32{_copies(run)}")
    yield _named("", f"lanes: up to {most.communicators} communicators, {most.streams} streams")


def _copies(run: DryRun) -> str:
    """Of the weights, where they are kept."""
    kept = any(copy_bytes(run.job.model, tp=run.mesh.tp))
    return f", copies in {run.job.model.precision}" * kept


def _ends(rows: Sequence[T]) -> list[T]:
    half = _MOST_ROWS // 2
    return list(rows) if len(rows) <= _MOST_ROWS else [*rows[:half], *rows[-half:]]


def _left_out(count: int) -> Iterator[str]:
    if count:
        yield f"{'':{INDENT}}... and {count} more like them"


def _time(time_us: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if time_us >= size:
            return f"{time_us / size:.3g} {unit}"
    return f"{time_us:.3g} us"


def _many(number: int) -> str:
    return f"{number / 1e9:.3g} billion" if number >= 10**9 else f"{number / 1e6:.3g} million"


def _named(name: str, text: str) -> str:
    return f"{name:<{_NAME}} {text}"
