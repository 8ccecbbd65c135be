"""Figures as SVG in a page: the page sets colours and typeface, and a screen reader has a description."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfsdp.output.figure_file import new_figure
from hpcfsdp.report.series import spaced
from hpcfsdp.text.terminal import readable_bytes, readable_count

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

SIZE_PX = 400, 250  # width and height at which the text of a figure has its nominal size, for one column of a phone
INK, MUTED, GRID = "#101112", "#606162", "#d0d1d2"
COLOURS = ("#a0a001", "#a0a002", "#a0a003", "#a0a004", "#a0a005")
"""Placeholders: the page's style gives each its colour, another one in the dark. In order, from dark to light."""
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.4)), (0, (6, 2, 1, 2)), (0, (3, 1)))
"""Lines differ without colour, too."""
_VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--grid"} | {
    colour: f"--series-{number + 1}" for number, colour in enumerate(COLOURS)
}
_STEPS = (1, 2, 2.5, 5, 10)
_STYLE: Any = {
    "svg.fonttype": "none",
    "font.size": 11,
    "font.family": ["DejaVu Sans"],
    **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("axes.grid", "axes.axisbelow", "axes.unicode_minus"), True),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
    "axes.linewidth": 0.8,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.5,
    "lines.solid_joinstyle": "round",
    "legend.fontsize": 10.5,
    "legend.handlelength": 1.8,
    "legend.columnspacing": 1.2,
    "legend.borderaxespad": 0.1,
}


@dataclass(frozen=True)
class Figure:
    """A figure of the page."""

    name: str  # unique on the page, for links
    title: str
    caption: str  # how to read it, for all readers
    description: str  # what it shows, in numbers, for readers who do not see it
    svg: str  # an element with a title and the description


@dataclass(frozen=True)
class Marks:
    """Steps at which something happened: restarts, checkpoints, losses that were not finite; int64."""

    restarts: np.ndarray
    checkpoints: np.ndarray
    not_finite: np.ndarray


def canvas() -> tuple[Canvas, Axes]:
    """Return an empty figure without a window system, and its axes."""
    figure = new_figure(SIZE_PX[0] / 72, SIZE_PX[1] / 72, dpi=72)
    return figure, figure.add_subplot()


def style() -> Any:
    """Return a context in which figures are made and written."""
    canvas()  # names the remedy where matplotlib is missing
    import matplotlib

    return matplotlib.rc_context(_STYLE)


def step_axis(axes: Axes, marks: Marks | None = None, label: str = "step") -> None:
    """Give the x axis whole steps, and marks of what happened."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(label)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True, steps=_STEPS))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: _short(value)))
    axes.margins(x=0.02)
    if marks is None:
        return
    low, high = axes.get_xlim()
    unscaled: dict[str, Any] = {"transform": axes.get_xaxis_transform(), "scalex": False, "scaley": False}
    looks: dict[str, Any]
    for steps, bounds, looks in (
        (marks.restarts, (0.0, 1.0), {"color": MUTED, "linewidth": 1.0, "linestyle": (0, (2, 2)), "zorder": 1}),
        (marks.checkpoints, (-0.02, 0.02), {"color": INK, "linewidth": 1.1, "clip_on": False, "zorder": 4}),
    ):
        shown = spaced(steps[(steps >= low) & (steps <= high)], 150)
        if len(shown):  # one path for all: a marker for each takes ten times the bytes
            axes.plot(np.repeat(shown, 3), np.tile([*bounds, np.nan], len(shown)), **unscaled, **looks)
    if len(marks.not_finite):
        shown = spaced(marks.not_finite, 60)
        looks = {"color": COLOURS[1], "markersize": 6, "markeredgewidth": 1.8, "clip_on": False, "zorder": 5}
        axes.plot(shown, [1.0] * len(shown), "x", **unscaled, **looks)


def value_axis(axes: Axes, kind: str = "count", *, from_zero: bool = False) -> None:
    """Give the y axis short numbers of a kind: "count", "bytes" or "share"; `from_zero` where lengths are compared."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator, MultipleLocator

    words = {
        "count": _short,
        "bytes": lambda value: readable_bytes(value).replace(".0 ", " "),
        "share": lambda value: f"{value * 100:.3g}%",
    }[kind]
    if from_zero:
        axes.set_ylim(bottom=0)
    if axes.get_yscale() == "linear":
        locator: Any = MaxNLocator(5, steps=_STEPS)
        if kind == "bytes":
            high = max(axes.get_ylim()[1], 1.0)
            unit = 1024.0 ** int(np.log(high) / np.log(1024))
            parts = (0.25, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500)
            locator = MultipleLocator(next(part for part in parts if high / (part * unit) <= 6) * unit)
        axes.yaxis.set_major_locator(locator)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: words(value)))


def _short(value: float) -> str:
    if abs(value) >= 1e4:
        return readable_count(value).replace(" ", "") if abs(value) >= 1e6 else f"{value / 1e3:.4g}k"
    text = f"{value:.4g}"
    if 0 < abs(value) < 1e-3:
        mantissa, exponent = f"{value:.2e}".split("e")
        text = f"{float(mantissa):g}e{int(exponent)}"
    return text.replace("-", "\N{MINUS SIGN}")


def legend(figure: Canvas, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """Put the names of lines above the axes; nothing for a single one."""
    if len(labels) < 2:
        return
    made = figure.legend(handles, labels, loc="outside upper left", ncols=min(len(labels), 3))
    for text in made.get_texts():
        text.set_parse_math(False)


def write(name: str, title: str, caption: str, description: str, figure: Canvas) -> Figure:
    """Return the figure as an SVG element, with ids that are unique on the page, and colours of the page's style."""
    import matplotlib

    output = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(output, format="svg", transparent=True, metadata={"Date": None})
    svg = output.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    referred = set(re.findall(r'(?:url\(#|href="#)([\w-]+)', svg))
    svg = re.sub(r' id="([\w.-]+)"', lambda found: f' id="{name}-{found[1]}"' if found[1] in referred else "", svg)
    svg = re.sub(r"(url\(#|href=\"#)", rf"\g<1>{name}-", svg)
    svg = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg)
    svg = re.sub(r"font-family: [^;\"]*;? ?", "", svg)
    svg = re.sub(r' d="[^"]*"', lambda found: _rounded(found[0]), svg)
    svg = re.sub(r"\s*\n\s*", "\n", svg)
    for colour, variable in _VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    label, text = f"{name}-title", f"{name}-description"
    width, height = SIZE_PX[0], round(figure.get_figheight() * 72)
    head = (
        f'<svg class="figure" viewBox="0 0 {width} {height}" role="img" aria-labelledby="{label} {text}" '
        f'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">'
        f'<title id="{label}">{html.escape(title)}</title><desc id="{text}">{html.escape(description)}</desc>'
    )
    return Figure(name, title, caption, description, head + svg[svg.index(">") + 1 :])


def _rounded(path: str) -> str:
    """Return the coordinates of a path with a tenth of a pixel, in one line."""
    short = re.sub(r"-?\d+\.\d+", lambda found: f"{float(found[0]):.1f}".removesuffix(".0"), path)
    return re.sub(r"\s*\n\s*", "", short).replace(" L ", "L").replace(" M ", "M")
