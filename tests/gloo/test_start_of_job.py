"""All ranks of one start find each other in a store that remembers earlier starts."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from npu_pipe.comm.meeting import agree_on_start
from npu_pipe.errors import PeerError

pytestmark = pytest.mark.timeout(60)

RANKS = 4


def start(store: dist.Store, delays_s: list[float]) -> list[str]:
    """What each rank finds, each coming after its delay."""

    def come(rank: int) -> str:
        time.sleep(delays_s[rank])
        return agree_on_start(store, rank, len(delays_s), place="here", connect_s=10)

    with ThreadPoolExecutor(len(delays_s)) as pool:
        return list(pool.map(come, range(len(delays_s))))


@pytest.mark.parametrize("late", range(RANKS))
def test_ranks_that_come_before_rank_0_do_not_take_an_earlier_start_for_theirs(late: int) -> None:
    store = dist.HashStore()
    names = set()
    for _ in range(3):
        found = start(store, [0.5 if rank == late else 0 for rank in range(RANKS)])
        assert len(set(found)) == 1, "all ranks of a start agree"
        names.update(found)
    assert len(names) == 3, "each start has a name of its own"


def test_a_start_in_which_a_rank_was_missing_is_not_gone_on_with() -> None:
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        alone = list(
            pool.map(lambda r: agree_on_start(store, r, 3, place="here", connect_s=0.5), range(2))
        )
    found = start(store, [0.3, 0, 0])
    assert len(set(found)) == 1
    assert found[0] not in alone


def test_one_rank_needs_nobody() -> None:
    assert start(dist.HashStore(), [0])[0]


def test_without_rank_0_the_others_name_it_and_not_each_other() -> None:
    """Each went on by a word of its own, and missed all that had done the same."""
    with pytest.raises(PeerError, match=r"rank 2 waited in vain for rank 0; "):
        agree_on_start(dist.HashStore(), 2, 3, place="here", connect_s=0.2)
