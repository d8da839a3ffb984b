"""The report: what it holds, that nothing in it runs or is fetched, and how it behaves in a browser."""

from __future__ import annotations

import base64
import csv
import html
import http.server
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from lastgood.cli import app
from lastgood.errors import LastgoodError
from lastgood.experiments.claims.judge import judge_claims, load_reference
from lastgood.experiments.plots.canvas import read_tidy
from lastgood.experiments.plots.captions import throughput_caption
from lastgood.experiments.report import page as report
from lastgood.experiments.report.page import build_report, picture_of
from lastgood.experiments.report.table import Cell, Row, cells_table
from lastgood.experiments.tables.files import find_csvs, load_csvs
from lastgood.experiments.tables.marked import all_marks
from lastgood.experiments.tables.optimizer import collect_updates_files
from tests.experiments.support.checkmate_records import csv_of, panel
from tests.experiments.support.optimizer_records import record_of, written
from tests.experiments.support.paired_records import make_paired
from tests.experiments.support.records import make_ceilings
from tests.experiments.support.tidy_csvs import STATE_BYTES, none, runs, write_panel

SVG = b'<svg xmlns="http://www.w3.org/2000/svg" width="700" height="300"><rect width="700" height="300" id="a"/></svg>'
PNG = b"\x89PNG\r\n\x1a\n" + bytes(16)
REFERENCE = Path(__file__).parents[3] / "figures" / "reference"
EVIL = '<script>document.title="ran"</script><img src=x onerror=alert(1)>"\'&'


def figures(folder: Path, **overrides: Any) -> Path:
    """Two workloads under three systems, with a picture each."""
    for workload in ("vgg16", "bert"):
        common = {"workload": workload, **overrides}
        records = [
            *none([10.0, 10.4], **common),
            *runs("sync", {1: [2.0, 2.2], 10: [7.0, 7.1]}, **common),
            *runs("pccheck", {1: [6.0, 6.4], 10: [9.7, 9.9]}, **common),
        ]
        write_panel(folder, records, workload)
        (folder / f"fig8_{workload}.svg").write_bytes(SVG)
    return folder


def goodput(folder: Path) -> None:
    with (folder / "fig9_vgg16.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        names = ("figure", "panel", "machine", "scale", "workload", "system", "interval_steps")
        writer.writerow([*names, "goodput_measured_iterations_per_s", "goodput_formula_iterations_per_s"])
        writer.writerow(["fig9", "vgg16", "testbox", "laptop", "vgg16", "pccheck", 10, 8.25, 8.5])


def page_of(folder: Path, **options: Any) -> str:
    csvs = load_csvs(find_csvs(folder))
    claims = judge_claims(csvs, load_reference(REFERENCE))
    values = {"ceilings": make_ceilings(measured_at="2026-01-02T03:04:05+00:00"), "claims": claims, **options}
    return build_report(csvs, folder, **values).decode()


class Tags(HTMLParser):
    """Every tag with its attributes, and the text between."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def handle_data(self, data: str) -> None:
        self.text += data


def row_of(folder: Path, system: str, interval: int, workload: str = "VGG-16") -> tuple[Row, dict[str, Cell]]:
    table = cells_table(load_csvs(find_csvs(folder)))
    (row,) = [row for row in table.rows if (row.system, row.interval, row.workload) == (system, interval, workload)]
    return row, dict(zip([column.key for column in table.columns], row.cells, strict=True))


# -- the table -----------------------------------------------------------------------------------------------------


def test_known_runs_give_known_cells(tmp_path: Path) -> None:
    row, cells = row_of(figures(tmp_path), "PCcheck", 10)
    # Repetitions 9.7 and 9.9 against 10.0 and 10.4; the drain is nothing.
    assert cells["throughput"] == Cell("9.80", "9.70 to 9.90", pytest.approx(9.8))
    assert cells["of_none"].value == pytest.approx((9.7 / 10 + 9.9 / 10.4) / 2)
    assert cells["of_none"].text == "96"
    # 0.1 s in save() and 0.01 s in before_update() for each checkpoint.
    assert cells["stall"].value == pytest.approx(110.0)
    assert (cells["persist_p50"].text, cells["persist_p99"].text, cells["restore"].text) == ("0.250", "0.250", "0.125")
    assert cells["memory"] == Cell("200", "1.00 states", pytest.approx(STATE_BYTES / 2**20))
    assert (cells["proof"].text, cells["proof"].tone) == ("equal", "good")
    assert "goodput_measured" not in cells
    assert row.flags == []


SLOWER = "training without checkpoints was slower beside it, or a ceiling is higher than measured"


def test_more_than_training_without_checkpoints_is_not_credible(tmp_path: Path) -> None:
    cells_of = {1: [21.3, 21.3], 10: [9.9, 10.6], 25: [10.5, 10.9], 50: [10.4]}
    write_panel(tmp_path, [*none([10.0, 10.0]), *runs("pccheck", cells_of, proof=True)])
    row, cells = row_of(tmp_path, "PCcheck", 1)
    assert (cells["of_none"].text, cells["of_none"].detail, cells["of_none"].tone) == ("213", "not credible", "bad")
    assert row.flags[0] == f"213% of training without checkpoints is not credible: {SLOWER}"
    # Repetitions on both sides are noise; both above are not; a single run may be a twentieth above.
    for interval, tone in ((10, ""), (25, "bad"), (50, "")):
        row, cells = row_of(tmp_path, "PCcheck", interval)
        not_credible = any("not credible" in flag for flag in row.flags)
        assert (cells["of_none"].tone, not_credible) == (tone, bool(tone)), interval
    page = Tags(page_of(tmp_path)).text
    words = " ".join(page.split())
    assert re.search(r"\b2 ?ratios above training without checkpoints, not credible", words)
    assert f"PCcheck 1: 213% of training without checkpoints is not credible: {SLOWER} (" in words


def test_skipped_checkpoints_are_the_reason_if_there_are_any(tmp_path: Path) -> None:
    write_panel(tmp_path, [*none([10.0]), *runs("pccheck", {10: [12.0]}, skipped=3)])
    row, _ = row_of(tmp_path, "PCcheck", 10)
    assert row.flags[0].endswith("is not credible: 3 checkpoints were skipped")


def test_notes_say_what_pictures_mark(tmp_path: Path) -> None:
    records = [
        make_paired("none", 0),
        make_paired("sync", 10, (0.9, 0.9, 0.9), durable=1, proof=True),
        make_paired("checkfreq", 10, (0.5, 0.5, 0.8), ended_by="budget", disturbed=[2], proof=False),
        make_paired("pccheck", 10, (1.6, 1.6, 1.6)),
    ]
    write_panel(tmp_path, records)
    frame = load_csvs(find_csvs(tmp_path))[0].frame
    assert all_marks(frame) == [
        "RESTORE DIFFERS: CheckFreq 10",
        "restore not proved: PCcheck 10",
        "fewer than 2 checkpoints in a run: sync 10",
        f"PCcheck 10: 160% of training without checkpoints is not credible: {SLOWER}",
        f"above its bound: PCcheck 10: {SLOWER}",
        "the time was used up before the interval was narrow: CheckFreq 10",
        "1 disturbed pair is not counted",
    ]
    words = " ".join(Tags(page_of(tmp_path)).text.split())
    for mark in all_marks(frame):
        assert f"{mark} (" in words, mark
    # The picture's caption has the same reason.
    assert SLOWER in throughput_caption(read_tidy(tmp_path / "fig8_vgg16.csv"))
    assert all_marks(frame[frame["system"] == "none"]) == []


def test_the_runs_without_checkpoints_have_no_stall_and_no_proof(tmp_path: Path) -> None:
    _, cells = row_of(figures(tmp_path), "no checkpoints", 0)
    assert cells["of_none"].text == "100"
    assert {cells[key].value for key in ("stall", "persist_p50", "memory", "restore", "proof")} == {None}


def test_goodput_has_columns_where_figure_9_is_there(tmp_path: Path) -> None:
    goodput(figures(tmp_path))
    _, cells = row_of(tmp_path, "PCcheck", 10)
    assert (cells["goodput_formula"].text, cells["goodput_measured"].text) == ("8.50", "8.25")
    _, cells = row_of(tmp_path, "PCcheck", 1)
    assert cells["goodput_measured"] == Cell("-")


@pytest.mark.parametrize(
    ("overrides", "proof", "flag"),
    [
        ({"proof": False}, "DIFFERS", None),
        ({"proof": None}, "not proved", None),
        ({"failed": 2}, "equal", "4 checkpoints failed"),
        ({"skipped": 1}, "equal", "2 checkpoints skipped"),
        ({"durable": 1}, "equal", "fewer than 2 checkpoints in a run"),
    ],
)
def test_what_takes_worth_from_numbers_is_shown(
    tmp_path: Path, overrides: dict[str, Any], proof: str, flag: str | None
) -> None:
    write_panel(tmp_path, [*none([10.0, 10.4]), *runs("pccheck", {10: [9.0, 9.1]}, **overrides)])
    row, cells = row_of(tmp_path, "PCcheck", 10)
    assert cells["proof"].text == proof
    assert row.flags == ([flag] if flag else [])
    page = page_of(tmp_path)
    assert ("1 DIFFER" in page) == (proof == "DIFFERS")


# -- the page ------------------------------------------------------------------------------------------------------


def test_the_same_inputs_give_the_same_bytes(tmp_path: Path) -> None:
    goodput(figures(tmp_path))
    first, second = page_of(tmp_path), page_of(tmp_path)
    assert first == second


def test_it_holds_everything_and_names_nothing_outside(tmp_path: Path) -> None:
    page = page_of(figures(tmp_path))
    found = Tags(page)
    for tag, attributes in found.tags:
        assert tag not in {"iframe", "object", "embed", "base", "form"}
        for name in ("src", "href", "srcset", "action", "poster"):
            assert re.match(r"data:|#", attributes.get(name, "#")), (tag, attributes)
    assert not re.search(r"@import|url\(", page)
    (policy,) = [tag["content"] for _, tag in found.tags if tag.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'")
    pictures = [attributes for tag, attributes in found.tags if tag == "img"]
    assert len(pictures) == 2
    assert all(base64.b64decode(picture["src"].partition(",")[2]) == SVG for picture in pictures)
    assert all(picture["alt"].startswith("Figure 8") for picture in pictures)
    files = {attributes["download"]: attributes["href"] for tag, attributes in found.tags if "download" in attributes}
    assert base64.b64decode(files["fig8_bert.csv"].partition(",")[2]) == (tmp_path / "fig8_bert.csv").read_bytes()
    for text in (
        "testbox",
        "Example CPU",
        "0123456789",
        "/dev/sda1",
        "python 3.11",
        "PCcheck at interval 10",
        "Memory copy",
    ):
        assert text in found.text, text


def test_nothing_that_a_csv_holds_becomes_markup(tmp_path: Path) -> None:
    figures(tmp_path, cpu=EVIL, scratch_device=EVIL, notes=[EVIL], data_name=EVIL)
    found = Tags(page_of(tmp_path, title=EVIL))
    assert sum(tag == "script" for tag, _ in found.tags) == 1
    assert {attributes["src"][:5] for tag, attributes in found.tags if tag == "img"} == {"data:"}
    assert not [attributes for _, attributes in found.tags if any(name.startswith("on") for name in attributes)]
    assert EVIL in found.text


def test_claims_are_escaped_too(tmp_path: Path) -> None:
    csvs = load_csvs(find_csvs(figures(tmp_path)))
    claims = judge_claims(csvs, load_reference(REFERENCE))
    evil = [type(row)(**{**vars(row), "statement": EVIL, "reason": EVIL, "workload": EVIL}) for row in claims]
    found = Tags(page_of(tmp_path, claims=evil))
    assert sum(tag == "script" for tag, _ in found.tags) == 1


def test_without_claims_and_ceilings_their_parts_are_left_out(tmp_path: Path) -> None:
    page = page_of(figures(tmp_path), claims=None, ceilings=None)
    assert "Published claims" not in page
    assert "Ceilings of" not in page


def test_mixed_machines_and_revisions_are_marked(tmp_path: Path) -> None:
    folder = figures(tmp_path)
    path = folder / "fig8_bert.csv"
    path.write_text(path.read_text().replace("0123456789abcdef", "fedcba9876543210", 1))
    text = re.sub(r"\s+", " ", Tags(page_of(folder)).text)
    assert "0123456789, fedcba9876 mixed" in text
    path.write_text(path.read_text().replace("testbox", "otherbox"))
    assert "otherbox, laptop scale" in page_of(folder)


def test_partial_panels_say_so(tmp_path: Path) -> None:
    path = figures(tmp_path) / "fig8_bert.csv"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:-1]))
    assert "Partial: 9 of 10 runs." in page_of(tmp_path)


def test_the_picture_is_the_svg_unless_it_is_large(tmp_path: Path) -> None:
    (one,) = load_csvs([write_panel(tmp_path, none([10.0]))])
    svg, png = tmp_path / "fig8_vgg16.svg", tmp_path / "fig8_vgg16.png"
    assert picture_of(one, tmp_path) is None
    assert "No picture beside fig8_vgg16.csv" in build_report([one], tmp_path).decode()
    png.write_bytes(PNG)
    assert picture_of(one, tmp_path) == png
    svg.write_bytes(SVG)
    assert picture_of(one, tmp_path) == svg
    svg.write_bytes(SVG + b" " * (512 << 10))
    assert picture_of(one, tmp_path) == png
    png.write_bytes(PNG + bytes(4 << 20))
    with pytest.raises(LastgoodError, match=r"fig8_vgg16\.png: above 4 MiB"):
        picture_of(one, tmp_path)


def test_a_page_that_no_browser_opens_gladly_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "MOST_PAGE_BYTES", 20 << 10)
    with pytest.raises(LastgoodError, match="20 KiB is the most"):
        page_of(figures(tmp_path))


def test_the_command(tmp_path: Path) -> None:
    figures(tmp_path)
    ceilings, claims, out = tmp_path / "ceilings.json", tmp_path / "claims.csv", tmp_path / "report.html"
    make_ceilings().write(ceilings)
    csvs = [str(path) for path in find_csvs(tmp_path)]
    assert CliRunner().invoke(app, ["claims", *csvs, "--out", str(claims)]).exit_code == 0
    common = ["report", "--figures-dir", str(tmp_path), "--out", str(out)]
    done = CliRunner().invoke(app, [*common, "--ceilings", str(ceilings), "--claims", str(claims), *csvs])
    assert done.exit_code == 0, done.output
    named = out.read_bytes()
    # Without names every figure's CSV in the folder is taken; claims.csv and the wide ones are none.
    assert CliRunner().invoke(app, [*common, "--ceilings", str(ceilings), "--claims", str(claims)]).exit_code == 0
    assert out.read_bytes() == named


def test_checkmates_figure_is_found_and_shown_without_being_named(tmp_path: Path) -> None:
    csv_of(tmp_path, panel())
    updates = collect_updates_files(
        "checkmate", "optimizer", written(tmp_path / "records", record_of()), tmp_path / "ceilings.json"
    )
    updates.write(tmp_path / "checkmate_optimizer.csv", tmp_path / "checkmate_optimizer_wide.csv")
    (tmp_path / "checkmate_opt.svg").write_bytes(SVG)
    for other in ("claims.csv", "checkmate.csv", "mine_opt.csv"):
        (tmp_path / other).write_text("no,figure\n1,2\n")
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", "--figures-dir", str(tmp_path), "--out", str(out)])
    assert done.exit_code == 0, done.output
    page = out.read_text()
    assert 'id="checkmate-opt"' in page and 'id="checkmate-optimizer"' in page
    assert base64.b64encode(SVG).decode() in page
    assert "Checkmate" in Tags(page).text


# -- in a browser --------------------------------------------------------------------------------------------------

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here; Debian and Ubuntu have the package chromium")
LOOK = """
<script>
(function () {
  const said = {};
  const header = (name) => Array.from(document.querySelectorAll("#cells thead th"))
    .find((one) => one.textContent.includes(name));
  const column = (name) => Array.from(document.querySelectorAll("#cells tbody tr"))
    .filter((row) => !row.hidden).map((row) => row.cells[header(name).cellIndex].textContent.trim());
  const press = function (name) {
    const button = header(name).querySelector("button");
    button.focus();
    said.focused = document.activeElement === button;
    button.click();
    const sorted = document.querySelectorAll("#cells [aria-sort]").length;
    return [header(name).getAttribute("aria-sort"), sorted, column(name)];
  };
  said.before = column("Stall");
  said.stallUp = press("Stall");
  said.stallDown = press("Stall");
  said.systemUp = press("System");
  const select = document.querySelector("select[data-filter=workload]");
  select.value = "BERT";
  select.dispatchEvent(new Event("change"));
  said.filtered = [column("Workload"), document.querySelector("output").textContent];
  const fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  said.resources = fetched.filter((name) => !/^data:/.test(name));
  said.pictures = Array.from(document.images, (image) => image.naturalWidth);
  said.overflow = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  said.ground = getComputedStyle(document.body).backgroundColor;
  said.title = document.title;
  const out = document.createElement("pre");
  out.id = "said";
  out.textContent = JSON.stringify(said);
  document.body.append(out);
})();
</script>
"""


class Browser:
    """One Chromium for each call, with a profile of its own; ended as a group, also when it hangs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def call(self, page: Path, *arguments: str, size: tuple[int, int] = (1300, 2000)) -> tuple[str, str]:
        """What it prints, and what its console said."""
        assert CHROMIUM is not None
        command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        command += ["--disable-background-networking", "--disable-component-update", "--no-first-run"]
        command += ["--enable-logging=stderr", "--hide-scrollbars", f"--window-size={size[0]},{size[1]}"]
        command += [f"--user-data-dir={self.folder / 'profile'}", *arguments, page.as_uri()]
        environment = {**os.environ, "HOME": str(self.folder)}
        started = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=environment,
            start_new_session=True,
        )
        try:
            out, err = started.communicate(timeout=300)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait()
        assert started.returncode == 0, err
        return out, "\n".join(line for line in err.splitlines() if "CONSOLE" in line)

    def said(self, page: str, **options: Any) -> tuple[dict[str, Any], str]:
        """What `LOOK`, put at the end of `page`, found out."""
        path = self.folder / "looked_at.html"
        path.write_text(page.replace("</body>", f"{LOOK}</body>"))
        out, console = self.call(
            path, *options.pop("arguments", ()), "--virtual-time-budget=5000", "--dump-dom", **options
        )
        (found,) = re.findall(r'<pre id="said">(.*?)</pre>', out, flags=re.DOTALL)
        return json.loads(html.unescape(found)), console


@pytest.fixture
def chromium(tmp_path: Path) -> Browser:
    folder = tmp_path / "browser"
    folder.mkdir()
    return Browser(folder)


@browser
def test_the_table_sorts_and_filters_in_a_browser(tmp_path: Path, chromium: Browser) -> None:
    write_panel(tmp_path, [*none([10.0]), *runs("pccheck", {1: [6.0], 10: [9.7]}, stall_save_s=0.9)], "vgg16")
    bert = {"workload": "bert"}
    records = [*none([10.0], **bert), *runs("sync", {1: [2.0]}, stall_save_s=40.0, **bert)]
    write_panel(tmp_path, [*records, *runs("pccheck", {1: [6.0]}, stall_save_s=8.0, **bert)], "bert")
    for workload in ("vgg16", "bert"):
        (tmp_path / f"fig8_{workload}.svg").write_bytes(SVG)
    said, console = chromium.said(page_of(tmp_path))
    assert console == ""
    assert said["focused"]
    # As text 10012 would stand before 235; what is not there stays at the end, both ways.
    assert said["stallUp"] == ["ascending", 1, ["235", "235", "2010", "10010", "-", "-"]]
    assert said["stallDown"] == ["descending", 1, ["10010", "2010", "235", "235", "-", "-"]]
    names = [name.split()[0] for name in said["systemUp"][2]]
    assert names == sorted(names, key=str.lower)
    assert names[0] == "no"
    assert said["filtered"] == [["BERT"] * 3, "3 of 6 rows"]
    assert said["pictures"] == [700, 700]
    assert said["resources"] == []


@browser
def test_nothing_runs_or_is_fetched_in_a_browser(tmp_path: Path, chromium: Browser) -> None:
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        figures(tmp_path, cpu=EVIL, notes=[EVIL])
        page = page_of(tmp_path)
        said, _ = chromium.said(page)
        assert said["title"] == "Checkpointing systems side by side"
        # Even markup that got into the page could fetch nothing, because of its policy; without the policy it could.
        tracker = f'<img src="http://127.0.0.1:{server.server_port}/seen.png">'
        chromium.said(page.replace("<main>", f"<main>{tracker}"))
        assert asked == []
        without = re.sub(r"<meta http-equiv[^>]*>", "", page)
        chromium.said(without.replace("<main>", f"<main>{tracker}"))
        assert asked == ["/seen.png"]
    finally:
        server.shutdown()
        thread.join(60)
        server.server_close()


@pytest.fixture(scope="module")
def one_page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("figures")
    goodput(figures(folder))
    yield page_of(folder)


@browser
@pytest.mark.parametrize(
    ("size", "arguments", "ground"),
    [
        ((1300, 1000), ["--blink-settings=preferredColorScheme=1"], "rgb(255, 255, 255)"),
        ((1300, 1000), ["--blink-settings=preferredColorScheme=0"], "rgb(20, 23, 27)"),
        ((400, 800), [], "rgb(255, 255, 255)"),
    ],
    ids=["light", "dark", "phone"],
)
def test_it_fits_and_follows_the_colour_scheme(
    chromium: Browser, one_page: str, size: tuple[int, int], arguments: list[str], ground: str
) -> None:
    said, console = chromium.said(one_page, size=size, arguments=arguments)
    assert (said["overflow"], said["ground"], console) == (0, ground, "")
    picture = chromium.folder / "page.png"
    page = chromium.folder / "page.html"
    page.write_text(one_page)
    chromium.call(page, *arguments, f"--screenshot={picture}", size=size)
    from matplotlib.image import imread

    pixels = imread(picture)
    assert pixels.shape[:2] == (size[1], size[0])
    # The corner is the page's ground, and there is something on it.
    assert [round(255 * float(part)) for part in pixels[2, 2, :3]] == [int(part) for part in re.findall(r"\d+", ground)]
    assert len({tuple(pixel) for pixel in pixels[:, :, :3].reshape(-1, 3)[::97].round(2).tolist()}) > 20
