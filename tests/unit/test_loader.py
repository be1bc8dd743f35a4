"""The loader: the same bits with any number of workers, an exact position, failures in plain words."""

import itertools
import os

import numpy as np
import pytest
import torch

from fleetx import fleet
from fleetx.data.loader import Loader
from fleetx.data.sampler import FleetSampler
from fleetx.data.stateless_random import uniforms
from fleetx.errors import ConfigError, DataError, FleetWarning

# torch's own advice about machines with fewer cores than workers
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers:
    """Sample i of epoch e is (i, a random number of its own). `bad` samples cannot be read."""

    reads_files = True

    def __init__(self, length, *, bad=(), skip=False, plans_batches=False):
        self.length, self.bad, self.skip, self.plans_batches = length, set(bad), skip, plans_batches

    def __len__(self):
        return self.length

    def batch(self, epoch, indices):
        complaints = [f"list.txt, line {i + 1}: no such file." for i in indices if i in self.bad]
        if complaints and not self.skip:
            raise DataError(complaints[0])
        draws = uniforms(7, epoch, indices, 0)
        return (torch.from_numpy(np.asarray(indices)), torch.from_numpy(draws)), complaints

    def finish(self, batch):
        return batch[0], batch[1] + epoch_free_shift


epoch_free_shift = 1.0


def make(length=20, batch_size=4, *, rank=0, size=1, shuffle=True, source=None, **options):
    sampler = FleetSampler(length, rank=rank, size=size, shuffle=shuffle)
    return Loader(source or Numbers(length), batch_size, shuffle=shuffle, sampler=sampler, device=torch.device("cpu"), **options)


def flat(batches):
    return [(int(i), float(x)) for indices, draws in batches for i, x in zip(indices, draws, strict=True)]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_number_of_workers_does_not_change_a_bit(workers):
    alone, shared = make(workers=0), make(workers=workers)
    for _ in range(2):
        assert flat(alone) == flat(shared)


def test_every_epoch_has_its_own_order_and_its_own_random_numbers():
    loader = make(workers=0)
    first, second = flat(loader), flat(loader)
    assert sorted(i for i, _ in first) == sorted(i for i, _ in second) == list(range(20))
    assert [i for i, _ in first] != [i for i, _ in second]
    assert set(first).isdisjoint(second)


@pytest.mark.parametrize("workers_before,workers_after", [(0, 2), (3, 0), (2, 1)])
@pytest.mark.parametrize("size_before,size_after", [(1, 1), (2, 1), (1, 2), (2, 4)])
def test_a_resume_in_mid_epoch_reads_the_same_rest_with_other_workers_and_ranks(
    workers_before, workers_after, size_before, size_after
):
    def rows(loaders):
        """Global batches: what all ranks read in one step, in the epoch's own order."""
        for step in zip(*loaders, strict=True):
            columns = [flat([batch]) for batch in step]
            yield list(itertools.chain.from_iterable(zip(*columns, strict=True)))

    whole = [s for row in rows([make(48, 24, workers=0)]) for s in row]
    before = [make(48, 8 // size_before, rank=r, size=size_before, workers=workers_before) for r in range(size_before)]
    passes = rows(before)
    read = [s for _ in range(3) for s in next(passes)]
    states = [loader.state_dict() for loader in before]
    assert all(state == states[0] for state in states) and states[0]["consumed"] == 24

    after = [make(48, 8 // size_after, rank=r, size=size_after, workers=workers_after) for r in range(size_after)]
    for loader in after:
        loader.load_state_dict(states[0])
    assert [len(loader) for loader in after] == [6] * size_after  # the epoch's
    assert [loader.sampler.remaining for loader in after] == [24 // size_after] * size_after
    assert read + [s for row in rows(after) for s in row] == whole


def test_a_pass_left_by_break_begins_again_whatever_the_workers_drew_ahead():
    for workers in (0, 2):
        loader = make(workers=workers)
        first = flat([next(iter(loader))])
        assert flat(loader)[:4] == first


def test_a_state_saved_after_the_last_batch_is_the_start_of_the_next_epoch():
    loader = make(18, 4, workers=0)  # 4 batches, 2 samples left over
    for number, _ in enumerate(loader, start=1):
        if number == 4:
            assert loader.state_dict()["epoch"] == 1 and loader.state_dict()["consumed"] == 0
    assert loader.sampler.epoch == 1


def test_the_rest_of_an_epoch_that_is_less_than_a_batch_ends_the_epoch():
    loader = make(18, 4, workers=0)
    loader.load_state_dict({"seed": 0, "epoch": 3, "consumed": 16, "length": 18, "shuffle": True})
    assert list(loader) == []
    assert loader.sampler.epoch == 4 and len(flat(loader)) == 16


def test_evaluation_reads_every_sample_once_in_order():
    loader = make(10, 4, shuffle=False, workers=2)
    assert [int(i) for i, _ in flat(loader)] == list(range(10))
    assert len(loader) == 3


def test_the_loop_gets_finished_batches_and_torchs_random_numbers_stay_untouched():
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    for workers in (0, 2):
        assert all(1.0 <= x < 2.0 for _, x in flat(make(workers=workers)))
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_sample_is_one_data_error_after_the_good_batches_before_it(workers):
    loader = make(12, 4, shuffle=False, workers=workers, source=Numbers(12, bad=[9]))
    passes = iter(loader)
    assert len(flat([next(passes), next(passes)])) == 8
    with pytest.raises(DataError, match=r"^list.txt, line 10: no such file.$"):
        next(passes)


def test_skipped_samples_are_named_and_more_than_the_share_is_an_error():
    loader = make(10, 5, shuffle=False, workers=0, source=Numbers(10, bad=[1, 7], skip=True), max_bad_share=0.1)
    passes = iter(loader)
    with pytest.warns(FleetWarning, match=r"line 2: no such file. The next readable sample takes its place"):
        next(passes)
    with pytest.raises(DataError, match=r"line 8.* bad sample 2 of the 10 of this pass; allowed is a share of 0.1"):
        next(passes)


def test_a_source_that_plans_its_batches_is_read_one_by_one():
    loader = make(6, 4096, workers=0, source=Numbers(6, plans_batches=True))
    assert [len(indices) for indices, _ in loader] == [1] * 6


def test_too_few_samples_for_one_batch_is_an_error_and_never_an_empty_loop():
    with pytest.raises(DataError, match="5 samples on 2 workers are 3 for each: not one full batch of 4"):
        iter(make(5, 4, rank=1, size=2, workers=0))
    assert len(list(make(5, 4, rank=1, size=2, workers=0, drop_last=False))) == 1


def test_a_second_pass_inside_the_first_is_refused():
    loader = make(workers=0)
    outer = iter(loader)
    next(outer)
    assert len(list(loader)) == 5
    with pytest.raises(DataError, match="Make a second loader for the inner loop"):
        next(outer)


@pytest.mark.parametrize("options", [{"batch_size": 0}, {"batch_size": True}, {"workers": -1}, {"max_bad_share": 2}])
def test_wrong_arguments_are_named(options):
    with pytest.raises(ConfigError, match=f"loader: {next(iter(options))} = "):
        make(**options)


def test_without_a_job_the_whole_source_is_read_and_fleets_spelling_works():
    loader = Loader(Numbers(8), 4, shuffle=True, workers=0)
    assert len(list(loader())) == len(loader) == 2
    assert loader.device == fleet.device()


def test_files_get_a_worker_for_each_core_of_this_rank_and_memory_none(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(len(os.sched_getaffinity(0))))
    source = Numbers(8)
    assert Loader(source, 4, shuffle=True)._workers.count == 1
    source.reads_files = False
    assert Loader(source, 4, shuffle=True)._workers.count == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("workers", [0, 2])
def test_on_a_gpu_every_batch_is_the_cpus_while_long_kernels_run_and_memory_is_reused(workers):
    class Wide(Numbers):
        """Large enough for the allocator to hand the same memory out again and again."""

        def batch(self, epoch, indices):
            (numbers, draws), complaints = super().batch(epoch, indices)
            return (numbers, draws.repeat(100_000, 1)), complaints

    on_cpu = make(48, 4, workers=0, source=Wide(48))
    sampler = FleetSampler(48, rank=0, size=1)
    loader = Loader(Wide(48), 4, shuffle=True, sampler=sampler, device=torch.device("cuda"), workers=workers)
    weight = torch.randn(3000, 3000, device="cuda")
    sums = []
    for numbers, draws in loader:
        for _ in range(20):
            weight = (weight @ weight).tanh()  # the loop is behind the loader by many kernels
        sums.append((numbers.clone(), draws.sum(dim=0)))
        del numbers, draws
    for (numbers, total), (expected, draws) in zip(sums, on_cpu, strict=True):
        assert torch.equal(numbers.cpu(), expected)
        torch.testing.assert_close(total.cpu(), draws.sum(dim=0), rtol=1e-12, atol=0)
    assert loader.state_dict() == on_cpu.state_dict()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_bad_sample_comes_after_the_good_batches_before_it():
    sampler = FleetSampler(12, rank=0, size=1, shuffle=False)
    loader = Loader(Numbers(12, bad=[9]), 4, shuffle=False, sampler=sampler, device=torch.device("cuda"), workers=0)
    passes = iter(loader)
    assert len(flat([next(passes), next(passes)])) == 8 and loader.state_dict()["consumed"] == 8
    with pytest.raises(DataError, match="line 10"):
        next(passes)


def test_it_says_what_it_reads():
    assert repr(make(20, 4, workers=2)) == "Loader(Numbers of 20, batch_size=4, workers=2)"
    planned = make(6, 4096, workers=0, source=Numbers(6, plans_batches=True))
    assert repr(planned) == "Loader(Numbers of 6, batch_size=as planned, workers=0)"
