"""Sets of HDF5 files: every way in which HDF5 stores numbers, wrong files, forks, threads, pickles."""

import multiprocessing
import os
import pickle
import threading

import h5py
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.data import HDF5Dataset, ResumableSampler
from hpcfsdp.errors import DataError, UsageError

X = np.random.default_rng(0).normal(size=(50, 3, 4)).astype(np.float32)
WAYS = {
    "contiguous": {},
    "chunks": {"chunks": (8, 3, 4)},
    "chunks of a part of a sample": {"chunks": (8, 2, 4)},
    "larger chunks than samples": {"chunks": (8, 5, 4), "maxshape": (None, None, 4)},
    "gzip": {"chunks": (8, 3, 4), "compression": "gzip"},
    "gzip and shuffle": {"chunks": (8, 3, 4), "compression": "gzip", "shuffle": True},
    "shuffle": {"chunks": (8, 3, 4), "shuffle": True},
    "lzf": {"chunks": (8, 3, 4), "compression": "lzf"},
    "fletcher32": {"chunks": (8, 3, 4), "fletcher32": True},
}


def write(path, **fields):
    with h5py.File(path, "w", userblock_size=fields.pop("userblock", 0)) as file:
        for name, (values, options) in fields.items():
            file.create_dataset(name, data=values, **options)
    return path


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["<f4", ">f4", "<f2", "<i8", "<u1", "?", "<c8"])
def test_numbers_however_they_are_stored(tmp_path, way, dtype):
    values = (X * 50).astype(dtype) if dtype != "<u1" else (X * 20 + 100).astype(dtype)
    paths = [write(tmp_path / f"{number}.h5", x=(part, WAYS[way])) for number, part in enumerate((values, values[:11]))]
    found = HDF5Dataset(paths, "x")
    assert len(found) == 61
    expected = torch.from_numpy(np.concatenate([values, values[:11]]).astype(np.dtype(dtype).newbyteorder("=")))
    order = np.random.default_rng(1).permutation(61)
    assert torch.equal(found.batch(order), expected[order])
    assert torch.equal(found[60], expected[60])
    assert torch.equal(found[-1], expected[60])
    assert all(torch.equal(a, b) for a, b in zip(found.__getitems__([3, 50, 3]), expected[[3, 50, 3]], strict=True))


def test_numbers_behind_a_user_block_and_fill_values(tmp_path):
    write(tmp_path / "a.h5", x=(X, WAYS["chunks"]), userblock=512)
    with h5py.File(tmp_path / "b.h5", "w") as file:
        file.create_dataset("x", (50, 3, 4), "f4", chunks=(8, 3, 4), fillvalue=7)[:8] = X[:8]
    with h5py.File(tmp_path / "c.h5", "w") as file:
        file.create_dataset("x", (50, 3, 4), "f4", fillvalue=5)
    found = HDF5Dataset(tmp_path, "x").batch(range(150))
    assert np.array_equal(found[:58], np.concatenate([X, X[:8]]))
    assert (found[58:100] == 7).all()
    assert (found[100:] == 5).all()


def test_bfloat16_and_marked_types(tmp_path):
    values = torch.from_numpy(X).bfloat16()
    words = values.view(torch.uint16).numpy()
    with h5py.File(tmp_path / "a.h5", "w") as file:
        for name, options in (("plain", {}), ("gzip", {"chunks": (8, 3, 4), "compression": "gzip"})):
            file.create_dataset(name, (50, 3, 4), h5py.Datatype(schema.hdf5_type("bfloat16")), **options)
            space = h5py.h5s.create_simple(words.shape)
            file[name].id.write(space, space, words, schema.hdf5_type("bfloat16"))
        file.create_dataset("marked", data=words).attrs["torch_dtype"] = "bfloat16"
    found = HDF5Dataset(tmp_path / "a.h5", ["plain", "gzip", "marked"]).batch([4, 1, 40])
    assert all(torch.equal(found[name], values[[4, 1, 40]]) for name in ("plain", "gzip", "marked"))


def test_rows_of_variable_length_and_strings(tmp_path):
    rows = [np.arange(number % 5, dtype=np.int32) for number in range(30)]
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_dataset("rows", (30,), h5py.vlen_dtype(np.int32))[:] = np.array(rows, object)
        file.create_dataset("text", data=[f"número {n}" for n in range(30)], dtype=h5py.string_dtype())
        file.create_dataset("fixed", data=np.array([f"n{n}" for n in range(30)], "S4"), chunks=(7,))
        file.create_dataset("y", data=np.arange(30.0))
    found = HDF5Dataset(str(tmp_path / "*.h5"), {"r": "rows", "t": "text", "f": "fixed", "y": "y"})
    batch = found.batch([7, 3])
    assert [row.tolist() for row in batch["r"]] == [[0, 1], [0, 1, 2]]
    assert (batch["t"], batch["f"], batch["y"].tolist()) == (["número 7", "número 3"], ["n7", "n3"], [7.0, 3.0])
    assert {name: found[29][name] for name in "tf"} == {"t": "número 29", "f": "n29"}
    assert found[29]["y"].item() == 29


def test_a_set_of_a_virtual_dataset_and_of_nothing_in_a_sample(tmp_path):
    write(tmp_path / "a.h5", x=(X, {}), none=(np.empty((50, 0)), {}))
    layout = h5py.VirtualLayout((50, 3, 4), "f4")
    layout[:] = h5py.VirtualSource(str(tmp_path / "a.h5"), "x", (50, 3, 4))
    with h5py.File(tmp_path / "v.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    assert np.array_equal(HDF5Dataset(tmp_path / "v.h5", "x").batch(range(50)), X)
    assert HDF5Dataset(tmp_path / "a.h5", "none").batch([3, 4]).shape == (2, 0)


def test_an_empty_batch_has_the_shape_of_samples(tmp_path):
    found = HDF5Dataset(write(tmp_path / "a.h5", x=(X, {})), "x")
    assert found.batch([]).shape == (0, 3, 4)


@pytest.mark.parametrize("way", ["gzip", "chunks", "lzf"])
def test_with_the_sampler_each_chunk_is_read_once(tmp_path, monkeypatch, way):
    values = np.arange(500 * 4, dtype=np.float32).reshape(500, 4)
    options = WAYS[way] | {"chunks": (16, 4)}
    found = HDF5Dataset([write(tmp_path / f"{n}.h5", x=(values + n, options)) for n in range(3)], "x", block=16)
    assert found.blocks.size == 16
    reads = []
    for name in ("_decoded", "_through_h5py", "_find"):
        method = getattr(type(found._opened(0)["x"]), name)
        spy = lambda self, *args, method=method: (reads.append((self._file.path, *args)), method(self, *args))[1]  # noqa: E731
        monkeypatch.setattr(type(found._opened(0)["x"]), name, spy)
    sampler = ResumableSampler(found, global_batch=20, tail="uneven", rank=0, ranks=1)
    seen = torch.cat([found.batch(indices) for indices in sampler])
    expected = np.concatenate([values + n for n in range(3)])
    assert np.array_equal(seen[np.lexsort(seen.T.numpy())], expected[np.lexsort(expected.T)])
    assert len(reads) == len(set(reads)) == 3 * 32


def test_a_small_cache_warns_and_reads_right(tmp_path, caplog):
    found = HDF5Dataset(write(tmp_path / "a.h5", x=(X, WAYS["gzip"])), "x", cache_bytes=800)
    for _ in range(2):
        assert np.array_equal(found.batch(range(0, 50, 7)), X[::7])
    assert len([each for each in caplog.records if "cache_bytes" in each.message]) == 1


def _wrong_files(folder):
    write(folder / "a.h5", x=(X, {}), y=(X[:, 0], {}))
    write(folder / "b.h5", x=(X, {}))
    write(folder / "c.h5", x=(X[:, :2], {}), y=(X[:, 0], {}))
    write(folder / "d.h5", x=(X.astype(np.float64), {}), y=(X[:, 0], {}))
    write(folder / "e.h5", x=(X, {}), y=(X[:9, 0], {}))
    write(folder / "f.h5", x=(X, {}), y=(np.zeros(50, [("a", "f4"), ("b", "i4")]), {}))
    write(folder / "g.h5", x=(X, {}), y=(np.float32(1), {}))
    write(folder / "empty.h5", x=(X[:0], {}), y=(X[:0, 0], {}))
    whole = (folder / "a.h5").read_bytes()
    (folder / "short.h5").write_bytes(whole[: len(whole) // 2])
    (folder / "text.h5").write_bytes(b"no HDF5" * 100)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a", "nothing"], "nothing.h5: No such file or directory"),
        (["a", "short", "b"], "short.h5: is truncated, was the copy complete"),
        (["a", "text"], "text.h5: is no HDF5 file"),
        (["a", "b"], "b.h5: field 'y' is missing; in the file are x"),
        (["a", "c"], r"c.h5: field 'x' has numbers of dtype float32 and shape \(2, 4\), in .*a.h5 .*\(3, 4\)"),
        (["a", "d"], "d.h5: field 'x' has numbers of dtype float64"),
        (["a", "e"], "e.h5: has 50 samples of 'x' and 9 of 'y'"),
        (["a", "f"], "f.h5: field 'y' has HDF5 type .*which is no tensor"),
        (["a", "g"], "g.h5: field 'y' has no dimension of samples"),
        (["empty"], "empty.h5: there are no samples in it"),
        (["a", "a"], "a.h5: is named twice"),
        ([], "there are no files to read"),
    ],
)
def test_the_wrong_file_is_named_before_the_first_step(tmp_path, names, words):
    _wrong_files(tmp_path)
    with pytest.raises(DataError, match=words):
        HDF5Dataset([tmp_path / f"{name}.h5" for name in names], ["x", "y"])


def test_wrong_arguments(tmp_path):
    path = write(tmp_path / "a.h5", x=(X, {}))
    with pytest.raises(UsageError, match="fields names no dataset"):
        HDF5Dataset(path, [])
    with pytest.raises(UsageError, match="fields are different names"):
        HDF5Dataset(path, ["x", "x"])
    with pytest.raises(UsageError, match="block must be"):
        HDF5Dataset(path, "x", block=0)
    with pytest.raises(DataError, match="no file matches"):
        HDF5Dataset(str(tmp_path / "*.hdf"), "x")
    (tmp_path / "folder").mkdir()
    with pytest.raises(DataError, match="no file in it ends with"):
        HDF5Dataset(tmp_path / "folder", "x")
    found = HDF5Dataset([path, write(tmp_path / "b.h5", x=(X[:0], {}))], "x")
    for index in (50, -51):
        with pytest.raises(IndexError, match=f"no sample {index}: the set has 50, from 0 to 49"):
            found[index]


def test_a_file_that_changes_or_ends_while_it_is_read(tmp_path):
    path = write(tmp_path / "a.h5", x=(X, {}))
    found = HDF5Dataset(path, "x")
    os.truncate(path, os.path.getsize(path) - 100)
    with pytest.raises(DataError, match=r"a.h5: is truncated"):
        found[49]
    write(path, x=(X[:, :2], {}))
    with pytest.raises(DataError, match=r"a.h5: field 'x' has changed"):
        found[0]
    write(path, x=(X, WAYS["gzip"]))
    with h5py.File(path) as file:
        place = file["x"].id.get_chunk_info(2).byte_offset
    with path.open("r+b") as file:
        file.seek(place)
        file.write(b"\0" * 40)
    with pytest.raises(DataError, match=r"a.h5: sample 17 \(row 17\) cannot be read"):
        found[17]
    assert torch.equal(found[3], torch.from_numpy(X[3])), "other chunks are as good as before"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_open_files_themselves(tmp_path, method):
    found = HDF5Dataset([write(tmp_path / f"{n}.h5", x=(X + n, WAYS["gzip"])) for n in range(2)], {"x": "x"})
    found.batch([0, 99])
    if method == "spawn":
        again = pickle.loads(pickle.dumps(found))
        assert torch.equal(again[77]["x"], found[77]["x"])
        assert "_readers" not in found.__getstate__()
        return
    context = multiprocessing.get_context("fork")
    loader = DataLoader(found, batch_size=10, num_workers=2, multiprocessing_context=context)
    assert np.array_equal(torch.cat([batch["x"] for batch in loader]), np.concatenate([X, X + 1]))


@pytest.mark.parametrize("way", ["contiguous", "gzip", "lzf"])
def test_threads_read_at_the_same_time(tmp_path, way):
    found = HDF5Dataset([write(tmp_path / f"{n}.h5", x=(X + n, WAYS[way])) for n in range(4)], "x", cache_bytes=3000)
    expected, wrong = np.concatenate([X + n for n in range(4)]), []

    def read(seed):
        random = np.random.default_rng(seed)
        for _ in range(60):
            order = random.integers(0, 200, 9)
            if not np.array_equal(found.batch(order), expected[order]):
                wrong.append(order)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_files_keep_few_open(tmp_path):
    paths = [write(tmp_path / f"{n:03}.h5", x=(X[:1] + n, {})) for n in range(100)]
    found, before = HDF5Dataset(paths, "x"), len(os.listdir("/proc/self/fd"))
    assert np.array_equal(found.batch(range(100))[:, 0, 0], X[0, 0, 0] + np.arange(100, dtype=np.float32))
    assert len(os.listdir("/proc/self/fd")) - before <= 2 * 64
    found.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_memory_of_batches_is_used_again_when_nobody_has_it(tmp_path):
    found = HDF5Dataset(write(tmp_path / "a.h5", x=(X, {})), "x")
    first = found.batch([0, 1])
    place, row = first.data_ptr(), first[1]
    del first
    assert found.batch([2, 3]).data_ptr() != place, "a view keeps it"
    assert np.array_equal(row, X[1])
    del row
    kept = [found.batch([number, number + 1]) for number in range(40)]
    assert place in {batch.data_ptr() for batch in kept}
    assert all(np.array_equal(batch, X[number : number + 2]) for number, batch in enumerate(kept))


def test_chunks_of_files_that_were_closed_are_not_those_of_others(tmp_path):
    """Readers of files come and go, while the cache keeps the chunks that were not used up."""
    options = {"chunks": (4, 2), "compression": "gzip"}
    values = [np.full((8, 2), number, np.float32) for number in range(150)]
    found = HDF5Dataset([write(tmp_path / f"{n:03}.h5", x=(v, options)) for n, v in enumerate(values)], "x")
    for row in (0, 1, 5, 2):
        order = np.random.default_rng(row).permutation(150)
        assert found.batch(order * 8 + row)[:, 0].tolist() == order.tolist()
