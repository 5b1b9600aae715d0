"""The report of a soak: complete, self-contained, and readable in a real browser."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from kvpact.consensus.core.errors import BadInput
from kvpact.harness.drive.charts import Line, Mark, line_chart, nice_top, seconds_text
from kvpact.harness.drive.page import render, write_page
from kvpact.harness.drive.replay import simulate
from kvpact.harness.drive.report import SoakReport, build_report, read_report, write_json
from kvpact.harness.drive.verdict import conclude
from kvpact.harness.faults.plan import Plan, chaos_plan
from kvpact.harness.soak.config import SoakConfig
from kvpact.harness.soak.feed import Latencies, Resources
from kvpact.harness.soak.resources import growth

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


def made(*, fails: bool = False) -> SoakReport:
    plan = chaos_plan(3, 2, (96, 96), (192, 192)) if fails else Plan()
    config = SoakConfig(steps=60, plan=plan, unsafe_no_votes=fails, seed=3)
    gather = simulate(config)
    conclusion = conclude(gather, is_stopped=False)
    return build_report(
        gather, conclusion, launcher="a test", command="kvpact soak --x '<b>'", duration_s=90.0
    )


@pytest.fixture(scope="module")
def passed() -> SoakReport:
    return made()


@pytest.fixture(scope="module")
def failed() -> SoakReport:
    return made(fails=True)


def test_json_comes_back_as_it_was(passed: SoakReport, tmp_path: Path) -> None:
    write_json(passed, tmp_path / "report.json")
    assert read_report(str(tmp_path)) == passed


def test_what_is_not_a_report_is_said(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such file; expected the report of a soak"):
        read_report(str(tmp_path))
    (tmp_path / "report.json").write_text('{"verdict": 3}')
    with pytest.raises(BadInput, match="is not the report of a soak"):
        read_report(str(tmp_path))


class Outline(HTMLParser):
    """Headings in order, and everything that would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.fetched: list[str] = []
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._inside = tag
        for name, value in attrs:
            if name in ("src", "href") and value and not value.startswith("data:"):
                self.fetched.append(value)

    def handle_data(self, data: str) -> None:
        if self._inside in ("h1", "h2"):
            self.headings.append(data)
        self._inside = ""


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    return found


def test_the_verdict_comes_first_and_everything_is_there(passed: SoakReport) -> None:
    page = render(passed)
    found = outline(page)
    assert found.headings[0] == "pass"
    assert {"Timelines", "Faults", "Latency", "Rare points", "Resources"} <= set(found.headings)
    assert found.fetched == []
    assert "http://" not in page
    assert "https://" not in page
    assert page.count("<svg") >= 8
    assert "&lt;b&gt;" in page, "what a person typed is text, not markup"
    assert f"seed {passed.config.seed}" in page
    assert passed.versions["torch"] in page


def test_a_failure_shows_the_journals_side_by_side(failed: SoakReport) -> None:
    page = render(failed)
    assert outline(page).headings[:3] == ["divergence", "What happened", "Journals, aligned"]
    assert re.search(r"Decision \d+ is the first that differs", page)
    assert page.count('class="differs"') >= 1
    first = page.index('class="differs"')
    left, right = re.findall(r"<code>(.*?)</code>", page[first : first + 2000])[:2]
    assert left != right
    assert left.split(" ")[0] == right.split(" ")[0], "one row is one decision"


def test_charts_scale_and_say_what_they_show() -> None:
    line = Line("rank 0", [(0.0, 1.0), (10.0, 7.0)], 0)
    chart = line_chart("Waits <here>", "ms", [line], [Mark(5.0, "stopped")])
    assert "Waits &lt;here&gt;" in chart
    assert 'points="0.0,90.0 1000.0,30.0"' in chart
    assert '<line class="mark" x1="500.0"' in chart
    assert "<polyline" in line_chart("one point", "", [Line("a", [(3.0, 1.0)], 1)])
    assert "<polyline" not in line_chart("nothing", "", [Line("a", [], 1)])
    assert [nice_top(x) for x in (0, 0.7, 1, 3, 7, 12, 80, 201)] == [1, 1, 1, 5, 10, 20, 100, 500]
    assert [seconds_text(x) for x in (2.5, 90, 5400)] == ["2.5 s", "1:30", "1:30:00"]


def test_percentiles_are_within_a_class() -> None:
    found = Latencies()
    for number in range(1, 1001):
        found.add(number / 1000)
    for percent, exact in ((50, 0.5), (99, 0.99), (99.9, 0.999)):
        assert exact * 0.999 <= found.percentile_s(percent) <= exact * 1.051
    assert found.percentile_s(100) == found.max_s == 1.0
    assert Latencies().percentile_s(99) == 0.0


def samples(rss: list[int], fds: list[int], every_s: float) -> list[Resources]:
    return [
        Resources(index * every_s, one, 0, fd, 10, 0)
        for index, (one, fd) in enumerate(zip(rss, fds, strict=True))
    ]


def test_a_leak_is_told_from_a_warm_up() -> None:
    flat = [10] * 100
    grows = samples([(200 + 2 * i) << 20 for i in range(100)], flat, 30)
    warms = samples([(200 + min(i, 30) * 5) << 20 for i in range(100)], flat, 30)
    short = samples([(200 + 2 * i) << 20 for i in range(100)], flat, 1)
    opens = samples([200 << 20] * 100, [10 + i for i in range(100)], 1)
    assert {one.name for one in growth(0, grows) if one.leaks} == {"rss_bytes"}
    assert not any(one.leaks for one in growth(0, warms))
    assert not any(one.leaks for one in growth(0, short)), "too short to judge memory"
    assert {one.name for one in growth(0, opens) if one.leaks} == {"fds"}
    (memory,) = (one for one in growth(0, grows) if one.name == "rss_bytes")
    assert memory.slope_per_h / 2**20 == pytest.approx(240, rel=0.01)


# -- in a real browser ---------------------------------------------------------------------------

_PROBE = """<!doctype html><html><head><title>wait</title></head><body style="margin:0">
<iframe id="page" src="report.html" width="{width}" height="900" style="border:0"></iframe>
<script>
document.getElementById("page").onload = function () {{
  var inner = document.getElementById("page").contentDocument;
  var main = inner.querySelector("main");
  document.body.setAttribute("data-width", inner.documentElement.scrollWidth);
  document.body.setAttribute("data-svgs", inner.querySelectorAll("svg").length);
  document.body.setAttribute("data-ink", getComputedStyle(inner.body).color);
  document.body.setAttribute("data-paper", getComputedStyle(inner.body).backgroundColor);
  document.body.setAttribute("data-main", main.clientWidth);
}};
</script></body></html>"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here (Debian: apt-get install chromium)")
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it(failed: SoakReport, tmp_path: Path, width: int, scheme: str) -> None:
    write_page(failed, tmp_path / "report.html")
    (tmp_path / "probe.html").write_text(_PROBE.format(width=width))
    done = subprocess.run(
        [
            str(BROWSER),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            f"--blink-settings=preferredColorScheme={0 if scheme == 'dark' else 1}",
            f"--window-size={max(width, 600)},900",
            "--virtual-time-budget=5000",
            "--dump-dom",
            f"file://{tmp_path / 'probe.html'}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    found = dict(re.findall(r'data-(\w+)="([^"]*)"', done.stdout))
    assert found, done.stderr[-2000:]
    assert "CONSOLE" not in done.stderr, done.stderr
    assert int(found["width"]) <= width, "the page scrolls sideways"
    assert int(found["main"]) <= width
    assert int(found["svgs"]) >= 8
    dark_paper = sum(map(int, re.findall(r"\d+", found["paper"])[:3])) < 3 * 128
    assert dark_paper == (scheme == "dark")
    light_ink = sum(map(int, re.findall(r"\d+", found["ink"])[:3])) > 3 * 128
    assert light_ink == (scheme == "dark")


def test_a_report_with_nothing_in_it_can_be_rendered() -> None:
    from kvpact.harness.drive.gather import Gather

    gather = Gather(SoakConfig(steps=1))
    found = conclude(gather, is_stopped=True, trouble="nothing started")
    report = build_report(gather, found, launcher="a test", command="x", duration_s=0.0)
    assert report.status != 0
    assert msgspec.json.decode(msgspec.json.encode(report), type=SoakReport) == report
    assert "<h1>" in render(report)
