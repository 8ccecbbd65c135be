"""Every sample of an epoch once, at any numbers of ranks, wherever the run was resumed; wrong arguments are named."""

import collections
import copy
import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset

from hpcfsdp.data.order import Blocks
from hpcfsdp.data.sampler import ResumableSampler
from hpcfsdp.errors import DataError, UsageError


class Numbers(Dataset):
    """Its sample is its number; of files, where it has blocks."""

    def __init__(self, lengths, size=None):
        self.lengths = lengths
        if size is not None:
            self.blocks = Blocks(np.array(lengths), size)

    def __len__(self):
        return sum(self.lengths)

    def __getitem__(self, index):
        return index


def take(samplers, steps):
    """What all ranks read in so many steps, fewer at the end of an epoch: by step, the samples of all ranks."""
    iterators = [iter(sampler) for sampler in samplers]
    found = []
    for _ in range(steps):
        batches = [next(each, None) for each in iterators]
        assert len({batch is None for batch in batches}) == 1, "ranks make the same number of steps"
        if batches[0] is None:
            break
        found.append([sample for batch in batches for sample in batch])
    return found


def of_ranks(dataset, ranks, **options):
    return [ResumableSampler(dataset, rank=rank, ranks=ranks, **options) for rank in range(ranks)]


def resumed(dataset, state, ranks, **options):
    """The samplers of another job, from a state that a file has had."""
    samplers = of_ranks(dataset, ranks, **options)
    for sampler in samplers:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return samplers


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=5).filter(any),
    st.none() | st.integers(1, 70),
    st.integers(8, 24),
    st.sampled_from(["drop", "pad", "uneven"]),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 8), st.integers(0, 12)), min_size=1, max_size=12),
    st.data(),
)
def test_each_epoch_has_each_sample_once(lengths, size, global_batch, tail, shuffle, legs, data):
    dataset, length = Numbers(lengths, size), sum(lengths)
    if tail != "uneven":
        legs = [(ranks, steps) for ranks, steps in legs if global_batch % ranks == 0] or [(1, 3)]
    if tail == "drop" and length < global_batch:
        return
    options = {"global_batch": global_batch, "tail": tail, "shuffle": shuffle, "seed": data.draw(st.integers())}
    whole = ResumableSampler(dataset, rank=0, ranks=1, **options)
    order, seen, state = {}, collections.defaultdict(list), whole.state_dict()
    for ranks, steps in [*legs, (1, 1000)]:
        samplers = resumed(dataset, state, ranks, **options)
        assert len({str(sampler.state_dict()) for sampler in samplers}) == 1
        epoch = samplers[0].epoch
        for batch in take(samplers, steps):
            seen[epoch] += batch
        state = samplers[0].state_dict()
    for epoch, found in seen.items():
        if epoch not in order:
            whole.set_epoch(epoch)
            order[epoch] = [sample for batch in take([whole], 1000) for sample in batch]
        assert found == order[epoch], "the order is that of one rank"
        real = found[:length]
        assert len(set(real)) == len(real)
        assert len(real) == (length // global_batch * global_batch if tail == "drop" else length)
        if tail == "pad":
            assert len(found) % global_batch == 0
            assert set(found[length:]) <= set(found)


@pytest.mark.parametrize("size", [None, 16])
def test_a_thousand_resumes_at_random(size):
    random, dataset = np.random.default_rng(0), Numbers([700, 45, 1200, 16], size)
    state, seen = None, collections.defaultdict(list)
    for _ in range(1000):
        ranks = int(random.integers(1, 9))
        samplers = of_ranks(dataset, ranks, global_batch=24, tail="uneven")
        for sampler in samplers if state is not None else ():
            sampler.load_state_dict(state)
        epoch = samplers[0].epoch
        for batch in take(samplers, int(random.integers(0, 9))):
            seen[epoch] += batch
        state = samplers[0].state_dict()
    finished = [sorted(seen[epoch]) for epoch in range(state["epoch"])]
    assert len(finished) > 30
    assert all(found == list(range(len(dataset))) for found in finished)


def test_another_global_batch_in_the_middle_of_an_epoch():
    for size in (None, 8):
        dataset = Numbers([100, 77], size)
        samplers = of_ranks(dataset, 2, global_batch=16, tail="uneven")
        seen = [sample for batch in take(samplers, 4) for sample in batch]
        samplers = resumed(dataset, samplers[1].state_dict(), 3, global_batch=9, tail="uneven")
        seen += [sample for batch in take(samplers, 1000) for sample in batch]
        assert sorted(seen) == list(range(177))
        assert (samplers[0].epoch, samplers[0].samples) == (1, 0)


def test_epochs_and_seeds_have_other_orders():
    orders = set()
    for seed in range(3):
        sampler = ResumableSampler(100, global_batch=10, seed=seed, rank=0, ranks=1)
        orders |= {str(take([sampler], 100)) for _ in range(3)}
    assert len(orders) == 9


def test_without_shuffle_the_order_is_that_of_the_set():
    assert take(of_ranks(10, 2, global_batch=4, shuffle=False, tail="pad"), 9) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 0, 1],
    ]


def test_a_loop_that_is_entered_again_goes_on():
    sampler = ResumableSampler(20, global_batch=4, rank=0, ranks=1)
    first = [batch for batch, _ in zip(sampler, range(2), strict=False)]
    assert sampler.samples == 12  # zip has asked for one that it did not use
    sampler = ResumableSampler(20, global_batch=4, rank=0, ranks=1)
    for batch in sampler:
        assert batch == first[0]
        break
    assert next(iter(sampler)) == first[1]
    sampler.set_epoch(0)
    assert sampler.samples == 8, "within the epoch nothing changes"
    sampler.set_epoch(5)
    assert (sampler.epoch, sampler.samples) == (5, 0)


def test_the_end_of_an_epoch_is_the_beginning_of_the_next():
    sampler = ResumableSampler(10, global_batch=4, rank=0, ranks=1)
    batches = iter(sampler)
    next(batches)
    assert (sampler.epoch, sampler.samples) == (0, 4)
    next(batches)
    assert (sampler.epoch, sampler.samples) == (1, 0), "two samples are dropped"
    assert next(batches, None) is None
    assert sampler.state_dict()["epoch"] == 1
    assert len(sampler) == 2
    assert len(list(sampler)) == 2


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_what_a_loader_reads_ahead_does_not_count(workers):
    sampler = ResumableSampler(40, global_batch=4, rank=0, ranks=1, shuffle=False)
    options = {"multiprocessing_context": "fork", "prefetch_factor": 3} if workers else {}
    loader = DataLoader(Numbers([40]), batch_sampler=sampler, num_workers=workers, **options)
    assert len(loader) == 10
    for epoch in range(2):
        for number, batch in enumerate(loader):
            assert batch.tolist() == list(range(4 * number, 4 * number + 4))
            assert (sampler.epoch, sampler.samples) == ((epoch, 4 * number + 4) if number < 9 else (epoch + 1, 0))
    for number, _ in enumerate(loader):
        if number == 2:
            break
    assert next(iter(loader)).tolist() == [12, 13, 14, 15], "what was only read ahead comes again"


def test_a_loader_of_the_program_is_not_the_one_that_asks():
    loader = DataLoader(Numbers([40]), num_workers=2, multiprocessing_context="spawn")
    sampler = ResumableSampler(40, global_batch=4, rank=0, ranks=1)
    for number, _ in enumerate(sampler):
        if number == 1:
            break
    assert (sampler.samples, loader.num_workers) == (8, 2)


def test_ranks_read_blocks_once_and_no_other_reads_them():
    dataset = Numbers([640, 320, 100], 16)
    samplers = of_ranks(dataset, 4, global_batch=8)
    for epoch in range(2):
        readers, last = collections.defaultdict(set), collections.Counter()
        for rank, sampler in enumerate(samplers):
            current = {}
            for batch in sampler:
                for lane, sample in enumerate(batch):
                    block = sample // 16 if sample < 960 else 60 + (sample - 960) // 16
                    readers[block].add(rank)
                    if current.get(lane) != block:
                        current[lane] = block
                        last[block] += 1
        assert sum(len(ranks) for ranks in readers.values()) <= len(readers) + 8, epoch
        assert last.total() <= len(readers) + 16, "a lane stays in a block until its end"


def test_consecutive_batches_are_of_many_blocks():
    sampler = ResumableSampler(Numbers([6400], 64), global_batch=16, rank=0, ranks=1)
    for batch in sampler:
        assert len({sample // 64 for sample in batch}) >= 14


def test_memory_does_not_grow_with_the_set():
    tracemalloc.start()
    sampler = ResumableSampler(10**10, global_batch=64, rank=1, ranks=4)
    batches = iter(sampler)
    for _ in range(1000):
        batch = next(batches)
    assert len(batch) == 16
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 << 20


def test_a_place_that_does_not_fit():
    sampler = ResumableSampler(100, global_batch=4, rank=0, ranks=1)
    next(iter(sampler))
    state = sampler.state_dict()
    other = ResumableSampler(96, global_batch=4, rank=0, ranks=1)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(DataError, match=r"after 4 of 100 samples, and the set has 96 now.*set_epoch\(1\)"):
        other.load_state_dict(state)
    with pytest.raises(DataError, match="seed was 0 and is 7"):
        ResumableSampler(100, global_batch=4, seed=7, rank=0, ranks=1).load_state_dict(state)
    with pytest.raises(DataError, match="files or chunks are others"):
        ResumableSampler(Numbers([100], 8), global_batch=4, rank=0, ranks=1).load_state_dict(state)
    with pytest.raises(DataError, match="lacks blocks, epoch"):
        other.load_state_dict({"samples": 3})
    with pytest.raises(DataError, match="samples is -4"):
        other.load_state_dict({**state, "samples": -4})
    assert other.state_dict() == before
    other.load_state_dict({**state, "epoch": 3, "samples": 0})  # of which nothing has been read yet
    assert other.epoch == 3


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"global_batch": 6}, "global_batch=6 cannot be divided among 4 ranks: take 4 or 8"),
        ({"global_batch": 2}, "no sample for some of 4 ranks"),
        ({"global_batch": 0}, "global_batch must be at least 1"),
        ({"global_batch": 1.5}, "global_batch must be a whole number"),
        ({"tail": "cut"}, "drop, pad, uneven, not 'cut'"),
        ({"rank": 4}, "4 of 4"),
        ({"ranks": None}, "give rank and ranks, or neither"),
    ],
)
def test_wrong_arguments(arguments, words):
    with pytest.raises(UsageError, match=words):
        ResumableSampler(100, **{"global_batch": 8, "rank": 0, "ranks": 4, **arguments})


def test_sets_with_too_few_samples():
    with pytest.raises(DataError, match="no samples"):
        ResumableSampler([], global_batch=2, rank=0, ranks=1)
    with pytest.raises(DataError, match="tail='drop' drops them all"):
        ResumableSampler([1], global_batch=2, rank=0, ranks=1)
    assert take(of_ranks(1, 2, global_batch=4, tail="pad"), 2) == [[0, 0, 0, 0]]


def test_ranks_that_are_not_connected_yet(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(UsageError, match=r"the job has 4 ranks.*call hpcfsdp.init\(\) first"):
        ResumableSampler(100, global_batch=8)
