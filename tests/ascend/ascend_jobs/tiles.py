"""Jobs whose boundaries are crossed in tiles, on device npu."""

from __future__ import annotations

from functools import partial

from jobs import tiles_on_device

equals_cpu = partial(tiles_on_device.equals_cpu, kind="npu")
