"""The report as readers see it: on a phone, on a wide screen, in the dark, on paper."""

import itertools
import json
import re

import pytest

from tests.example_runs import write_lines, write_run
from tests.report.conftest import SCREENSHOTS

SIZES = {"phone": (360, 740), "small": (320, 640), "tablet": (820, 1180), "desktop": (1280, 900), "wide": (2560, 1440)}


@pytest.fixture(scope="session")
def troubled(tmp_path_factory, reported):
    """The page of a run with a slow rank, a restart, an error with a traceback, a hang report, and long texts."""
    run = write_run(
        tmp_path_factory.mktemp("runs") / "llama-1b-pretraining-ablation-07", 2000, slow_from=1500, end="error"
    )
    long = "/lustre/project_0123456789/" + "a_folder_with_a_long_name/" * 6 + "file.h5"
    error = {"level": "ERROR", "rank": 3, "date": "2026-03-02T08:20:00Z", "topic": "hpcfsdp.checkpoint"}
    error |= {
        "message": f"{long}: cannot be written",
        "traceback": "Traceback (most recent call last):\n  " + "x" * 300,
    }
    write_lines(run / "logs" / "rank-0003.jsonl", [error] * 3)
    (run / "hang").mkdir()
    (run / "hang" / "20260302-4711.txt").write_text("Rank 5 has not come: it sleeps\n\nRanks\n" + "rank 0 " * 60 + "\n")
    with open(run / "config.yaml", "a") as file:
        file.write(f"data:\n  paths: [{long}]\n")
    return reported(run)


@pytest.fixture(scope="session")
def old(tmp_path_factory, reported):
    """The page of a short run that knows its loss and seconds alone."""
    record = {"kind": "train", "loss": 2.5, "grad_norm": 1.0, "lr": 1e-3, "seconds": 0.2, "bytes_per_s": 1234.5}
    folder = tmp_path_factory.mktemp("runs") / "old"
    write_lines(folder / "metrics.jsonl", [{"step": step, **record} for step in range(1, 13)])
    return reported(folder)


def overlapping(boxes, slack=0.5):
    """Pairs of boxes that share more than an edge."""
    found = []
    for one, other in itertools.combinations(boxes, 2):
        width = min(one[2], other[2]) - max(one[0], other[0])
        height = min(one[3], other[3]) - max(one[1], other[1])
        if width > slack and height > slack:
            found.append((one[4], other[4]))
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("which", ["troubled", "old"])
def test_the_page_fits_every_width_and_nothing_overlaps(opened, request, which, size):
    window = opened(request.getfixturevalue(which), *SIZES[size], scale=2 if size == "phone" else 1)
    if which == "troubled":
        window.save(size)
    width, inner = window.page.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= inner
    head = window.boxes("header h1, header .status, header .place, header dt, header dd, header nav a")
    assert len(head) >= 12
    assert overlapping(head) == []
    headings = window.boxes("h1, h2, h3")
    assert len(headings) >= 6 and overlapping(headings) == []
    assert all(
        left >= 0 and right <= inner for left, _, right, _, _ in (*head, *headings, *window.boxes("section, li"))
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", ["phone", "desktop"])
def test_figures_are_large_enough_and_their_texts_stand_apart(opened, troubled, size):
    window = opened(troubled, *SIZES[size])
    figures = window.boxes("svg.figure")
    assert len(figures) == 11
    assert all(right - left >= 280 and bottom - top >= 170 for left, top, right, bottom, _ in figures)
    assert overlapping(figures) == []
    columns = {round(left) for left, *_ in figures}
    assert len(columns) == {"phone": 1, "desktop": 3}[size]
    for number in range(len(figures)):
        place = f"figure:nth-of-type({number + 1}) svg"
        (frame,) = window.boxes(place)
        texts = [box for box in window.boxes(f"{place} text") if box[4]]
        assert texts and overlapping(texts, slack=1.5) == []
        for left, top, right, bottom, text in texts:
            assert left >= frame[0] - 1 and right <= frame[2] + 1, text
            assert top >= frame[1] - 1 and bottom <= frame[3] + 1, text
            assert bottom - top >= 8, f"{text} is too small to read"


@pytest.mark.slow
def test_curves_are_drawn_in_colours_of_the_page(opened, troubled):
    window = opened(troubled, *SIZES["desktop"])
    strokes = window.page.eval_on_selector_all(
        "svg.figure path", "paths => paths.map(path => getComputedStyle(path).stroke)"
    )
    assert "rgb(11, 79, 138)" in strokes and "rgb(194, 65, 12)" in strokes
    dark = opened(troubled, *SIZES["desktop"], scheme="dark")
    dark.save("dark")
    fills = dark.page.eval_on_selector_all("svg.figure text", "texts => texts.map(text => getComputedStyle(text).fill)")
    assert set(fills) == {"rgb(232, 234, 237)"}


def test_the_values_of_the_run_are_on_the_page(opened, troubled):
    text = opened(troubled, *SIZES["phone"]).text()
    for value in ("llama-1b-pretraining-ablation-07", "hung", "rank 3: CUDA out of memory", "of 2,000", "31.2 GiB"):
        assert value in text
    for value in ("Rank 5 on n0001 holds up the others.", "step-00002000.h5", "1.23 G", "NVIDIA H100 80GB HBM3"):
        assert value in text
    for value in (
        "SIGUSR2 from the scheduler",
        "Rank 5 has not come",
        "cannot be written",
        "checkpoint.every",
        "989 TFLOP/s",
    ):
        assert value in text
    assert "Numbers of 25 steps" in text and "gradient norm" not in text.split("Numbers of 25 steps")[1][:200]


@pytest.mark.slow
def test_an_old_folder_shows_what_it_has(opened, old):
    window = opened(old, *SIZES["desktop"])
    text = window.text()
    assert "2.5" in text and "bytes/s" in text and "1,234" in text
    assert [box[4].split("\n")[0] for box in window.boxes("figure h3")] == (
        ["Loss", "Gradient norm", "Learning rate", "Throughput", "Time of a step"]
    )


def test_the_page_asks_for_nothing_and_complains_about_nothing(opened, troubled):
    window = opened(troubled, *SIZES["desktop"])
    window.page.wait_for_load_state("networkidle")
    assert window.requests == [troubled.as_uri()]
    assert window.complaints == []


@pytest.mark.slow
def test_details_open_and_links_lead_down(opened, troubled):
    window = opened(troubled, *SIZES["phone"])
    table = window.page.locator("details", has_text="Numbers of 25 steps").locator("table")
    assert not table.is_visible()
    window.page.get_by_text("Numbers of 25 steps").click()
    assert table.is_visible()
    assert window.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the table scrolls in its box"
    window.page.get_by_role("link", name="Checkpoints").click()
    assert window.page.evaluate("scrollY") > 1000


@pytest.mark.slow
def test_figures_have_names_and_descriptions_for_those_who_do_not_see_them(opened, troubled):
    window = opened(troubled, *SIZES["desktop"])
    image = window.page.get_by_role("img", name="Loss", exact=False)
    assert image.count() == 1
    labels = image.evaluate("svg => svg.getAttribute('aria-labelledby').split(' ')")
    label, description = (window.page.locator(f"#{name}").text_content() for name in labels)
    assert label == "Loss"
    assert re.match(r"Loss over steps 1 to 2000: first 6\.\d+, last \d", description)
    assert window.page.get_by_role("heading", level=1).count() == 1
    assert window.page.get_by_role("table").count() >= 4


CONTRAST = """elements => elements.map(element => {
    const part = value => value / 255 <= 0.03928 ? value / 255 / 12.92 : ((value / 255 + 0.055) / 1.055) ** 2.4;
    const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(part);
                              return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
    let behind = element;
    const clear = 'rgba(0, 0, 0, 0)';
    while (getComputedStyle(behind).backgroundColor == clear) behind = behind.parentElement;
    const style = getComputedStyle(element), colour = element.closest('svg') ? style.fill : style.color;
    const both = [light(colour), light(getComputedStyle(behind).backgroundColor)].sort((a, b) => b - a);
    return [(both[0] + 0.05) / (both[1] + 0.05), element.textContent.trim().slice(0, 40)];
})"""


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_have_the_contrast_that_guidelines_ask_for(opened, troubled, scheme):
    """WCAG 2 AA: 4.5 for text of usual size."""
    window = opened(troubled, *SIZES["desktop"], scheme=scheme)
    found = window.page.eval_on_selector_all(
        "h1, h2, h3, p, dt, dd, th, td, a, summary, .status, .severity, svg text", CONTRAST
    )
    assert len(found) > 200
    assert [(ratio, text) for ratio, text in found if ratio < 4.5] == []


@pytest.mark.slow
def test_on_paper_everything_is_open_and_black_on_white(opened, troubled):
    window = opened(troubled, *SIZES["desktop"], scheme="dark")
    window.page.emulate_media(media="print")
    assert not window.page.locator("nav").is_visible()
    details = window.page.locator("details").count()
    inside = window.boxes("details > :not(summary)")
    assert details >= 3 and len(inside) == details, "what is closed on a screen is missing"
    body = window.page.evaluate(
        "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    )
    assert body == ["rgb(0, 0, 0)", "rgb(255, 255, 255)"]


@pytest.mark.slow
def test_paper_has_few_pages_with_text(opened, troubled):
    window = opened(troubled, *SIZES["desktop"])
    SCREENSHOTS.mkdir(exist_ok=True)
    printed = window.page.pdf(path=SCREENSHOTS / "paper.pdf", prefer_css_page_size=True)
    assert 3 <= len(re.findall(rb"/Type /Page\b", printed)) <= 9
    assert printed.count(b"/Font") > 3
    sizes = {tuple(map(float, size.split())) for size in re.findall(rb"/MediaBox \[0 0 ([\d. ]+)\]", printed)}
    assert all(abs(width - 595) < 2 and abs(height - 842) < 2 for width, height in sizes), "A4"


@pytest.mark.slow
def test_figures_are_not_cut_by_the_end_of_a_page(opened, troubled):
    window = opened(troubled, *SIZES["desktop"])
    window.page.emulate_media(media="print")
    breaks = window.page.eval_on_selector_all(
        "figure, .findings li, tr", "all => all.map(one => getComputedStyle(one).breakInside)"
    )
    assert set(breaks) == {"avoid"}


@pytest.mark.slow
def test_a_hundred_thousand_steps_open(opened, tmp_path, reported):
    record = {"kind": "train", "lr": 1e-3, "seconds": 0.5, "tokens_per_s": 1e5, "comm_share": 0.1}
    run = tmp_path / "long"
    run.mkdir()
    with open(run / "metrics.jsonl", "w") as file:
        for step in range(1, 100_001):
            file.write(json.dumps({"step": step, "loss": 9.75 if step == 54_321 else 2 + 1 / step, **record}) + "\n")
    page = reported(run)
    assert page.stat().st_size < 1_000_000
    window = opened(page, *SIZES["phone"])
    assert "100,000" in window.text()
    assert (
        "highest 9.75 in step 54321"
        in window.page.inner_text("body") + window.page.locator("desc").first.text_content()
    )
