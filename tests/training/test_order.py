"""Any optimizer step finds its edits again, however they are cut."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmm4edit.training.order import FILLER, DataOrder


def edits(windows: list[list[list[int]]]) -> list[int]:
    return [index for window in windows for batch in window for index in batch if index != FILLER]


@settings(deadline=None)
@given(n=st.integers(1, 60), micro=st.integers(1, 5), accumulation=st.integers(1, 4), world=st.integers(1, 3))
def test_an_epoch_sees_every_edit_once(n: int, micro: int, accumulation: int, world: int) -> None:
    ranks = [DataOrder(n, micro, accumulation, seed=3, rank=rank, world_size=world) for rank in range(world)]
    for epoch in range(2):
        steps = range(epoch * ranks[0].steps_per_epoch, (epoch + 1) * ranks[0].steps_per_epoch)
        seen = [index for order in ranks for index in edits([order.window(step) for step in steps])]
        assert sorted(seen) == list(range(n))


@settings(deadline=None)
@given(n=st.integers(1, 60), micro=st.integers(1, 5), accumulation=st.integers(1, 4), world=st.integers(2, 3))
def test_processes_make_the_same_number_of_passes(n: int, micro: int, accumulation: int, world: int) -> None:
    ranks = [DataOrder(n, micro, accumulation, rank=rank, world_size=world) for rank in range(world)]
    for step in range(ranks[0].steps_per_epoch):
        windows = [order.window(step) for order in ranks]
        assert len({len(window) for window in windows}) == 1
        assert all(batch for window in windows for batch in window)
        assert len(windows[0]) <= accumulation


@settings(deadline=None)
@given(n=st.integers(1, 60), seed=st.integers(0, 5))
def test_a_window_holds_the_same_edits_however_it_is_cut(n: int, seed: int) -> None:
    whole = DataOrder(n, 4, 1, seed)
    parts = DataOrder(n, 1, 4, seed)
    shared = [DataOrder(n, 2, 1, seed, rank=rank, world_size=2) for rank in range(2)]
    for step in range(2 * whole.steps_per_epoch):
        expected = sorted(edits([whole.window(step)]))
        assert sorted(edits([parts.window(step)])) == expected
        assert sorted(edits([order.window(step) for order in shared])) == expected


def test_the_order_depends_on_seed_and_epoch() -> None:
    order = DataOrder(50, 50, seed=1)
    assert order.window(0) != order.window(1)
    assert order.window(0) != DataOrder(50, 50, seed=2).window(0)
    assert order.window(1) == DataOrder(50, 50, seed=1).window(1)


def test_continuing_gives_the_rest_of_the_same_sequence() -> None:
    order = DataOrder(10, 2, 2, seed=0)
    assert order.steps_per_epoch == 3
    everything = list(order.micro_batches(0, 6))
    taken = sum(len(order.window(step)) for step in range(4))
    assert list(order.micro_batches(4, 6)) == everything[taken:]


def test_a_process_with_nothing_left_gets_a_filler() -> None:
    windows = [DataOrder(1, 1, 1, rank=rank, world_size=2).window(0) for rank in range(2)]
    assert windows == [[[0]], [[FILLER]]]
