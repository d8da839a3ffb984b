"""Files and folders that calls.yaml names: hostfiles, keys, records, checkpoints. Each is made when a call needs it."""

from __future__ import annotations

import csv
import json
import shlex
import shutil
import socket
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import torch

from lastgood import PCcheck
from lastgood.experiments.advise.cells import _MAX_FILES
from lastgood.experiments.records.run import RunSpec
from lastgood.ports import free_ports
from tests.experiments.support.records import make_ceilings
from tests.suggestions.source_texts import ROOT


class Places:
    """What stands in braces in a call."""

    root = ROOT
    golden = ROOT / "tests" / "golden" / "data"
    measured = ROOT / "figures" / "measured" / "amd-epyc-2c"

    def __init__(self, tmp: Path) -> None:
        self.tmp = tmp
        contents = {"hosts": "a slots=1\n", "nohosts": "", "token": "x" * 32, "file": ""}
        for name, content in contents.items():
            (tmp / name).write_text(content)
            (tmp / name).chmod(0o600)
        self.hosts, self.nohosts, self.token, self.file = (tmp / n for n in ("hosts", "nohosts", "token", "file"))

    @cached_property
    def many(self) -> Path:
        """A hostfile of more hosts than measure each other's bandwidth."""
        path = self.tmp / "many"
        path.write_text("".join(f"host{number} slots=1\n" for number in range(129)))
        return path

    @cached_property
    def noway(self) -> Path:
        """An ssh configuration with which no host is reached, at once."""
        path = self.tmp / "noway"
        path.write_text("Host *\n    ProxyCommand false\n")
        return path

    @cached_property
    def port(self) -> int:
        return free_ports()[0]

    @cached_property
    def taken(self) -> str:
        """An address at which somebody listens, as long as these places are there."""
        self.listener = socket.create_server(("127.0.0.1", 0))
        return f"127.0.0.1:{self.listener.getsockname()[1]}"

    @cached_property
    def paired(self) -> Path:
        """Records with their `none` runs."""
        return self.golden / "records" / "fig8_transformer_xl"

    @cached_property
    def unpaired(self) -> Path:
        """Records without."""
        folder = self.tmp / "unpaired"
        shutil.copytree(self.paired, folder, ignore=shutil.ignore_patterns("none"))
        return folder

    @cached_property
    def rankspec(self) -> str:
        """A run of two ranks."""
        fields = {**json.loads(self.spec), "ranks": 2, "parallel": "ddp"}
        return RunSpec.model_validate(fields).model_dump_json()

    @cached_property
    def spec(self) -> str:
        """A run of one rank."""
        fields = {"machine": "m", "scale": "laptop", "workload": "opt", "system": "none", "interval_steps": 0}
        more = {
            "method": 1,
            "seed": 0,
            "repetition": 0,
            "device": "cpu",
            "warmup_steps": 1,
            "measured_steps": 1,
            "threads": 1,
        }
        return RunSpec.model_validate({**fields, **more}).model_dump_json()

    @cached_property
    def ceilings(self) -> Path:
        make_ceilings(machine="testbox").write(self.tmp / "ceilings.json")
        return self.tmp / "ceilings.json"

    @cached_property
    def oldceilings(self) -> Path:
        path = self.tmp / "old.json"
        path.write_text('{"ceilings_version": 0}')
        return path

    @cached_property
    def both(self) -> Path:
        """Records of two machines."""
        folder = self.tmp / "both"
        kept = self.golden / "records" / "fig8_transformer_xl"
        shutil.copytree(kept, folder / "a")
        for path in (folder / "a").rglob("*.json"):
            other = folder / "b" / path.relative_to(folder / "a")
            other.parent.mkdir(parents=True, exist_ok=True)
            other.write_text(path.read_text().replace("testbox", "anotherbox"))
        return folder

    @cached_property
    def records(self) -> str:
        return shlex.join(map(str, sorted((self.golden / "records" / "fig8_transformer_xl").rglob("*.json"))))

    @cached_property
    def crowded(self) -> Path:
        """More files than are read, and beside them a folder with some."""
        folder = self.tmp / "crowded"
        shutil.copytree(self.golden / "records" / "fig8_transformer_xl", folder / "down")
        for number in range(_MAX_FILES):
            (folder / f"r{number}.json").touch()
        return folder

    def _table(self, name: str, change: Callable[[dict[str, str]], object]) -> Path:
        with (self.golden / "tables" / "fig8_transformer_xl_kept.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row in rows:
            change(row)
        path = self.tmp / name
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, [*rows[0]])
            writer.writeheader()
            writer.writerows(rows)
        return path

    @cached_property
    def lacking(self) -> Path:
        """A figure's table without a column that is needed."""
        return self._table("fig8_lacking.csv", lambda row: row.pop("system"))

    @cached_property
    def unmeasured(self) -> Path:
        """A figure's table without what the runs measured."""
        return self._table("fig8_unmeasured.csv", lambda row: row.pop("durable_iterations_per_s"))

    @cached_property
    def fewer(self) -> Path:
        """A figure's table without all of its runs."""
        return self._table("fig8_fewer.csv", lambda row: row.update(runs_expected="999"))

    @cached_property
    def checkpoints(self) -> Path:
        return self._trained("checkpoints", good=True)

    @cached_property
    def bad(self) -> Path:
        return self._trained("bad", good=False)

    def _trained(self, name: str, *, good: bool) -> Path:
        checkpointer = PCcheck(self.tmp / name, interval_steps=1)
        checkpointer.attach(model=torch.nn.Linear(2, 2))
        checkpointer.step()
        checkpointer.drain()
        if not good:
            checkpointer.verdict(1, ok=False)
        checkpointer.close()
        return self.tmp / name
