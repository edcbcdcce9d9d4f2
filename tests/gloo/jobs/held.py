"""Jobs about what is held at once. Storages are counted through weak references: they end with
the memory, whoever owned it last."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from jobs.models import data, stage
from npu_pipe import Costs, Pipeline, World, build_schedule, simulate
from npu_pipe.comm import links


class Counting(nn.Module):
    """Counts, each time it has made an activation, those that are still somebody's. It is what
    the second layer's W needs; `sends` it too, so that it lives until it is sent."""

    def __init__(
        self, index: int, counters: list[StorageWeakRef], peak: list[int], *, sends: bool
    ) -> None:
        super().__init__()
        self.inner, self.second = stage(index), stage(100 + index)
        self.sends = sends
        self.outputs, self.peak = counters, peak

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.inner(x)
        self.outputs[:] = [each for each in self.outputs if not each.expired()]
        self.outputs.append(StorageWeakRef(hidden.untyped_storage()))
        self.peak[0] = max(self.peak[0], len(self.outputs))
        second: Tensor = self.second(hidden)
        return hidden if self.sends else second


def peak(world: World, *, name: str, microbatches: int, link: str) -> dict[str, Any]:
    """The most outputs of this rank's stages that were alive at once, and the prediction."""
    schedule = build_schedule(name, ranks=world.size, microbatches=microbatches)
    outputs: list[StorageWeakRef] = []
    most = [0]
    mine = {
        i: Counting(i, outputs, most, sends=link == "gloo_link")
        for i in schedule.stages_of(world.rank)
    }
    with Pipeline(
        mine,
        schedule=schedule,
        loss=nn.functional.mse_loss,
        world=world,
        link=getattr(links, link),
    ) as pipe:
        for _ in range(2):
            most[0] = 0
            pipe.step(data(2 * microbatches))
        measured = pipe.timeline().peak_activations[world.rank]
        left = sum(not each.expired() for each in outputs)
    costs = Costs.uniform(schedule.stages)
    predicted = simulate(schedule, costs).peak_activations[world.rank]
    return {"alive": most[0], "measured": measured, "predicted": predicted, "left": left}
