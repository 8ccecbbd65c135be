import builtins
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from hpcfsdp.checkpoint import save
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect import plots
from hpcfsdp.errors import CheckpointError, HpcfsdpError
from hpcfsdp.output.figure_file import write_figure


def histogram(path, *names, **options):
    index = open_index(path)
    with BlockReader(index) as reader:
        return plots.histogram(index, reader, "it", names or list(index.tensors), **options)


def test_a_histogram_is_numpys_of_all_tensors_together(write):
    torch.manual_seed(0)
    tensors = {
        "model/a": torch.randn(1000),
        "model/b": 3 * torch.randn(500).to(torch.bfloat16),
        "model/c": torch.arange(-3, 5),
    }
    steps = []
    found = histogram(write(tensors, block_bytes=256), bins=17, advance=steps.append)
    values = torch.cat([tensor.double() for tensor in tensors.values()]).numpy()
    counts, _ = np.histogram(values, bins=found.edges)
    np.testing.assert_allclose(found.edges, np.linspace(values.min(), values.max(), 18), rtol=1e-12)
    np.testing.assert_array_equal(found.counts, counts)
    assert (found.name, found.nan, found.inf) == ("it", 0, 0)
    assert sum(steps) == 2 * sum(tensor.nbytes for tensor in tensors.values())


@given(
    st.lists(
        st.floats(width=64, allow_nan=False, allow_infinity=False) | st.floats(-1, 1) | st.integers(-4, 4).map(float),
        min_size=1,
        max_size=30,
    )
)
def test_every_finite_number_is_in_the_bin_between_its_edges(values):
    array = np.array(values)
    edges = plots._edges(array.min(), array.max(), 10)
    assert np.isfinite(edges).all()
    assert (edges[0] <= array.min()) and (array.max() <= edges[-1])
    expected = [
        ((array >= low) & ((array < high) | (number == 9))).sum()
        for number, (low, high) in enumerate(itertools.pairwise(edges))
    ]
    assert (np.diff(edges) > 0).all()
    assert plots._counts(array, edges).tolist() == expected
    assert plots._counts(array, edges).sum() == len(values)


@pytest.mark.parametrize(
    ("low", "high"),
    [
        (5e-324, 1e-323),
        (0.0, 5e-324),
        (1.0, math.nextafter(1.0, 2)),
        (-2.0, math.nextafter(-2.0, 0)),
        (2.0**53, 2.0**53 + 2),
        (math.nextafter(1.7976931348623157e308, 0), 1.7976931348623157e308),
        (-1.7976931348623157e308, 1.7976931348623157e308),
        (-1e-300, 1e300),
    ],
)
def test_ranges_at_the_ends_of_what_floats_are_have_bins_of_their_own(low, high):
    edges = plots._edges(low, high, 100)
    assert np.isfinite(edges).all()
    assert (np.diff(edges) > 0).all()
    values = np.array([low, high, low / 2 + high / 2, high])
    counts = plots._counts(values, edges)
    expected = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, 99)
    assert counts.tolist() == np.bincount(expected, minlength=100).tolist()


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_with_an_absolute_value_beyond_their_type_are_counted(write, dtype):
    part = torch.finfo(dtype).max
    found = histogram(write({"model/a": torch.tensor([complex(part, part), 1j], dtype=dtype)}), bins=4)
    assert (found.nan, found.inf, found.counts.tolist()) == (0, 0, [1, 0, 0, 1])
    assert np.isfinite(found.edges).all()


def test_what_is_not_finite_is_counted_and_complex_numbers_by_their_size(write):
    tensors = {"model/a": torch.tensor([math.nan, math.inf, -math.inf, 1.0]), "model/b": torch.tensor([3 + 4j])}
    found = histogram(write(tensors), bins=4)
    assert (found.nan, found.inf) == (1, 2)
    assert found.counts.tolist() == [1, 0, 0, 1]
    assert found.edges.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("tensor", [torch.full((3,), 2.0), torch.zeros(0), torch.tensor([math.nan])])
def test_one_value_and_none(write, tensor):
    found = histogram(write({"model/a": tensor}))
    assert found.counts.sum() == tensor.isfinite().sum()
    assert (np.diff(found.edges) > 0).all()


@pytest.mark.parametrize(
    ("path", "layer"),
    [
        ("model/blocks.0.mlp.weight", "blocks.0.mlp"),
        ("model/scale", "scale"),
        ("optim/state/blocks.0.mlp.weight/exp_avg", "exp_avg of blocks.0.mlp"),
        ("optim/state/scale/step", "step of scale"),
    ],
)
def test_the_layer_of_a_tensor(path, layer):
    assert plots.layer_of(path) == layer


def test_norms_are_of_all_tensors_of_a_layer_in_the_order_of_the_file(write):
    tensors = {"model/b.weight": torch.tensor([3.0]), "model/a": torch.ones(4), "model/b.bias": torch.tensor([4.0])}
    index = open_index(write(tensors))
    with BlockReader(index) as reader:
        assert list(plots.layer_norms(index, reader, index.tensors).items()) == [("b", 5.0), ("a", 2.0)]


@pytest.fixture
def trained(tmp_path):
    metrics = {"loss": ([1, 2], [3.0, math.nan]), "val.loss": ([2], [2.5]), "lr": ([1], [0.5])}
    return open_index(save(tmp_path / "a.h5", model=torch.nn.Linear(2, 2), metrics=metrics))


def test_curves_come_from_the_file(trained):
    found = plots.curves(trained)
    assert sorted(found) == ["loss", "val.loss"]
    assert [part.tolist() for part in plots.curves(trained, ["l?"])["lr"]] == [[1], [0.5]]
    with pytest.raises(CheckpointError, match=r"no metric matches 'los'; did you mean 'loss'\?; there are "):
        plots.curves(trained, ["los"])


def test_a_file_without_metrics(write):
    with pytest.raises(CheckpointError, match="holds no metrics"):
        plots.curves(open_index(write({"model/a": torch.ones(1)})))


def test_numbers_for_json(trained):
    assert list(plots.as_numbers(plots.curves(trained, ["loss"]))) == [
        {"name": "loss", "steps": [1, 2], "values": [3.0, "nan"]}
    ]
    assert list(plots.as_numbers({"a": 1.0})) == [{"name": "a", "norm": 1.0}]
    one = plots.Histogram("a", np.array([0.0, 1]), np.array([3]), 1, 2)
    assert list(plots.as_numbers([one])) == [{"name": "a", "edges": [0.0, 1.0], "counts": [3], "nan": 1, "inf": 2}]


def heights(axes):
    return [patch.get_width() for patch in axes.patches]


def test_pictures_show_the_numbers(trained, tmp_path):
    histograms = [plots.Histogram(f"t{n}", np.arange(4.0), np.array([n, 0, 2]), n, 0) for n in range(6)]
    figure = plots.draw_histograms({"a.h5": histograms})
    assert [axes.get_title() for axes in figure.axes][:3] == ["t0", "t1 (1 NaN)", "t2 (2 NaN)"]
    assert [axes.patches[0].get_data().values.tolist() for axes in figure.axes] == [[n, 0, 2] for n in range(6)]
    norms = plots.draw_norms({"a.h5": {"x": 1.0, "y": 2.5}})
    assert heights(norms.axes[0]) == [1.0, 2.5]
    assert [label.get_text() for label in norms.axes[0].get_yticklabels()] == ["x", "y"]
    curves = plots.draw_curves({"a.h5": plots.curves(trained)})
    assert {line.get_label(): line.get_ydata()[0] for line in curves.axes[0].lines} == {"loss": 3.0, "val.loss": 2.5}
    for number, drawn in enumerate((figure, norms, curves)):
        path = write_figure(drawn, tmp_path / f"{number}.png")
        assert path.read_bytes().startswith(b"\x89PNG")
        assert drawn.get_suptitle() == "a.h5"


def test_histograms_name_their_axes():
    histograms = [plots.Histogram(f"t{n}", np.arange(4.0), np.array([1, 0, 2]), 0, 0) for n in range(6)]
    axes = plots.draw_histograms({"a.h5": histograms}).axes
    assert [one.get_xlabel() for one in axes] == [
        "",
        "",
        "value",
        "value",
        "value",
        "value",
    ]  # the lowest of each column
    assert [one.get_ylabel() for one in axes] == ["elements", "", "", "", "elements", ""]


def legend(axes):
    return [text.get_text().strip() for text in axes.get_legend().get_texts()]


def test_several_files_are_drawn_over_each_other():
    one, other = (plots.Histogram("t", np.arange(3.0), np.array(counts), 0, 0) for counts in ([1, 2], [3, 4]))
    (axes,) = plots.draw_histograms({"a.h5": [one], "b.h5": [other]}).axes
    assert [patch.get_data().values.tolist() for patch in axes.patches] == [[1, 2], [3, 4]]
    assert legend(axes) == ["a.h5", "b.h5"]
    (axes,) = plots.draw_norms({"a.h5": {"x": 1.0, "y": 2.0}, "b.h5": {"y": 3.0, "z": 4.0}}).axes
    assert heights(axes) == [1.0, 2.0, 3.0, 4.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["x", "y", "z"]
    (upper, lower) = (axes.patches[place] for place in (1, 2))  # those of y: next to each other, not on top
    assert upper.get_y() + upper.get_height() == pytest.approx(lower.get_y())
    curve = (np.array([1, 2]), np.array([3.0, 2.0]))
    (axes,) = plots.draw_curves({"a.h5": {"loss": curve}, "b.h5": {"loss": curve}}).axes
    assert legend(axes) == ["a.h5: loss", "b.h5: loss"]
    assert axes.get_ylabel() == "loss"


def test_smoothing_is_a_moving_average_corrected_for_its_beginning():
    values = np.array([4.0, 2.0, math.nan, 2.0])
    assert plots.smoothed(values, 0.0).tolist() == [4.0, 2.0, 2.0, 2.0]
    assert plots.smoothed(np.full(5, 3.0), 0.9).tolist() == pytest.approx([3.0] * 5)
    expected = [4.0, (0.5 * 4 + 2) / 1.5, (0.5 * 4 + 2) / 1.5, (0.25 * 4 + 0.5 * 2 + 2) / 1.75]
    assert plots.smoothed(values, 0.5).tolist() == pytest.approx(expected)
    assert plots.smoothed(np.array([math.nan, 1.0]), 0.5).tolist() == pytest.approx([math.nan, 1.0], nan_ok=True)
    (axes,) = plots.draw_curves({"a.h5": {"loss": (np.arange(4), values)}}, smoothing=0.5).axes
    faint, line = axes.lines
    assert (faint.get_alpha(), line.get_ydata().tolist()) == (0.25, pytest.approx(expected))
    assert faint.get_color() == line.get_color()
    (numbers,) = plots.as_numbers({"loss": (np.arange(4), values)}, 0.5)
    assert numbers["smoothed"] == pytest.approx(expected)


@pytest.mark.parametrize("norms", [{}, {str(n): 1.0 for n in range(500)}], ids=["none", "many"])
def test_pictures_of_nothing_and_of_much(tmp_path, norms):
    path = write_figure(plots.draw_norms({"a.h5": norms}), tmp_path / "a.svg")
    assert path.stat().st_size > 0


def test_pictures_that_cannot_be(tmp_path):
    many = [plots.Histogram(f"t{n}", np.arange(2.0), np.array([1]), 0, 0) for n in range(49)]
    with pytest.raises(CheckpointError, match="49 tensors match, a picture has room for 48"):
        plots.draw_histograms({"a.h5": many})
    figure = plots.draw_histograms({"a.h5": many[:1]})
    with pytest.raises(HpcfsdpError, match=r"has to end with one of .*\.pdf, .*\.png"):
        write_figure(figure, tmp_path / "a.mp3")
    with pytest.raises(HpcfsdpError, match="cannot be written: No such file"):
        write_figure(figure, tmp_path / "none" / "a.png")


def test_without_matplotlib_the_error_names_the_remedy(monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *arguments):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(HpcfsdpError, match=r"pip install 'hpcfsdp\[plot\]'"):
        plots.draw_norms({"a.h5": {"x": 1.0}})
