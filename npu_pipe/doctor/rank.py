"""One rank that `npu-pipe doctor` has started on its own host: it tries, and its parent tells.

python -m npu_pipe.doctor.rank RESULTS DEVICE RANKS [CONFIG]
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from npu_pipe.doctor.document import to_json_value
from npu_pipe.doctor.subject import diagnosis_of, read_subject
from npu_pipe.launch.guard import guard
from npu_pipe.launch.host import this_host
from npu_pipe.launch.world import World

__all__ = ["TIMEOUT_S", "command_of", "main"]

TIMEOUT_S = 30.0
"""For ranks to come, and for one that hangs."""


def command_of(results: Path, *, device: str, ranks: int, config: Path | None) -> list[str]:
    """What to run after the interpreter. results: the file that rank 0 writes."""
    rest = [] if config is None else [str(config)]
    return ["-m", "npu_pipe.doctor.rank", str(results), device, str(ranks), *rest]


def main(argv: Sequence[str]) -> int:
    """Run one rank; returns the exit status."""
    world = World.from_environment()
    with guard(world):
        # After the guard: they take seconds to import.
        from npu_pipe.doctor.alone import Alone
        from npu_pipe.doctor.together import examine_together

        results, device, ranks, *config = argv
        path = Path(config[0]) if config else None
        subject = read_subject(path, ranks=int(ranks), device=device, started=False)
        found = examine_together(
            world,
            Alone(this_host().name),
            diagnosis_of(subject, world),
            schedule=subject.schedule,
            wanted=subject.wanted,
            timeout_s=TIMEOUT_S,
        )
        if world.rank == 0:
            Path(results).write_text(json.dumps(to_json_value(found)), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
