import os
import sysconfig

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from hpcfsdp.errors import DataError
from hpcfsdp.examples.gpt import data
from hpcfsdp.examples.gpt.data import Corpus, Span, make_split, mask_seed, num_windows, share, spread_windows


def paths_of(spans):
    return {span.path for span in spans}


def folder_of(path, sizes):
    for name, size in sizes.items():
        file = path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(bytes(index % 251 for index in range(size)))
    return path


def test_the_standard_library_is_split_by_file_into_two_disjoint_parts():
    split = make_split([], 0.05)
    train, held_out = paths_of(split.train), paths_of(split.held_out)
    assert not train & held_out
    assert len(train) > len(held_out) > 3
    assert all(path.endswith(".py") for path in train | held_out)
    assert not any({"site-packages", "test", "tests", "__pycache__"} & set(path.split("/")) for path in train)
    for span in (*split.train, *split.held_out):
        assert (span.begin, span.end) == (0, os.stat(span.path).st_size)
    assert sysconfig.get_path("stdlib") in split.source


def test_the_same_files_are_split_the_same_way():
    assert make_split([], 0.05) == make_split([], 0.05)


def test_a_file_keeps_its_side_when_others_come_and_go(tmp_path):
    folder = folder_of(tmp_path, {f"{index}.txt": 10 for index in range(60)})
    before = make_split([str(folder)], 0.3)
    for index in range(0, 20):
        (folder / f"{index}.txt").unlink()
    folder_of(tmp_path, {f"new{index}.txt": 10 for index in range(20)})
    after = make_split([str(folder)], 0.3)
    remaining = {str(folder / f"{index}.txt") for index in range(20, 60)}
    assert paths_of(before.held_out) & remaining == paths_of(after.held_out) & remaining
    assert paths_of(before.held_out) & remaining


@pytest.mark.parametrize("held_out", [0.1, 0.3, 0.6])
def test_about_the_wanted_fraction_of_files_is_held_out(tmp_path, held_out):
    folder = folder_of(tmp_path, {f"{index}.txt": 1 for index in range(400)})
    split = make_split([str(folder)], held_out)
    assert len(split.train) + len(split.held_out) == 400
    assert abs(len(split.held_out) / 400 - held_out) < 0.08


def test_the_tails_of_few_files_are_held_out(tmp_path):
    folder = folder_of(tmp_path, {"a.txt": 100, "b/c.bin": 40})
    split = make_split([str(folder)], 0.25)
    a, c = str(folder / "a.txt"), str(folder / "b/c.bin")
    assert split.train == (Span(a, 0, 75), Span(c, 0, 30))
    assert split.held_out == (Span(a, 75, 100), Span(c, 30, 40))


def test_files_and_folders_may_be_mixed_and_each_file_counts_once(tmp_path):
    folder = folder_of(tmp_path, {"x/a": 10, "x/b": 10, "c": 10})
    split = make_split([str(folder / "c"), str(folder / "x"), str(folder / "x/a")], 0.5)
    assert sorted(span.path for span in split.train) == [str(folder / name) for name in ("c", "x/a", "x/b")]
    assert split.source == f"{folder}/c, {folder}/x, {folder}/x/a"


def test_hidden_files_caches_and_empty_files_are_skipped(tmp_path):
    names = [".hidden", ".git/config", "__pycache__/a.pyc", "site-packages/b.py", "deep/.x/c"]
    folder = folder_of(tmp_path, {**dict.fromkeys(names, 10), "empty": 0, "good": 10, "deep/good": 10})
    (folder / "dangling").symlink_to("nowhere")
    split = make_split([str(folder)], 0.5)
    assert paths_of(split.train) == {str(folder / "good"), str(folder / "deep/good")}


def test_the_fingerprint_depends_on_names_and_sizes(tmp_path):
    folder = folder_of(tmp_path, {"a": 10, "b": 20})
    prints = [make_split([str(folder)], 0.5).fingerprint]
    (folder / "b").write_bytes(b"x" * 20)
    assert make_split([str(folder)], 0.5).fingerprint == prints[0]
    for change in (
        lambda: (folder / "b").write_bytes(b"x" * 21),
        lambda: (folder / "b").rename(folder / "c"),
        lambda: (folder / "d").write_bytes(b"x"),
        lambda: (folder / "d").unlink() or (folder / "a").unlink(),
    ):
        change()
        prints.append(make_split([str(folder)], 0.5).fingerprint)
    assert len(set(prints)) == len(prints)


def error_of(*paths):
    with pytest.raises(DataError) as caught:
        make_split([str(path) for path in paths], 0.1)
    return str(caught.value)


def test_an_empty_folder_is_an_error_that_names_it(tmp_path):
    assert error_of(tmp_path) == f"no bytes to learn from in {tmp_path}"


def test_files_without_bytes_are_an_error(tmp_path):
    folder = folder_of(tmp_path, {"a": 0, "b": 0})
    assert error_of(folder) == f"no bytes to learn from in {folder}"


def test_a_missing_path_is_named(tmp_path):
    good = folder_of(tmp_path / "good", {"a": 10})
    assert error_of(good, tmp_path / "none") == f"{tmp_path}/none: no such file or folder"


def test_a_folder_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, {"a": 10})
    monkeypatch.setattr(data.os, "access", lambda *_: False)
    assert error_of(folder) == f"{folder}: cannot be read"


def test_a_file_that_cannot_be_read_is_named(tmp_path, monkeypatch):
    folder = folder_of(tmp_path, {"a": 10})

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(data, "open", refuse, raising=False)
    assert error_of(folder) == f"{folder}/a: Permission denied"


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), min_size=1, max_size=8), st.data())
@settings(max_examples=60, deadline=None)
def test_reading_across_files_equals_reading_all_of_them(tmp_path_factory, cuts, draw):
    folder = tmp_path_factory.mktemp("corpus")
    whole, spans = b"", []
    for index, (begin, length) in enumerate(cuts):
        content = bytes((37 * index + place) % 256 for place in range(begin + length + 3))
        (folder / str(index)).write_bytes(content)
        spans.append(Span(str(folder / str(index)), begin, begin + length))
        whole += content[begin : begin + length]
    start = draw.draw(st.integers(0, len(whole)))
    length = draw.draw(st.integers(0, len(whole) - start))
    corpus = Corpus(spans)
    try:
        assert len(corpus) == len(whole)
        read = corpus.read(start, length)
        assert (read.dtype, read.tobytes()) == (np.uint8, whole[start : start + length])
    finally:
        corpus.close()


def test_a_corpus_of_many_files_keeps_only_some_of_them_open(tmp_path):
    folder = folder_of(tmp_path, {f"{index:03}": 3 for index in range(200)})
    corpus = Corpus([Span(str(folder / f"{index:03}"), 0, 3) for index in range(200)])
    before = len(os.listdir("/proc/self/fd"))
    assert corpus.read(0, 600).tobytes() == bytes([0, 1, 2]) * 200
    assert len(os.listdir("/proc/self/fd")) - before == 64
    corpus.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_an_empty_corpus_has_no_bytes():
    assert len(Corpus([])) == 0


def test_a_file_that_became_shorter_is_named(tmp_path):
    path = tmp_path / "a"
    path.write_bytes(bytes(10))
    corpus = Corpus([Span(str(path), 0, 10)])
    corpus.read(0, 10)
    os.truncate(path, 5)
    with pytest.raises(DataError) as caught:
        corpus.read(0, 6)
    corpus.close()
    assert str(caught.value) == f"{path}: became shorter while it was being read; start the run again"


def test_a_removed_file_is_named(tmp_path):
    corpus = Corpus([Span(str(tmp_path / "gone"), 0, 10)])
    with pytest.raises(DataError, match=r"gone: No such file or directory$"):
        corpus.read(0, 1)


@given(st.integers(2, 5000), st.integers(1, 200))
@settings(max_examples=60, deadline=None)
def test_training_windows_are_within_the_corpus_and_reach_its_end(corpus_bytes, context):
    count = num_windows(corpus_bytes, context)
    assert count * context + 1 <= corpus_bytes < (count + 1) * context + 1


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 40))
@settings(max_examples=100, deadline=None)
def test_each_sample_is_in_one_micro_batch_and_every_micro_batch_has_some(accumulation, size, more):
    batch = list(range(100, 100 + accumulation * size + more))
    parts = [share(batch, accumulation, rank, size) for rank in range(size)]
    assert all(len(own) == accumulation for own in parts)
    sizes = [len(samples) for own in parts for samples in own]
    assert min(sizes) >= 1
    assert max(sizes) - min(sizes) <= 1
    assert [sample for part in range(accumulation) for own in parts for sample in own[part]] == batch


def test_mask_seeds_differ_by_seed_step_and_part_and_are_reproducible():
    numbers = {(seed, step, part): mask_seed(seed, step, part) for seed in (0, 7) for step in (0, 9) for part in (0, 1)}
    assert len(set(numbers.values())) == 8
    assert all(0 <= number < 2**63 for number in numbers.values())
    assert numbers == {key: mask_seed(*key) for key in numbers}


@given(st.integers(0, 2000), st.integers(1, 100), st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_windows_are_inside_do_not_overlap_and_are_as_many_as_fit(corpus_bytes, length, count):
    starts = spread_windows(corpus_bytes, length, count)
    assert len(starts) == min(count, corpus_bytes // length)
    ends = [0, *(start + length for start in starts)]
    assert all(start >= end for start, end in zip(starts, ends, strict=False))
    assert ends[-1] <= corpus_bytes


def test_windows_reach_from_the_first_byte_to_the_last():
    assert spread_windows(100, 10, 4) == [0, 30, 60, 90]
    assert spread_windows(100, 10, 1) == [0]
    assert spread_windows(9, 10, 3) == []
