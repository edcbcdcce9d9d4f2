"""Data parallel: replicas of a pipeline that share the rows of each update.

                 stage 0    stage 1        each column is one of these: the ranks that hold
    replica 0    rank 0     rank 1         the same stages, one a replica
    replica 1    rank 2     rank 3

    with open_replicas(mesh, world, stages, device=device) as replicas:
        link = replicas.watched(link_for(stages.values(), schedule=schedule))
        pipe = Pipeline(stages, loss=replicas.loss(MeanLoss(fn)), link=link, ...)
        loss = replicas.add(pipe.step(my_rows).loss)      # .grad is that of all rows, everywhere
        pipe.clip_gradients(1.0)                          # of the sum, so each parameter once

A loss made by `loss` is normalised by what all replicas have, so that their gradients only have
to be added. They are added in the order of the replicas, which makes the sum the same, bit for
bit, on all of them, run after run, wherever a parameter lies among the others:

    scatter   each rank gets its part of the gradients of all replicas, and adds them up
    gather    each rank gets the sums of all parts
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as _c10d
from torch import Tensor, nn

from npu_pipe.comm.device_lanes import abort_soon, require_done
from npu_pipe.comm.device_wait import DeviceWait
from npu_pipe.comm.failure import peer_failures
from npu_pipe.comm.handshake import require_equal
from npu_pipe.comm.links import OpenLink, TeamLink
from npu_pipe.comm.team import Team
from npu_pipe.device.device import Device
from npu_pipe.device.lanes import LaneOptions
from npu_pipe.errors import ConfigError, RunError
from npu_pipe.ir.program import Lane
from npu_pipe.runtime.gradients import zero_gradient
from npu_pipe.runtime.loss import CountedLoss, Loss, LossFunction, Scale, as_loss

__all__ = ["DataParallel", "OneReplica", "Replicas"]

_BUCKET_BYTES = 1 << 26
_LATE_S = 1800.0  # a replica may be late by so much; a rank that hangs is found by its pipeline
_CURE = "start all ranks with the same code, job and environment"


class OneReplica:
    """`DataParallel` where there is one pipeline."""

    size, index = 1, 0

    def watched(self, link: OpenLink) -> OpenLink:
        return link

    def loss(self, loss: Loss | LossFunction) -> Loss:
        return as_loss(loss)

    def add(self, loss: float) -> float:
        return loss

    def total(self, value: float) -> float:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value]

    def close(self) -> None:
        """There is nothing to leave."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """There is nothing to leave."""


class DataParallel:
    """The ranks that hold the same stages. Every method is collective among them; every pipeline
    calls them at the same points, on each of its ranks."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        index: int,
        members: Sequence[int],
        address: str,
        device: Device,
        connect_s: float = 60,
        late_s: float = _LATE_S,
    ) -> None:
        """Connect the replicas, and give all of them the parameters and buffers of the first.

        stages: the modules of this rank. index: of this rank's replica. members: the rank of each
        replica that holds these stages; torch.distributed has been initialised with all ranks.
        late_s: how long replicas may wait for each other.
        Raises HandshakeError for modules that differ, PeerError for a rank that does not come.
        """
        self.index = index
        self.size = len(members)
        self._modules = [stages[stage] for stage in sorted(stages)]
        self._team = Team(
            index,
            self.size,
            address=address,
            open_store=_unopened,
            timeout_s=late_s,
            connect_s=connect_s,
            members=members,
        )
        self._device = device
        self._wait = DeviceWait(device, self._team.board)
        self._team.on_interrupt(self._interrupt)
        try:
            group = self._team.groups.lane(Lane.DOWN)
            if self._is_beside:
                store = dist.PrefixStore(device.backend, group.get_group_store())
                name = f"npu_pipe_dp_{members[0]}"
                device.add_backend(group, store, name=name, options=LaneOptions())
            forms = self._meet("replicas", [_form(tensor) for tensor in self._tensors()])
            for number, form in enumerate(zip(*forms, strict=False)):
                require_equal([{f"tensor {number} of the stages": f} for f in form], cure=_CURE)
            with self._team.connecting():
                for bucket in _buckets(self._tensors()):
                    self._give_first(bucket)
        except BaseException:
            self.close()
            raise

    def loss(self, loss: Loss | LossFunction) -> Loss:
        """A loss that is normalised over the microbatches of all replicas.

        A replica without anything valid in an update counts nothing, unless all are without.
        Raises ConfigError for a loss of one's own that has no `counts` and `shares`.
        """
        counted = as_loss(loss)
        if not isinstance(counted, CountedLoss):
            raise ConfigError(
                "a loss under data parallelism tells what each microbatch counts",
                f"{type(counted).__name__} has no methods counts and shares",
                "write them as npu_pipe.runtime.loss.MeanLoss does",
            )
        return _Joint(counted, self)

    def watched(self, link: OpenLink) -> OpenLink:
        """What opens the link of a pipeline, which then fails as soon as another replica has,
        and not only where it meets that one: in the middle of a step that takes minutes, say."""

        def open_link(team: Team) -> TeamLink:
            team.follow(self._team)
            return link(team)

        return open_link

    def add(self, loss: float) -> float:
        """Add the gradients of all replicas, once an update, and this loss of the update too.

        What is in `.grad` of each replica becomes the sum. A parameter without a gradient counts
        as zero where other replicas have one. Returns the sum of the losses.
        """
        parameters = [p for module in _unique(self._modules) for p in module]
        has = ["".join("01"[p.grad is not None] for p in parameters), loss]
        answers = self._meet("sum of gradients", has)
        somewhere = [any(flags) for flags in zip(*(map(int, a[0]) for a in answers), strict=True)]
        gradients = []
        for parameter, wanted in zip(parameters, somewhere, strict=True):
            if wanted:
                if parameter.grad is None:
                    parameter.grad = zero_gradient(parameter)
                elif parameter.grad.is_sparse:
                    parameter.grad = parameter.grad.to_dense()
                gradients.append(parameter.grad.detach())
        with self._team.unbroken():
            for bucket in _buckets(gradients):
                self._add(bucket)
        return math.fsum(answer[1] for answer in answers)

    def total(self, value: float) -> float:
        """The sum over the replicas."""
        return math.fsum(self._meet("total", value))

    def gather(self, value: Any) -> list[Any]:
        """A JSON value of each replica, on all."""
        return self._meet("gather", value)

    def close(self) -> None:
        """Leave; waits for nobody."""
        self._team.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None and self._team.is_open:  # its own pipeline has failed, say
            self._team.tell(error, "between two calls")
        self.close()

    def _meet(self, call: str, value: Any) -> list[Any]:
        return self._team.meet(call, lambda: value)

    def _tensors(self) -> list[Tensor]:
        return [
            tensor.detach()
            for module in self._modules
            for tensor in (*module.parameters(), *module.buffers())
        ]

    def _give_first(self, tensors: Sequence[Tensor]) -> None:
        group, flat = self._team.groups.lane(Lane.DOWN), _flat(tensors, 1)
        with peer_failures("replica {} was given its first parameters", self.index):
            self._finish(group.broadcast([flat], _broadcast()))
        _put(flat, tensors)

    def _add(self, tensors: Sequence[Tensor]) -> None:
        group, flat = self._team.groups.lane(Lane.DOWN), _flat(tensors, self.size)
        parts = torch.empty_like(flat)
        with peer_failures("replica {} was adding gradients", self.index):
            self._finish(group.alltoall_base(parts, flat, [], [], dist.AllToAllOptions()))
            total, *others = parts.chunk(self.size)
            for other in others:
                total += other
            self._finish(group._allgather_base(flat, total, _c10d.AllgatherOptions()))
        _put(flat, tensors)

    @property
    def _is_beside(self) -> bool:
        """Whether tensors are on a device beside the host."""
        return self._device.place.type != "cpu"

    def _finish(self, work: dist.Work) -> None:
        work.wait()
        self._wait.for_all()
        if self._is_beside:
            require_done(work, self._device.backend, f"between replica {self.index} and others")

    def _interrupt(self) -> None:
        self._wait.interrupt()
        if self._is_beside:
            abort_soon(self._device, self._team.groups, [Lane.DOWN])


Replicas = DataParallel | OneReplica


@dataclass(frozen=True, slots=True)
class _Joint:
    """A loss over all replicas. See `npu_pipe.runtime.loss.Loss`."""

    of: CountedLoss
    replicas: DataParallel

    @property
    def function(self) -> LossFunction:
        return self.of.function

    def scales(self, targets: Sequence[Any]) -> Sequence[Scale]:
        counts = self.of.counts(targets)
        return self.of.shares(counts, sum(self.replicas.gather(sum(counts))))


def _unique(modules: Sequence[nn.Module]) -> Iterator[list[nn.Parameter]]:
    """The trained parameters, each once, also one that modules of this rank share."""
    seen: set[int] = set()
    for module in modules:
        fresh = [p for p in module.parameters() if p.requires_grad and id(p) not in seen]
        seen.update(map(id, fresh))
        yield fresh


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type that are moved at once; one that is larger moves alone."""
    for _, alike in groupby(sorted(tensors, key=_type), key=_type):
        bucket: list[Tensor] = []
        size = 0
        for tensor in alike:
            if bucket and size + tensor.nbytes > _BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype)


def _flat(tensors: Sequence[Tensor], parts: int) -> Tensor:
    """All numbers in a row, and zeros up to a multiple of `parts`."""
    rows = [tensor.reshape(-1) for tensor in tensors]
    missing = -sum(row.numel() for row in rows) % parts
    return torch.cat([*rows, rows[0].new_zeros(missing)])


def _put(flat: Tensor, tensors: Sequence[Tensor]) -> None:
    start = 0
    for tensor in tensors:
        tensor.copy_(flat[start : start + tensor.numel()].view_as(tensor))
        start += tensor.numel()


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _broadcast() -> dist.BroadcastOptions:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _unopened() -> dist.Store:
    raise RunError(
        "replicas meet where torch.distributed has been initialised with all ranks",
        "it has not been",
        "call npu_pipe.launch.group.join first, or open_replicas",
    )
