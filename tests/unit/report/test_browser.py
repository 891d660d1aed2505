"""The pages in a real browser: no overlaps, enough contrast, nothing loaded, also on paper.

HVDKIT_KEEP_PICTURES=DIR keeps the pictures of the pages for people.
"""

import itertools
import math
import os
from pathlib import Path

import pytest

from tests.unit.report import browser
from tests.unit.report.runs import BEGAN, record, report, typical, write_metrics, write_start

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(browser.PROGRAM is None, reason="Chromium is not installed"),
]

#: In pixels: texts may touch.
_TOUCH = 2
# Text in pictures, with its place, and that of its picture.
_TEXTS = """
[...document.querySelectorAll('svg')].map(svg => {
  const box = b => [b.left, b.top, b.right, b.bottom];
  return {
    name: svg.getAttribute('aria-label'),
    box: box(svg.getBoundingClientRect()),
    texts: [...svg.querySelectorAll('text')].map(
      t => ({text: t.textContent, box: box(t.getBoundingClientRect())})),
  };
})
"""
# Contrast of texts with the background, and of lines in pictures; see WCAG 2.2, 1.4.3 and 1.4.11.
_CONTRAST = """
(() => {
  const numbers = c => c.match(/[\\d.]+/g).map(Number);
  const light = c => {
    const [r, g, b] = numbers(c).map(v => {
      v /= 255; return v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4; });
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const background = e => {
    for (; e; e = e.parentElement) {
      const c = getComputedStyle(e).backgroundColor;
      if (c !== 'rgba(0, 0, 0, 0)' && c !== 'transparent') return c;
    }
    return 'rgb(255, 255, 255)';
  };
  const contrast = (a, b) => {
    const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
    return (x + 0.05) / (y + 0.05);
  };
  const texts = [...document.querySelectorAll('h1,h2,p,li,td,th,figcaption,pre,summary')].map(
    e => [e.textContent.slice(0, 40), contrast(getComputedStyle(e).color, background(e))]);
  const inside = [...document.querySelectorAll('svg text')].map(
    e => [e.textContent, contrast(getComputedStyle(e).fill, background(e))]);
  const root = getComputedStyle(document.documentElement);
  const probe = document.body.appendChild(document.createElement('i'));
  const lines = [...Array(7).keys()].map(n => {
    probe.style.color = root.getPropertyValue('--series-' + n);
    return ['series ' + n, contrast(getComputedStyle(probe).color,
                                    background(document.querySelector('section')))];
  });
  probe.remove();
  return {texts: texts.concat(inside), lines};
})()
"""


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """A page of a run with all kinds of charts, and a comparison."""
    folder = tmp_path_factory.mktemp("pages")
    for name, ranks in (("short", 2), ("with a very long name of a folder-" * 3, 16)):
        metrics = folder / name / "metrics.jsonl"
        first = [
            typical(
                step, ranks=ranks, loss=300 / step, loss_scale=2.0 ** (step // 60 + 8),
                overflows=1.0, val_accuracy=1 - 1 / step, memory__rss=3e8 + step,
                time__data=[0.001 + 0.001 * r for r in range(ranks)],
                time__communication=[0.03 - 0.001 * r for r in range(ranks)],
                time__checkpoint=0.0001 * ranks,
            )
            for step in range(10, 410, 10)
        ]  # fmt: skip
        first[17] = record(180, ranks=ranks, loss=math.nan)
        write_metrics(metrics, first, ranks=ranks)
        again = [typical(step, ranks=ranks, at=BEGAN + 900 + step) for step in range(310, 600, 10)]
        write_metrics(metrics, again, step=300, ranks=ranks)
        words = "rank 3 on host0 failed: exit status 1. ValueError: " + "a long message " * 12
        error = {"rank": 3, "host": "host0", "status": 1, "signal": None, "exception": words,
                 "traceback": [], "last_lines": [words]}  # fmt: skip
        hosts = {f"host-with-a-name-{n}.cluster.example": ranks // 2 for n in range(2)}
        write_start(folder / name / "logs", BEGAN, failed=True, status=1, reason=words,
                    error=error, hosts=hosts)  # fmt: skip
        write_start(folder / name / "logs", BEGAN + 800, hosts=hosts)
    runs = [folder / "short", folder / ("with a very long name of a folder-" * 3)]
    assert report(runs[1], "--out", folder / "run.html") == 0
    assert report(*runs, "--compare", "--out", folder / "comparison.html") == 0
    return folder


@pytest.fixture(scope="module")
def chromium(tmp_path_factory):
    opened = browser.Browser(tmp_path_factory.mktemp("profile"))
    yield opened
    opened.close()


VIEWS = {
    "light": {},
    "dark": {"scheme": "dark"},
    "narrow": {"width": 360},
    "paper": {"media": "print", "scheme": "dark", "width": 720},
}


@pytest.mark.parametrize("name", ["run", "comparison"])
@pytest.mark.parametrize("view", VIEWS)
def test_a_page(pages, chromium, name, view):
    path = pages / f"{name}.html"
    chromium.open(path, **VIEWS[view])
    if keep := os.environ.get("HVDKIT_KEEP_PICTURES"):
        chromium.picture(Path(keep) / f"{name}-{view}.png")
        if view == "paper":
            chromium.paper(Path(keep) / f"{name}.pdf")
    width, visible = chromium.evaluate("[document.documentElement.scrollWidth, innerWidth]")
    assert width <= visible
    for picture in chromium.evaluate(_TEXTS):
        for text in picture["texts"]:
            left, top, right, bottom = text["box"]
            outer = picture["box"]
            assert left >= outer[0] - _TOUCH, (picture["name"], text)
            assert top >= outer[1] - _TOUCH, (picture["name"], text)
            assert right <= outer[2] + _TOUCH, (picture["name"], text)
            assert bottom <= outer[3] + _TOUCH, (picture["name"], text)
        for a, b in itertools.combinations(picture["texts"], 2):
            assert not _overlap(a["box"], b["box"]), (picture["name"], a, b)
    found = chromium.evaluate(_CONTRAST)
    assert len(found["texts"]) > 200
    assert [each for each in found["texts"] if each[1] < 4.5] == []
    assert [each for each in found["lines"] if each[1] < 3] == []
    requests = [
        event["params"]["request"]["url"]
        for event in chromium.events
        if event.get("method") == "Network.requestWillBeSent"
    ]
    assert requests == [path.as_uri()]
    problems = [e for e in chromium.events if e.get("method") == "Log.entryAdded"]
    assert not problems


def _overlap(a, b):
    return min(a[2], b[2]) - max(a[0], b[0]) > _TOUCH and min(a[3], b[3]) - max(a[1], b[1]) > _TOUCH
