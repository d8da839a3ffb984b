"""One shadow's process of an optimizer benchmark: ``python -m lastgood.experiments.optbench.process``.

Its arguments are the order, the file to which rank 0 writes the result on its own host, and, if no launcher sees to
it, the process that it ends with. RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set.
"""

from __future__ import annotations

import sys
from pathlib import Path

from lastgood.errors import LastgoodError
from lastgood.experiments.optbench.bench import BenchOrder, run_bench
from lastgood.files import PRIVATE, write_result
from lastgood.processes import die_with_parent
from lastgood.text import parse_model
from lastgood.units import MIB

__all__ = ["main"]


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")


def main(arguments: list[str] | None = None) -> int:
    """Do what the order says. 0, or an error's exit code with its message on standard error."""
    order, path, *parent = sys.argv[1:] if arguments is None else arguments
    for number in parent:
        die_with_parent(int(number))
    try:
        result = run_bench(parse_model(BenchOrder, order, "not an order for a rank", most_bytes=MIB), _say)
    except LastgoodError as error:
        sys.stderr.write(f"lastgood shadow bench: {error}\n")
        return error.exit_code
    if result is not None:
        write_result(Path(path), result.model_dump_json().encode(), mode=PRIVATE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
