"""Blocks of Python in docs/: each is tagged, and those with the tag `run` are run, by Sybil, as a reader would."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lastgood import PCcheck
from lastgood.checkpointers.traits import Limit, Traits
from lastgood.cli import app

sybil = pytest.importorskip("sybil", reason="Sybil is not installed: pip install -r tests/requirements.txt")
from sybil.parsers.markdown import PythonCodeBlockParser  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
TAG = re.compile(r"<!-- (run|long|needs-[a-z]+) -->\n *$")
PAGES = [path for path in sorted(ROOT.glob("docs/*.md")) if "```python" in path.read_text()]
RUN = [path for path in PAGES if "<!-- run -->" in path.read_text()]


def tag_before(text: str, place: int) -> str | None:
    found = TAG.search(text[:place])
    return found[1] if found else None


class TaggedBlocks(PythonCodeBlockParser):
    """Those with the tag `run` directly before them."""

    def __call__(self, document: Any) -> Iterator[Any]:
        for region in super().__call__(document):
            if tag_before(document.text, region.start) == "run":
                yield region


def prepared(page: str) -> dict[str, Any]:
    """The names that a page's blocks use as its reader's own; files that they read are made in this folder."""
    model = torch.nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    found: dict[str, Any] = {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100),
        "loader": torch.utils.data.DataLoader(torch.randn(64, 8), batch_size=4, shuffle=True),
        "loss": torch.tensor(0.5),
        "state": {"model": model, "optimizer": optimizer},
        "Limit": Limit,
        "Traits": Traits,
    }
    if page == "looking-inside.md":
        model(torch.ones(8)).sum().backward()
        optimizer.step()
        with contextlib.closing(PCcheck("job")) as checkpointer:
            checkpointer.start(found["state"])
            checkpointer.save(1)
        for out, to in (("model.safetensors", "safetensors"), ("OUT", "dcp")):
            assert CliRunner().invoke(app, ["export", "job", out, "--to", to]).exit_code == 0
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_has_a_tag(page: Path) -> None:
    text = page.read_text()
    untagged = [
        text[: found.start()].count("\n") + 1
        for found in re.finditer(r"^ *```python", text, re.MULTILINE)
        if tag_before(text, found.start()) is None
    ]
    assert untagged == [], "lines of blocks without a tag"


@pytest.mark.parametrize("page", RUN, ids=lambda page: page.name)
def test_blocks_that_are_to_run_do(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = sybil.Sybil([TaggedBlocks()]).parse(page)
    document.namespace.update(prepared(page.name), __name__="__main__")
    count = 0
    for example in document.examples():
        example.evaluate()
        count += 1
    assert count == page.read_text().count("<!-- run -->")
