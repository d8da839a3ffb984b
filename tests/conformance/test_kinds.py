"""The suite for workloads, traces and machines: green for sound ones, red for each planted fault."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lastgood.mounts import lies_in_memory
from tests.conformance.support.suite import suite
from tests.suggestions.following import follows, hear

TOY = '''
"""A workload of another package, and others with one fault each."""

import torch

from lastgood.workloads.base import BatchStream, Workload


class Points(BatchStream):
    def __init__(self, seed, of_batches=1):
        super().__init__()
        self.seed = seed

    def batch(self, index):
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        return {"x": torch.randn(8, 4, generator=generator)}


class Drawn(Points):
    """Its batches come from a generator that goes on."""

    def __init__(self, seed):
        super().__init__(seed)
        self.generator = torch.Generator().manual_seed(seed)

    def batch(self, index):
        return {"x": torch.randn(8, 4, generator=self.generator)}


class Mean(torch.nn.Module):
    """A memory of the losses so far; `size` None: it grows."""

    def __init__(self, size=1):
        super().__init__()
        self.register_buffer("seen", torch.zeros(size))

    def add(self, loss, grows):
        self.seen = torch.cat([self.seen, loss.detach()[None]]) if grows else self.seen * 0.9 + loss.detach()


def make(seed, device, data=Points, kept=True, grows=False, seeded=True, facts=True):
    if seeded:
        torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1)).to(device)
    memory = Mean().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    stream = data(seed)

    def loss(batch):
        found = (model(batch["x"]) - batch["x"].sum(1, keepdim=True)).square().mean() + 0.1 * memory.seen.mean()
        memory.add(found, grows)
        return found

    described = {"name": "points", "source": "drawn", "sha256": "0" * 64} if facts else {}
    return Workload(name="toy", model=model, optimizer=optimizer, data=stream, loss=loss, data_facts=described,
                    extra={"memory": memory} if kept else {})


def unkept(seed, device):
    return make(seed, device, kept=False)


def drawn(seed, device):
    return make(seed, device, data=Drawn)


def grows(seed, device):
    return make(seed, device, grows=True)


def unseeded(seed, device):
    return make(seed, device, seeded=False)


def unnamed(seed, device):
    return make(seed, device, facts=False)
'''

FAULTS = {
    "unkept": ("after_a_restore", "is not in the state"),
    "drawn": ("depends_on_its_number", "asked for alone"),
    "grows": ("one_layout", "another shape or size"),
    "unseeded": ("a_seed_gives", "two trainings of one seed differ"),
    "unnamed": ("what_its_data_is", "data_facts has"),
}
"""The test that finds each fault, and what it says."""

TRACES = {
    "good": ("# a cluster of mine\nperiod_s 60\n10x16 5x8 10x16\n", None, None),
    "torn": ("# a cluster of mine\nperiod_s 60\n10x16 5x\n", "reads_back", "COUNTxGPUS"),
    "unnamed": ("period_s 60\n10x16 5x8 10x16\n", "where_it_comes_from", "no comment"),
    "quiet": ("# a cluster of mine\nperiod_s 60\n10x16 5x15\n", "has_failures", "no failure"),
}


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    folder.mkdir()
    (folder / "toy.py").write_text(TOY)
    for name, (text, *_) in TRACES.items():
        (folder / f"{name}.trace").write_text(text)
    return folder


def test_sound_ones_are_green_and_each_planted_fault_is_found(site: Path, tmp_path: Path) -> None:
    words = [word for name in ("make", *FAULTS) for word in ("--workload", f"toy:{name}")]
    words += [word for name in TRACES for word in ("--trace-file", str(site / f"{name}.trace"))]
    words += ["--machine", str(tmp_path), "--machine", "/dev/shm"]
    status, told, failed = suite(site, tmp_path, *words)
    assert status == 1, told
    expected = [(f"toy:{name}", test, said) for name, (test, said) in FAULTS.items()]
    expected += [(f"{name}.trace", test, said) for name, (_, test, said) in TRACES.items() if test and said]
    expected.append(("/dev/shm", "it_is_a_disk", "lies in memory"))
    for name, test, said in expected:
        found = [text for case, text in failed.items() if name in case and test in case]
        assert len(found) == 1 and re.search(said, found[0]), (name, told)
    sound = ["toy:make", "good.trace"] + ([] if lies_in_memory(tmp_path) else [str(tmp_path) + "]"])
    assert [case for case in failed if any(name in case for name in sound)] == [], told
    assert not any(Path("/dev/shm").glob("lastgood-conformance-*"))


@follows("give MODULE:FUNCTION, a function of a seed and a device")
def test_a_name_that_is_no_function_is_told(site: Path, tmp_path: Path) -> None:
    status, told, _ = suite(site, tmp_path, "--workload", "toy", "-k", "it_trains")
    assert status == 1
    hear(told)
    status, told, _ = suite(site, tmp_path, "--workload", "toy:make", "-k", "it_trains and cpu")
    assert status == 0, told
