"""A picture of a plan: memory in the course of a step, and the step time of each setup. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcfsdp.output.figure_file import new_figure
from hpcfsdp.plan.footprint import KINDS
from hpcfsdp.plan.proposal import Proposal
from hpcfsdp.text.terminal import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_GIB = 1 << 30
_MOST_BARS = 16


def draw(proposal: Proposal) -> Figure:
    """A figure with two panels."""
    figure = new_figure(12.0, 5.0)
    figure.suptitle(shown(proposal.workload.name), parse_math=False)
    _draw_memory(figure.add_subplot(1, 2, 1), proposal)
    _draw_times(figure.add_subplot(1, 2, 2), proposal)
    return figure


def _draw_memory(axes: Axes, proposal: Proposal) -> None:
    course, request = proposal.best.footprint.course, proposal.request
    kinds = [kind for kind in KINDS if any(moment.bytes_by_kind[kind] for moment in course)]
    heights = [[moment.bytes_by_kind[kind] / _GIB for moment in course] for kind in kinds]
    axes.stackplot(range(len(course)), heights, labels=kinds, step="mid")
    axes.axhline(request.memory_bytes / _GIB, color="black", linewidth=1, label="device memory")
    axes.set_xlabel("events of a step")
    axes.set_ylabel("GiB of the rank with the most")
    axes.set_title("memory", fontsize="medium")
    axes.legend(fontsize="x-small", loc="upper right")


def _draw_times(axes: Axes, proposal: Proposal) -> None:
    shown = proposal.all[:_MOST_BARS]
    names = [
        f"{setup.strategy} {setup.replicas} x {setup.shards}{', recomputed' if each.checkpointed else ''}"
        for each, setup in ((each, each.setup) for each in shown)
    ]
    left = [0.0] * len(shown)
    for label, values in (
        ("computation", [each.time.compute_s for each in shown]),
        ("exposed communication", [each.time.exposed_s for each in shown]),
        ("optimizer", [each.time.optimizer_s for each in shown]),
    ):
        axes.barh(names, values, left=left, label=label, alpha=0.9)
        left = [before + value for before, value in zip(left, values, strict=True)]
    for place, each in enumerate(shown):
        if not each.fits:
            axes.annotate("does not fit", (left[place], place), fontsize="xx-small", va="center")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="xx-small")
    axes.set_xlabel("seconds of a step")
    axes.set_title("setups: replicas x shards", fontsize="medium")
    axes.legend(fontsize="x-small")
