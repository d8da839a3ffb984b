"""Made-up records of all runs of Checkmate's figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lastgood.experiments.multirank.results import merge_ranks
from lastgood.experiments.records.run import Failure, RanksRun, RunRecord, ShadowFacts
from lastgood.experiments.tables.checkmate import collect_checkmate_files
from tests.experiments.support.rank_results import measured
from tests.experiments.support.records import make_ceilings, make_record

ROOT = Path(__file__).resolve().parents[3]
REFERENCE = ROOT / "figures" / "reference" / "checkmate.csv"


def shadow(host: str, cpu_s: float = 1.0) -> ShadowFacts:
    return ShadowFacts(host=host, cpu_s=cpu_s, received_bytes=100, optimizer_s=0.25, peak_rss_bytes=7)


def failure(lost: int, *, equal: bool = True) -> Failure:
    return Failure(
        kill_after_steps=5.5,
        reached_step=40,
        restored_step=40 - lost,
        lost_steps=lost,
        restore_s=0.5,
        losses_checked=2,
        losses_equal=equal,
    )


def links(per_link: int = 10**7) -> RanksRun:
    made = merge_ranks(
        [measured(0), measured(1)], [], [], "each", launcher="torchrun", hosts=["vm1", "vm2"], link_bits_per_s=10**9
    )
    return made.model_copy(update={"bytes_per_disk": 0, "bytes_per_link": per_link})


def record(system: str, interval: int, rate: float, *lost: int, repetition: int = 0, **more: Any) -> RunRecord:
    made = make_record(system, interval, repetition, iterations_per_s=rate, workload="opt", **more)
    own = {"ranks": 2, "nodes": 2, "parallel": "ddp", "kills": len(lost)}
    values = {
        "spec": made.spec.model_copy(update=own),
        "ranks": links(),
        "failures": [failure(one) for one in lost],
        "shadows": [shadow("vm1"), shadow("vm2", 2.0)] if system == "checkmate" else [],
    }
    return made.model_copy(update=values)


def panel() -> list[RunRecord]:
    return [
        record("none", 0, 9.0),
        record("checkmate", 1, 6.0, 1, proof=True),
        *(record("checkfreq", interval, rate, lost) for interval, rate, lost in ((1, 2.0, 1), (5, 7.0, 4))),
        *(record("dcp", interval, rate, lost) for interval, rate, lost in ((1, 1.0, 1), (5, 2.0, 6))),
    ]


def files(folder: Path, records: list[RunRecord]) -> tuple[list[Path], Path]:
    paths = []
    for one in records:
        path = folder / one.spec.record_path()
        path.parent.mkdir(parents=True, exist_ok=True)
        one.write(path)
        paths.append(path)
    ceilings = folder / "ceilings.json"
    ceilings.write_text(make_ceilings().model_dump_json())
    return paths, ceilings


def csv_of(tmp_path: Path, records: list[RunRecord]) -> Path:
    paths, ceilings = files(tmp_path, records)
    csv = tmp_path / "checkmate_opt.csv"
    collect_checkmate_files("checkmate", "opt", paths, ceilings, reference=REFERENCE).write(csv, tmp_path / "wide.csv")
    return csv
