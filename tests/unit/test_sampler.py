"""The sampler: who reads what, in which order, and where a resumed run goes on."""

from __future__ import annotations

import itertools
import json
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset

from fleetx.data.sampler import FleetSampler, epoch_order, shard, shard_length
from fleetx.errors import CheckpointError, ConfigError, DataError, FleetWarning

lengths = st.integers(1, 200)
sizes = st.integers(1, 12)
seeds = st.integers(0, 2**64)
properties = settings(deadline=None, max_examples=150)

GOLDEN = [6, 3, 8, 1, 4, 5, 9, 2, 7, 0]


def fleet_of(length: int, size: int, **options: object) -> list[FleetSampler]:
    return [FleetSampler(length, rank=rank, size=size, **options) for rank in range(size)]  # type: ignore[arg-type]


def global_order(samplers: list[FleetSampler]) -> list[int]:
    """One pass of all ranks, row by row: the order in which the fleet as a whole reads."""
    rows = itertools.zip_longest(*[list(sampler) for sampler in samplers])
    return [index for row in rows for index in row if index is not None]


def draw_rows(samplers: list[FleetSampler], rows: int) -> list[int]:
    iterators = [iter(sampler) for sampler in samplers]
    return [next(iterator) for _ in range(rows) for iterator in iterators]


def saved_state(samplers: list[FleetSampler]) -> dict[str, int | bool]:
    states = [sampler.state_dict() for sampler in samplers]
    if samplers[0].shuffle:  # in evaluation a shorter shard may be through already: rank 0's position is the one to save
        assert all(state == states[0] for state in states)
    return json.loads(json.dumps(states[0]))  # type: ignore[no-any-return]


def resumed(state: dict[str, int | bool], length: int, size: int, **options: object) -> list[FleetSampler]:
    samplers = fleet_of(length, size, **options)
    for sampler in samplers:
        sampler.load_state_dict(state)
    return samplers


# --- the order


@properties
@given(length=lengths, seed=seeds, epoch=st.integers(0, 10**9))
def test_every_epoch_is_a_permutation(length: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_order(length, seed=seed, epoch=epoch, shuffle=True).tolist()) == list(range(length))


def test_the_order_is_the_same_on_every_machine_for_ever() -> None:
    assert epoch_order(10, seed=0, epoch=0, shuffle=True).tolist() == GOLDEN
    assert epoch_order(4, seed=0, epoch=7, shuffle=False).tolist() == [0, 1, 2, 3]


def test_epochs_and_seeds_give_different_orders() -> None:
    pairs = [(0, 0), (0, 1), (1, 0), (1, 1), (2**32, 0), (2**32, 1)]
    orders = {tuple(epoch_order(100, seed=seed, epoch=epoch, shuffle=True).tolist()) for seed, epoch in pairs}
    assert len(orders) == len(pairs)


def test_no_global_generator_is_read_or_moved() -> None:
    def global_states() -> tuple[object, ...]:
        return random.getstate(), str(np.random.get_state()), torch.get_rng_state().tolist()  # noqa: NPY002, RUF100

    before = global_states()
    first = list(FleetSampler(50, rank=0, size=2))
    assert global_states() == before
    torch.manual_seed(123)
    assert list(FleetSampler(50, rank=0, size=2)) == first


# --- the shards


def test_ranks_take_positions_by_stride() -> None:
    order = np.arange(10, 17)
    assert shard(order, rank=1, size=3, start=0, tail="ragged").tolist() == [11, 14]
    assert shard(order, rank=1, size=3, start=0, tail="cut").tolist() == [11, 14]
    assert shard(order, rank=1, size=3, start=0, tail="pad").tolist() == [11, 14, 10]
    assert shard(order, rank=0, size=3, start=5, tail="ragged").tolist() == [15]


@properties
@given(length=lengths, size=sizes, seed=seeds)
def test_evaluation_reads_every_sample_exactly_once(length: int, size: int, seed: int) -> None:
    shards = [list(sampler) for sampler in fleet_of(length, size, shuffle=False, seed=seed)]
    assert sorted(itertools.chain(*shards)) == list(range(length))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert len(shards[0]) == max(map(len, shards))


@properties
@given(length=lengths, size=sizes, seed=seeds)
def test_training_counts_are_equal_and_every_sample_is_read(length: int, size: int, seed: int) -> None:
    shards = [list(sampler) for sampler in fleet_of(length, size, seed=seed)]
    assert {len(indices) for indices in shards} == {-(-length // size)}
    times = Counter(itertools.chain(*shards))
    assert set(times) == set(range(length))
    assert max(times.values()) - min(times.values()) <= 1


@properties
@given(length=lengths, size=sizes, shuffle=st.booleans())
def test_drop_last_gives_equal_counts_without_duplicates(length: int, size: int, shuffle: bool) -> None:
    if length < size:
        with pytest.raises(DataError, match=f"{length} samples on {size} ranks"):
            fleet_of(length, size, shuffle=shuffle, drop_last=True)
        return
    shards = [list(sampler) for sampler in fleet_of(length, size, shuffle=shuffle, drop_last=True)]
    assert {len(indices) for indices in shards} == {length // size}
    assert len(set(itertools.chain(*shards))) == length // size * size


@properties
@given(length=lengths, seed=seeds, epoch=st.integers(0, 20))
def test_the_global_order_is_the_same_for_any_number_of_ranks_up_to_the_pad(length: int, seed: int, epoch: int) -> None:
    order = epoch_order(length, seed=seed, epoch=epoch, shuffle=True).tolist()
    for size in (1, 2, 3, 4, 8):
        samplers = fleet_of(length, size, seed=seed)
        for sampler in samplers:
            sampler.set_epoch(epoch)
        read = global_order(samplers)
        assert read[:length] == order
        assert read[length:] == list(itertools.islice(itertools.cycle(order), len(read) - length))
        assert len(read) - length < size


@properties
@given(length=lengths, size=sizes)
def test_padding_without_shuffling_gives_equal_counts_in_the_datas_own_order(length: int, size: int) -> None:
    samplers = fleet_of(length, size, shuffle=False, pad=True)
    assert {len(sampler) for sampler in samplers} == {-(-length // size)}
    read = global_order(samplers)
    assert read[:length] == list(range(length))
    assert read[length:] == [index % length for index in range(len(read) - length)]
    assert len(read) == -(-length // size) * size


@properties
@given(length=lengths, size=sizes, seed=seeds)
def test_shuffling_without_padding_reads_every_sample_exactly_once(length: int, size: int, seed: int) -> None:
    samplers = fleet_of(length, size, pad=False, seed=seed)
    assert global_order(samplers) == epoch_order(length, seed=seed, epoch=0, shuffle=True).tolist()


def test_a_state_says_nothing_of_padding_and_loads_whatever_it_is() -> None:
    """So that checkpoints from before `pad` load, and a run may begin to pad."""
    before = fleet_of(10, 2, shuffle=False)
    draw_rows(before, 2)
    state = saved_state(before)
    assert set(state) == {"seed", "epoch", "consumed", "length", "shuffle"}
    after = resumed(state, 10, 4, shuffle=False, pad=True)
    assert global_order(after) == [4, 5, 6, 7, 8, 9, 0, 1]
    assert saved_state(resumed(state, 10, 3, shuffle=False, pad=True)) == state


def test_fewer_samples_than_ranks_wrap_more_than_once() -> None:
    order = epoch_order(2, seed=0, epoch=0, shuffle=True).tolist()
    assert global_order(fleet_of(2, 5)) == [*order, *order, order[0]]


@properties
@given(length=lengths, size=sizes, start=st.integers(0, 220), tail=st.sampled_from(["pad", "cut", "ragged"]))
def test_the_length_is_what_is_yielded(length: int, size: int, start: int, tail: str) -> None:
    for rank in range(size):
        where = {"rank": rank, "size": size, "start": start, "tail": tail}
        assert shard_length(length, **where) == len(shard(np.arange(length), **where))  # type: ignore[arg-type]


# --- epochs


def test_the_epoch_advances_by_itself_after_a_complete_pass() -> None:
    forgetful, careful = FleetSampler(20, rank=1, size=2), FleetSampler(20, rank=1, size=2)
    for epoch in range(4):
        careful.set_epoch(epoch)
        assert forgetful.epoch == epoch
        assert list(forgetful) == list(careful)


def test_the_same_epoch_can_be_asked_for_again() -> None:
    sampler = FleetSampler(20, rank=0, size=1)
    first = list(sampler)
    sampler.set_epoch(0)
    assert list(sampler) == first


def test_an_abandoned_pass_starts_again() -> None:
    sampler = FleetSampler(20, rank=0, size=1)
    peeked = [next(iter(sampler)) for _ in range(3)]
    assert list(sampler)[:1] * 3 == peeked
    assert sampler.epoch == 1


def test_an_iterator_left_behind_does_not_move_the_position() -> None:
    sampler = FleetSampler(20, rank=0, size=1)
    old, new = iter(sampler), iter(sampler)
    list(old)
    next(new)
    assert (sampler.epoch, sampler.state_dict()["consumed"]) == (0, 1)


# --- the position


@properties
@given(data=st.data(), length=lengths, seed=seeds, shuffle=st.booleans())
def test_resume_reads_exactly_the_rest_also_with_other_sizes_and_twice(
    data: st.DataObject, length: int, seed: int, shuffle: bool
) -> None:
    options = {"seed": seed, "shuffle": shuffle}
    samplers, read, total = fleet_of(length, data.draw(sizes), **options), [], 0
    for _ in range(2):
        size = len(samplers)
        rows = data.draw(st.integers(0, max((length - total - 1) // size, 0)))
        read += draw_rows(samplers, rows)
        total += rows * size
        state = saved_state(samplers)
        assert state == {"seed": seed, "epoch": 0, "consumed": total, "length": length, "shuffle": shuffle}
        samplers = resumed(state, length, data.draw(sizes), **options)
    promised = [sampler.remaining for sampler in samplers]
    rest = global_order(samplers)
    order = epoch_order(length, seed=seed, epoch=0, shuffle=shuffle).tolist()
    assert len(rest) == sum(promised)
    assert (read + rest)[:length] == order
    assert len(read + rest) == length if not shuffle else len(read + rest) - length < len(samplers)
    assert {sampler.epoch for sampler in samplers} == {1}
    assert global_order(samplers)[:length] == epoch_order(length, seed=seed, epoch=1, shuffle=shuffle).tolist()


def test_a_global_batch_holds_the_same_samples_after_a_change_of_size() -> None:
    before = fleet_of(64, 4)
    draw_rows(before, 4)  # one global batch of 16
    after = resumed(saved_state(before), 64, 2)
    assert draw_rows(after, 8) == epoch_order(64, seed=0, epoch=0, shuffle=True)[16:32].tolist()


def test_the_end_of_an_epoch_is_the_start_of_the_next() -> None:
    sampler = FleetSampler(10, rank=0, size=4)
    list(itertools.islice(sampler, 3))
    assert sampler.state_dict() == {"seed": 0, "epoch": 1, "consumed": 0, "length": 10, "shuffle": True}


def test_length_is_the_epochs_and_remaining_is_the_rest_after_loading() -> None:
    (sampler,) = resumed({"seed": 0, "epoch": 3, "consumed": 6, "length": 10, "shuffle": True}, 10, 1)
    assert (len(sampler), sampler.remaining) == (10, 4)
    assert list(sampler) == epoch_order(10, seed=0, epoch=3, shuffle=True)[6:].tolist()
    assert (len(sampler), sampler.remaining) == (10, 10)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_resumed_step_count_gives_the_right_epoch_with_a_loader(workers: int) -> None:
    """As loops count: `epoch = step // len(loader)`, and a total of `epochs * len(loader)` steps."""
    sampler = FleetSampler(50, rank=1, size=2)
    state = {"seed": 0, "epoch": 1, "consumed": 16, "length": 50, "shuffle": True}
    sampler.load_state_dict(state)
    loader: DataLoader[int] = DataLoader(range(50), batch_size=4, sampler=sampler, num_workers=workers)  # type: ignore[arg-type]
    step = 7 + 2  # one epoch of 7 batches, and 2 of the next
    assert (len(loader), step // len(loader)) == (7, sampler.epoch)
    for _ in range(sampler.epoch, 3):
        step += sum(1 for _ in loader)
    assert (step, len(loader)) == (3 * len(loader), 7)


def test_a_batch_sampler_over_a_resumed_sampler_has_the_epochs_length_and_yields_the_rest() -> None:
    (sampler,) = resumed({"seed": 0, "epoch": 0, "consumed": 6, "length": 10, "shuffle": False}, 10, 1, shuffle=False)
    batches = BatchSampler(sampler, 3, drop_last=False)
    loader: DataLoader[int] = DataLoader(range(10), batch_sampler=batches)  # type: ignore[arg-type]
    assert len(loader) == 4
    assert [batch.tolist() for batch in loader] == [[6, 7, 8], [9]]


def test_remaining_falls_as_the_loop_reads() -> None:
    sampler = FleetSampler(10, rank=0, size=2)
    left = [sampler.remaining] + [sampler.remaining for _ in sampler]
    assert left == [5, 4, 3, 2, 1, 5]  # the last one is the next epoch's: so is the position


def test_peeking_at_a_batch_keeps_the_loaded_position() -> None:
    (sampler,) = resumed({"seed": 0, "epoch": 3, "consumed": 6, "length": 10, "shuffle": True}, 10, 1)
    next(iter(sampler))
    sampler.set_epoch(3)
    assert list(sampler) == epoch_order(10, seed=0, epoch=3, shuffle=True)[6:].tolist()


def test_set_epoch_keeps_a_loaded_position_of_that_epoch_and_leaves_one_of_another() -> None:
    state: dict[str, int | bool] = {"seed": 0, "epoch": 3, "consumed": 6, "length": 10, "shuffle": True}
    same, later, earlier = (resumed(state, 10, 1)[0] for _ in range(3))
    same.set_epoch(3)
    later.set_epoch(4)
    with pytest.warns(FleetWarning, match=r"set_epoch\(2\) goes back from the loaded position \(epoch 3, 6 samples"):
        earlier.set_epoch(2)
    assert [(s.epoch, s.state_dict()["consumed"]) for s in (same, later, earlier)] == [(3, 6), (4, 0), (2, 0)]


def test_a_rest_smaller_than_one_row_is_an_empty_pass_with_drop_last() -> None:
    samplers = resumed({"seed": 0, "epoch": 0, "consumed": 9, "length": 10, "shuffle": True}, 10, 4, drop_last=True)
    assert global_order(samplers) == []
    assert {sampler.epoch for sampler in samplers} == {1}


# --- with a DataLoader


def epoch_of_batches(loader: DataLoader[int]) -> list[int]:
    return [index for batch in loader for index in batch.tolist()]


def test_loader_without_workers_draws_one_batch_at_a_time() -> None:
    sampler = FleetSampler(range(20), rank=1, size=2)
    loader: DataLoader[int] = DataLoader(range(20), batch_size=3, sampler=sampler)  # type: ignore[arg-type]
    assert len(loader) == 4
    consumed = [(sampler.epoch, sampler.state_dict()["consumed"]) for _ in loader]
    assert consumed == [(0, 6), (0, 12), (0, 18), (1, 0)]


@pytest.mark.parametrize("batch_size", [3, None])
def test_what_is_to_be_done_when_resumed_comes_after_the_loaders_own_draw(batch_size: int | None) -> None:
    """It draws a seed when a pass begins: before it asks the sampler for an iterator, or after that where it makes no batches."""
    (sampler,) = fleet_of(20, 1)
    sampler.load_state_dict({**sampler.state_dict(), "consumed": 6})
    sampler.when_resumed(lambda: torch.set_rng_state(saved))
    saved = torch.get_rng_state()
    next(iter(DataLoader(range(20), batch_size=batch_size, sampler=sampler)))  # type: ignore[arg-type]
    torch.testing.assert_close(torch.get_rng_state(), saved, rtol=0, atol=0)


def test_loader_resumes_after_the_saved_batch() -> None:
    samplers = fleet_of(20, 2)
    for sampler in samplers:
        next(iter(DataLoader(range(20), batch_size=3, sampler=sampler)))  # type: ignore[arg-type]
    (sampler,) = resumed(saved_state(samplers), 20, 1)
    loader: DataLoader[int] = DataLoader(range(20), batch_size=4, sampler=sampler)  # type: ignore[arg-type]
    assert epoch_of_batches(loader) == epoch_order(20, seed=0, epoch=0, shuffle=True)[6:].tolist()
    assert epoch_of_batches(loader) == epoch_order(20, seed=0, epoch=1, shuffle=True).tolist()


def test_loader_that_drops_its_last_batch_still_advances() -> None:
    sampler = FleetSampler(10, rank=0, size=1)
    loader: DataLoader[int] = DataLoader(range(10), batch_size=4, sampler=sampler, drop_last=True)  # type: ignore[arg-type]
    for epoch in range(3):
        read = []
        for batch in loader:
            sampler.seen(len(batch))
            read += batch.tolist()
        assert read == epoch_order(10, seed=0, epoch=epoch, shuffle=True)[:8].tolist()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_seen_gives_the_exact_position_when_workers_draw_ahead() -> None:
    sampler = FleetSampler(64, rank=0, size=2)
    loader: DataLoader[int] = DataLoader(range(64), batch_size=4, sampler=sampler, num_workers=2)  # type: ignore[arg-type]
    batches = iter(loader)
    read = next(batches).tolist()
    assert sampler.state_dict()["consumed"] > 8  # drawn ahead: this is why seen() exists
    sampler.seen(4)
    assert sampler.state_dict()["consumed"] == 8
    read += next(batches).tolist()
    sampler.seen(4)
    after = FleetSampler(64, rank=0, size=2)
    after.load_state_dict(sampler.state_dict())
    for batch in batches:
        sampler.seen(len(batch))
    assert sampler.state_dict() == {"seed": 0, "epoch": 1, "consumed": 0, "length": 64, "shuffle": True}
    resumed_loader: DataLoader[int] = DataLoader(range(64), batch_size=4, sampler=after, num_workers=2)  # type: ignore[arg-type]
    assert read + epoch_of_batches(resumed_loader) == epoch_order(64, seed=0, epoch=0, shuffle=True)[::2].tolist()
    assert epoch_of_batches(resumed_loader) == epoch_order(64, seed=0, epoch=1, shuffle=True)[::2].tolist()


def test_seen_counts_afresh_in_each_pass() -> None:
    sampler = FleetSampler(10, rank=0, size=1)
    list(sampler)
    sampler.seen(10)
    next(iter(sampler))
    assert (sampler.epoch, sampler.state_dict()["consumed"]) == (1, 1)


# --- refusals


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))

    def __len__(self) -> int:
        return 3


class NoLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


@pytest.mark.parametrize("dataset", [Stream(), NoLength()])
def test_a_dataset_that_cannot_be_indexed_is_told_how_to_share_itself_out(dataset: object) -> None:
    with pytest.raises(DataError, match=rf"{type(dataset).__name__} cannot .*fleet\.worker_index\(\)"):
        FleetSampler(dataset, rank=0, size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("empty", [0, [], -1])
def test_an_empty_dataset_is_refused(empty: object) -> None:
    with pytest.raises(DataError, match="at least 1 is needed"):
        FleetSampler(empty, rank=0, size=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"rank": 2, "size": 2}, "rank=2 with size=2"),
        ({"rank": -1, "size": 2}, "rank = -1"),
        ({"rank": 0, "size": 0}, "size = 0"),
        ({"rank": 0, "size": True}, "size = True"),
        ({"rank": 0, "size": 1, "seed": -3}, "seed = -3"),
        ({"rank": 0, "size": 1, "seed": 0.5}, "seed = 0.5"),
        ({"rank": 0, "size": 1, "shuffle": "no"}, "shuffle = 'no'"),
        ({"rank": 0, "size": 1, "drop_last": 1}, "drop_last = 1"),
        ({"rank": 0, "size": 1, "pad": "yes"}, "pad = 'yes'"),
        ({"rank": 0, "size": 1, "pad": True, "drop_last": True}, "pad = True with drop_last=True"),
        ({"rank": 0, "size": 1, "pad": False, "drop_last": True}, "pad = False with drop_last=True"),
    ],
)
def test_a_wrong_setting_is_named_with_its_value(wrong: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        FleetSampler(10, **wrong)  # type: ignore[arg-type]


def test_a_wrong_epoch_is_refused() -> None:
    with pytest.raises(ConfigError, match="epoch = -1"):
        FleetSampler(10, rank=0, size=1).set_epoch(-1)


def test_seen_cannot_run_ahead_of_what_was_handed_out() -> None:
    sampler = FleetSampler(10, rank=0, size=1)
    with pytest.raises(DataError, match="only 0 were handed out"):
        sampler.seen(1)
    list(itertools.islice(sampler, 4))
    sampler.seen(3)
    with pytest.raises(DataError, match="makes 5 local samples used in this pass, but only 4"):
        sampler.seen(2)
    assert sampler.state_dict()["consumed"] == 3


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"length": 11}, "length = 11, this run has length = 10"),
        ({"seed": 5}, "seed = 5, this run has seed = 0"),
        ({"shuffle": False}, "shuffle = False, this run has shuffle = True"),
        ({"consumed": 11}, "consumed = 11"),
        ({"consumed": 2.5}, "consumed = 2.5"),
        ({"epoch": -1}, "epoch = -1"),
        ({"epoch": True}, "epoch = True"),
        ({"rank": 0}, "holds .*'rank'"),
    ],
)
def test_a_state_of_another_run_is_refused_with_both_values(change: dict[str, object], sentence: str) -> None:
    sampler = FleetSampler(10, rank=0, size=1)
    list(itertools.islice(sampler, 4))
    state = sampler.state_dict()
    with pytest.raises(CheckpointError, match=sentence):
        sampler.load_state_dict({**state, **change})
    assert sampler.state_dict() == state
