"""Whether two folders of records tell the same of a figure: one of a quiet machine, one of a disturbed machine.

Looks at runs in pairs (docs/timing.md). Two things must hold: a ratio that both know to 5 % is the same, as far as the
intervals go; and two systems whose intervals lie apart in both have the same order. Exits with 1 where one does not.
"""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path

from lastgood.errors import LastgoodError
from lastgood.experiments.formulas.pairs import PairEstimate, estimate_pairs
from lastgood.experiments.records.run import RunRecord

KNOWN = 0.05
Cell = tuple[str, int, str]


def cells(folder: Path) -> dict[Cell, PairEstimate]:
    """Workload, interval and system to what its pairs say."""
    found: dict[Cell, PairEstimate] = {}
    for path in sorted(folder.rglob("r*.json")):
        try:
            record = RunRecord.load(path)
        except LastgoodError:
            continue  # a record of another kind
        estimate = None if record.pairs is None else estimate_pairs(record.pairs.blocks)
        if estimate is not None:
            found[record.spec.workload, record.spec.interval_steps, record.spec.system] = estimate
    return found


def apart(one: PairEstimate, other: PairEstimate) -> bool:
    """Whether intervals say which is larger."""
    return one.low > other.high or other.low > one.high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("quiet", type=Path)
    parser.add_argument("disturbed", type=Path)
    options = parser.parse_args()
    quiet, disturbed = cells(options.quiet), cells(options.disturbed)
    shared = sorted(quiet.keys() & disturbed.keys())
    faults = []
    known = 0
    for cell in shared:
        one, other = quiet[cell], disturbed[cell]
        both = max(one.half_width, other.half_width) <= KNOWN
        known += both
        wrong = both and apart(one, other)
        print(
            f"{' '.join(map(str, cell)):32s} quiet {one.ratio:.3f} ({one.low:.3f} to {one.high:.3f}), disturbed "
            f"{other.ratio:.3f} ({other.low:.3f} to {other.high:.3f})"
            f"{'' if both else '  not known to 5 %'}{'  DIFFERENT' if wrong else ''}"
        )
        faults += [cell] * wrong
    orders = wrong_orders = 0
    for one, other in itertools.combinations(shared, 2):
        if one[:2] != other[:2]:
            continue
        if apart(quiet[one], quiet[other]) and apart(disturbed[one], disturbed[other]):
            orders += 1
            if (quiet[one].ratio > quiet[other].ratio) != (disturbed[one].ratio > disturbed[other].ratio):
                wrong_orders += 1
                print(f"{one[0]} {one[1]}: {one[2]} and {other[2]} have another ORDER")
    print(f"{known} of {len(shared)} ratios known to 5 % in both, {len(faults)} of them different")
    print(f"{orders} orders of two systems decided in both, {wrong_orders} of them different")
    raise SystemExit(bool(faults or wrong_orders))


if __name__ == "__main__":
    main()
