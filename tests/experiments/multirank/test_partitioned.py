"""Measured runs under DeepSpeed, each rank with a part of its own: the same training as data-parallel, and proved."""

from __future__ import annotations

import importlib.util
import json
import select
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.experiments.machine.facts import boot_id
from lastgood.experiments.multirank.order import RankOrder, result_path
from lastgood.experiments.multirank.results import MeasuredRank, RestoredRank, merge_proofs
from lastgood.experiments.records.spec import RunSpec
from lastgood.experiments.systems.over_ranks import PARTED
from lastgood.ports import free_ports
from lastgood.workloads.data.prepare import prepare_dataset
from tests.experiments.support.rank_runs import OPT, spec_of

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="lastgood[deepspeed] is not installed"
)
LIMIT_S = 400
BLOOM = {name: value for name, value in OPT.items() if name != "feedforward"}
SIZES = {"opt": OPT, "bloom": BLOOM}


class Ranks:
    """Asks the process that forks ranks; its log and theirs are kept for what goes wrong."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.data_dir = folder / "data"
        prepare_dataset("wikitext", self.data_dir)
        self.runs = 0
        self.errors = (folder / "parent.log").open("wb")
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parents[1] / "support" / "forked_ranks.py")],
            cwd=folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
        )

    def ask(self, spec: RunSpec, phase: str, folder: Path) -> tuple[list[int], str]:
        """Exit codes of the ranks, and what they wrote."""
        (port,) = free_ports()
        order = RankOrder(
            spec=spec, phase=phase, folder=str(folder), data_dir=str(self.data_dir), token="here", boot_id=boot_id()
        )
        logs = folder / f"logs-{phase}"
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        asked = {"order": order.model_dump(mode="json"), "world": spec.ranks, "port": port, "logs": str(logs)}
        self.process.stdin.write(json.dumps(asked) + "\n")
        self.process.stdin.flush()
        while True:  # DeepSpeed prints when it is imported
            ready, _, _ = select.select([self.process.stdout], [], [], LIMIT_S)
            said = "\n".join(path.read_text()[-3000:] for path in sorted(logs.glob("*.log")))
            assert ready, f"waited {LIMIT_S} s for {phase} of {spec.title()}: {said}"
            line = self.process.stdout.readline()
            assert line, f"ended during {phase}: {(self.folder / 'parent.log').read_text()[-3000:]}"
            if line.startswith('{"codes"'):
                return json.loads(line)["codes"], said

    def measure(self, spec: RunSpec) -> tuple[list[MeasuredRank], Path]:
        """What each rank measured, and the run's folder."""
        self.runs += 1
        folder = self.folder / f"run-{self.runs}"
        codes, said = self.ask(spec, "measure", folder)
        assert codes == [0] * spec.ranks, said
        return [self._result(MeasuredRank, folder, "measure", rank) for rank in range(spec.ranks)], folder

    def restore(self, spec: RunSpec, folder: Path) -> list[RestoredRank]:
        codes, said = self.ask(spec, "restore", folder)
        assert codes == [0] * spec.ranks, said
        return [self._result(RestoredRank, folder, "restore", rank) for rank in range(spec.ranks)]

    @staticmethod
    def _result(kind, folder, phase, rank):
        return kind.model_validate_json(result_path(folder, phase, rank).read_bytes())

    def end(self) -> None:
        self.process.kill()  # its ranks end with it
        self.process.wait(30)
        self.process.stdin.close()
        self.process.stdout.close()
        self.errors.close()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    made = Ranks(tmp_path_factory.mktemp("parted"))
    yield made
    made.end()


@pytest.fixture(scope="module")
def data_parallel(ranks):
    """Losses of the same training without DeepSpeed, by model."""
    known = {}

    def losses(model):
        if model not in known:
            spec = parted("none", model, "ddp", interval_steps=0, proof=False)
            known[model] = mean_losses(ranks.measure(spec)[0])
        return known[model]

    return losses


def parted(system, model, parallel, **changed):
    values = {"warmup_steps": 30, "workload": model, "workload_options": SIZES[model], **changed}
    return spec_of(system, parallel=parallel, **values)


def mean_losses(measured):
    return [statistics.fmean(losses) for losses in zip(*(one.workload.losses for one in measured), strict=True)]


def everyday(*cells):
    every = [
        (parallel, model, system)
        for parallel in PARTED
        for model in SIZES
        for system in ("sync", "checkfreq", "pccheck")
    ]
    return [pytest.param(*cell, marks=[] if cell in cells else pytest.mark.slow, id="-".join(cell)) for cell in every]


@pytest.mark.parametrize(
    ("parallel", "model", "system"),
    everyday(),
)
def test_a_part_of_each_rank_comes_back_to_the_bit(ranks, data_parallel, parallel, model, system):
    spec = parted(system, model, parallel)
    measured, folder = ranks.measure(spec)
    for one in measured:
        assert (one.counts.durable, one.counts.failed) == (2, 0)
        assert one.resources.bytes_written >= 2 * one.workload.state_bytes
    # The same batches, and nothing else that differs but the order of sums: a clipped gradient, or one that lacks a
    # tied part, shows after some steps. A pipeline's stages draw other dropout masks, and BLOOM has none.
    if parallel != "pipeline" or model == "bloom":
        assert mean_losses(measured) == pytest.approx(data_parallel(model), rel=3e-7)
    # Weights and two moments in fp32, in parts; the embedding is on both ends of a pipeline.
    count = measured[0].workload.parameters
    held = sum(one.workload.state_bytes for one in measured)
    twice = SIZES[model]["vocabulary"] * SIZES[model]["hidden"] if parallel == "pipeline" else 0
    assert 12 * (count + twice) <= held < 12 * (count + twice) + 40_000
    restored = ranks.restore(spec, folder)
    proof, equal = merge_proofs([one.live for one in measured], restored)
    assert equal == [True, True] and proof.equal
    assert len({one.digest for one in restored}) == 2  # parts, not copies


def test_ranks_that_write_apart_go_on_from_what_all_of_them_have(ranks):
    spec = parted("sync", "opt", "pipeline", warmup_steps=2)
    measured, folder = ranks.measure(spec)
    step = measured[0].live.step
    (newest,) = rank_directory(folder / "checkpoints", 1).glob(f"*-step-{step}.pt")
    newest.unlink()
    assert [one.step for one in ranks.restore(spec, folder)] == [step - 1, step - 1]
    shutil.rmtree(rank_directory(folder / "checkpoints", 1))
    codes, said = ranks.ask(spec, "restore", folder)
    assert codes == [1, 1] and "ranks [1] have no checkpoint, ranks' newest: [8, None]" in said


def test_a_pipeline_of_more_stages_than_layers_is_refused(ranks):
    spec = parted("none", "opt", "pipeline", ranks=7, interval_steps=0, proof=False)
    codes, said = ranks.ask(spec, "measure", ranks.folder / "many")
    assert codes == [2] * 7 and "opt has 6 layers, too few for a pipeline of 7 stages" in said
