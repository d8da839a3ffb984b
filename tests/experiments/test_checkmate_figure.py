"""Checkmate's figure before and behind its runs: plan, refusals, columns, the bound, and the picture."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from lastgood.errors import ConfigError, LastgoodError
from lastgood.experiments.config.yaml_file import parse_overrides
from lastgood.experiments.figures.workflow_plan import plan_figure, plan_workflow
from lastgood.experiments.multirank.results import merge_ranks
from lastgood.experiments.plan.load import parse_config
from lastgood.experiments.plots.canvas import read_tidy
from lastgood.experiments.plots.checkmate import draw_checkmate, plot_checkmate
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.tables.checkmate import collect_checkmate_files
from lastgood.experiments.tables.runs import collect
from tests.experiments.support.checkmate_records import (
    REFERENCE,
    ROOT,
    csv_of,
    failure,
    files,
    links,
    panel,
    record,
    shadow,
)
from tests.experiments.support.rank_results import measured
from tests.experiments.support.records import make_ceilings


def configure(*entries: str) -> Any:
    return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([*entries, "machine=testbox"]))[0]


# -- plan --------------------------------------------------------------------------------------------------------------


def runs_of(config: Any) -> list[RunSpec]:
    return [spec for spec in plan_figure(config, "checkmate") if isinstance(spec, RunSpec)]


def test_checkmate_is_planned_at_interval_1_only_and_the_others_at_all() -> None:
    specs = runs_of(configure("checkmate={models: [opt], intervals: [2, 5], kills: 3, shadows: 4}"))
    assert sorted((spec.system, spec.interval_steps) for spec in specs) == sorted(
        [
            ("none", 0),
            ("checkmate", 1),
            *((system, interval) for system in ("dcp", "checkfreq", "gemini", "pccheck") for interval in (2, 5)),
        ]
    )
    for spec in specs:
        assert (spec.ranks, spec.nodes, spec.parallel) == (2, 2, "ddp")
        assert spec.shadows == (4 if spec.system == "checkmate" else 0)
        assert spec.kills == (0 if spec.system == "none" else 3)
        # Every system's restore is looked at: by a proof, or behind kills.
        assert spec.proof == (spec.system == "checkmate")
        assert RunSpec.model_validate_json(spec.canonical_json()) == spec


def test_without_kills_every_system_proves_its_restore() -> None:
    for spec in runs_of(configure("checkmate={kills: 0}")):
        assert spec.proof == (spec.system != "none") and spec.kills == 0


def test_figure_8_holds_checkmate_at_interval_1_with_shadows_on_this_machine() -> None:
    specs = [spec for spec in plan_figure(configure("systems=[checkmate]"), "fig8") if isinstance(spec, RunSpec)]
    found = {(spec.system, spec.interval_steps, spec.shadows, spec.ranks) for spec in specs}
    assert found == {("none", 0, 0, 1), ("checkmate", 1, 2, 1)}


def test_models_have_options_of_their_own() -> None:
    specs = runs_of(configure("checkmate={options: {opt: {layers: 3}}}"))
    layers = {spec.workload: spec.workload_options.get("layers") for spec in specs}
    assert layers == {"resnet18": None, "opt": 3}


@pytest.mark.parametrize("scale", ["laptop", "gpu", "paper"])
def test_every_scale_plans_the_figure(scale: str) -> None:
    config = parse_config(ROOT / "config" / f"{scale}.yaml", parse_overrides(["machine=testbox"]))[0]
    assert {spec.workload for spec in runs_of(config)} == set(config.checkmate.models)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("checkmate={systems: [gpm]}", ["checkmate.systems[1]: gpm does not run over several ranks"]),
        ("checkmate={slots: 2}", ["gemini needs two nodes or more, with one rank on each"]),
        ("checkmate={nodes: 1}", ["checkmate.nodes: 1 node with 1 slot is one rank"]),
        ("checkmate={options: {opt: {depth: 3}}}", ["checkmate.options.opt.depth"]),
        ("checkmate={models: [transformer_xl], systems: dcp}", ["every rank of transformer_xl has a part of its own"]),
        ("checkmate={hostfile: /no/such}", ["checkmate.hostfile", "there is no such file"]),
        (
            "checkmate={rate: 1gbit, iterations: 20, options: {opt: {layers: 4}}}",
            ["checkmate.rate: fig8e has another one and shares runs of opt"],
        ),
        ("checkmate={kills: -1}", ["checkmate.kills", "0 to 1000"]),
        ("checkmate={optimizer: {model: lenet}}", ["checkmate.optimizer.model", "resnet50"]),
        ("fig8e={parallel: fsdp2, systems: checkmate}", ["checkmate is measured under ddp, not under fsdp2"]),
    ],
)
def test_what_cannot_be_measured_is_refused(override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        configure(override, "pairs={rounds: 0}")
    for word in words:
        assert word in str(error.value)


def test_runs_in_pairs_are_shared_with_no_figure_so_their_links_may_differ() -> None:
    config = configure("checkmate={rate: 1gbit, iterations: 20, options: {opt: {layers: 4}}}")
    plan = plan_workflow(config)
    assert not set(plan.records["fig8e", "opt"]) & set(plan.records["checkmate", "opt"])
    assert all(spec.pairs is None for spec in runs_of(config))
    assert all(plan.specs[record].pairs is not None for record in plan.records["fig8e", "opt"])


# -- columns and bound -------------------------------------------------------------------------------------------------


def test_what_shadows_used_and_failures_took_stands_in_the_rows() -> None:
    rows = {(row.system, row.interval_steps): row for row in collect("checkmate", "opt", panel(), make_ceilings()).tidy}
    own = rows["checkmate", 1]
    assert (own.shadows, own.shadow_cpu_s, own.shadow_received_bytes) == (2, 3.0, 200)
    assert (own.shadow_optimizer_s, own.shadow_peak_rss_bytes) == (0.5, 14)
    assert (own.kills, own.lost_steps, own.lives_unlike) == (1, "1", 0)
    other = rows["checkfreq", 5]
    assert (other.shadows, other.shadow_cpu_s, other.lost_steps) == (0, None, "4")
    assert rows["none", 0].lost_steps is None


def test_the_bound_of_checkmate_knows_links_and_no_copy() -> None:
    ceilings = make_ceilings()
    # A copy of all of the state would take seconds in each iteration.
    slow = [record("none", 0, 50.0, state_bytes=20 << 30), record("checkmate", 1, 6.0, state_bytes=20 << 30)]
    rows = {row.system: row for row in collect("checkmate", "opt", slow, ceilings).tidy}
    # 1 Gbit/s and 10 MB in each iteration.
    assert rows["checkmate"].bound_iterations_per_s == pytest.approx(12.5)
    assert rows["checkmate"].bound_binds == "link"
    alone = [one.model_copy(update={"ranks": links(0)}) for one in slow]
    rows = {row.system: row for row in collect("checkmate", "opt", alone, ceilings).tidy}
    assert rows["checkmate"].bound_iterations_per_s == pytest.approx(50.0)


@pytest.mark.parametrize(
    ("shadows", "link"),
    [(["vm0", "vm1"], 50), (["vm0"], 100), (["vm2", "vm3"], 100), (["vm0", "vm1", "vm0", "vm1"], 50)],
)
def test_only_what_leaves_a_host_is_on_its_link(shadows: list[str], link: int) -> None:
    ranks = [measured(rank).model_copy(update={"shadows": [shadow(host) for host in shadows]}) for rank in (0, 1)]
    common: Any = {"launcher": "torchrun", "hosts": ["vm0", "vm1"]}
    made = merge_ranks(ranks, [], [], "shadows", link_bits_per_s=10**9, **common)
    assert (made.bytes_per_disk, made.bytes_per_link) == (0, link)
    assert merge_ranks(ranks, [], [], "shadows", link_bits_per_s=None, **common).bytes_per_link == 0


def test_published_ranges_travel_in_checkmates_rows(tmp_path: Path) -> None:
    paths, ceilings = files(tmp_path, panel())
    found = collect_checkmate_files("checkmate", "opt", paths, ceilings, reference=REFERENCE)
    ranges = {row.system: row.paper_ranges for row in found.tidy}
    assert ranges["checkmate"] == "frequency_gain:5:34.5;repeated_work_less:80:97.1;throughput_gain:1.3:6.5"
    assert ranges["none"] is None
    broken = tmp_path / "reference.csv"
    broken.write_text("".join(REFERENCE.read_text().splitlines(keepends=True)[:2]))
    with pytest.raises(LastgoodError, match="frequency_gain: a range has one value `from` and one `to`"):
        collect_checkmate_files("checkmate", "opt", paths, ceilings, reference=broken)


# -- picture -----------------------------------------------------------------------------------------------------------


def texts(figure: Figure) -> list[str]:
    found = [text.get_text() for text in figure.texts]
    for axes in figure.axes:
        found += [axes.get_title(loc="left"), *(text.get_text() for text in axes.texts)]
    for legend in figure.legends:
        found += [text.get_text() for text in legend.get_texts()]
    return found


def test_the_picture_says_what_is_not_reached_and_what_was_lost(tmp_path: Path) -> None:
    figure = draw_checkmate(read_tidy(csv_of(tmp_path, panel())))
    throughput, frequency, lost, _, cpu = figure.axes
    assert [text.get_text() for text in throughput.texts] == ["2", "1", "6"]
    assert [text.get_text() for text in frequency.texts] == ["5", ">5", "1"]
    assert [text.get_text() for text in lost.texts] == ["4\nf5", "6\nf5", "1\nf1"]
    assert len(cpu.texts) == 3
    shown = texts(figure)
    assert "paper's range, other machines" in shown and "shadows (CPU time)" in shown
    caption = " ".join(shown).replace("\N{NO-BREAK SPACE}", " ")
    assert "share these cores" in caption and "NSDI 2026" in caption
    # 200 bytes over 40 steps.
    assert "shadows received 5 B an iteration" in caption
    assert "RESTORE DIFFERS" not in caption and "restore not proved" not in caption


@pytest.mark.parametrize("width", ["single", "double"])
def test_every_bar_has_its_name_under_it_and_no_place_is_empty(tmp_path: Path, width: Any) -> None:
    figure = draw_checkmate(read_tidy(csv_of(tmp_path, panel())), width)
    FigureCanvasAgg(figure).draw()
    systems = ["CheckFreq", "PyTorch DCP", "Checkmate"]
    for axes in figure.axes:
        labels = axes.get_xticklabels()
        names = [label.get_text() for label in labels]
        assert names in (systems, [*systems, "paper"])
        # Names are turned by one angle: what counts is how far their lines are from each other.
        apart = np.diff([axes.transData.transform((place, 0))[0] for place in axes.get_xticks()]).min()
        assert (
            apart * math.sin(math.radians(labels[0].get_rotation())) > 1.1 * labels[0].get_fontsize() / 72 * figure.dpi
        )
        # Under the numbers, and nowhere else.
        numbers = [text.get_window_extent() for text in axes.texts]
        assert not [label for label in labels if any(label.get_window_extent().overlaps(box) for box in numbers)]
    (legend,) = figure.legends
    assert not set(systems) & {text.get_text() for text in legend.get_texts()}
    if width == "double":  # in the sixth place
        box, last = legend.get_window_extent(), figure.axes[-1].get_window_extent()
        assert box.x0 > last.x1 and box.y1 <= last.y1 + 1 and box.y0 >= last.y0 - 30


def test_where_nothing_was_lost_the_axis_is_of_whole_iterations(tmp_path: Path) -> None:
    records = [record("none", 0, 9.0), record("checkmate", 1, 6.0, 0), record("sync", 1, 6.0, 0)]
    lost = draw_checkmate(read_tidy(csv_of(tmp_path, records))).axes[2]
    assert lost.get_ylim() == (0, 1)
    assert all(float(tick).is_integer() for tick in lost.get_yticks())


def test_a_life_with_other_losses_is_a_wrong_restore(tmp_path: Path) -> None:
    records = panel()
    wrong = records[2].model_copy(update={"failures": [failure(3, equal=False)]})
    assert "RESTORE DIFFERS" in texts(draw_checkmate(read_tidy(csv_of(tmp_path, [*records[:2], wrong, *records[3:]]))))


def test_a_kill_behind_which_no_loss_was_known_proves_nothing(tmp_path: Path) -> None:
    records = panel()
    assert collect("checkmate", "opt", records, make_ceilings()).tidy[2].losses_compared == 2
    unknown = failure(0).model_copy(update={"losses_checked": 0})
    records[2] = records[2].model_copy(update={"failures": [unknown]})
    assert "restore not proved" in texts(draw_checkmate(read_tidy(csv_of(tmp_path / "one", records))))
    records[2] = records[2].model_copy(update={"failures": [unknown, failure(1)]})
    assert "restore not proved" not in texts(draw_checkmate(read_tidy(csv_of(tmp_path / "two", records))))


@pytest.mark.parametrize("width", ["single", "double"])
def test_no_text_leaves_the_picture_or_lies_on_the_caption(tmp_path: Path, width: Any) -> None:
    figure = draw_checkmate(read_tidy(csv_of(tmp_path, panel())), width)
    renderer = FigureCanvasAgg(figure).get_renderer()  # type: ignore[no-untyped-call]
    whole = figure.bbox
    captions = [text for text in figure.texts if text.get_text()]
    boxes = [text.get_window_extent(renderer) for text in captions]
    boxes += [axes.get_tightbbox(renderer) for axes in figure.axes]
    boxes += [legend.get_window_extent(renderer) for legend in figure.legends]
    for number, box in enumerate(boxes):
        assert box.x0 >= whole.x0 - 1 and box.x1 <= whole.x1 + 1 and box.y0 >= whole.y0 - 1 and box.y1 <= whole.y1 + 1
        for other in boxes[number + 1 :]:
            # Lines of the caption may touch.
            overlap = min(box.y1, other.y1) - max(box.y0, other.y0)
            assert not (box.overlaps(other) and overlap > 3), (width, number)


def test_a_second_drawing_gives_the_same_bytes(tmp_path: Path) -> None:
    csv = csv_of(tmp_path, panel())
    one, two = (plot_checkmate(csv, tmp_path / name / "checkmate_opt") for name in ("a", "b"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
