"""What NVRx's worker writes, read without the library and without torch's unpickler."""

from __future__ import annotations

import pytest
import torch

from lastgood import _native
from lastgood.checkpointers.directories.manifest import MANIFEST, manifest_text
from lastgood.checkpointers.directories.named_state import LAYOUT_NAME, live_tensors
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.third_party.nvrx import _FILE
from lastgood.state import flatten
from tests.checkpointers.support.pickle_craft import named, of, torch_file


def seal(directory, step, write):
    place = directory / f"checkpoint-0000000{step}-step-{step}"
    place.mkdir(exist_ok=True)
    write(place / _FILE)
    content = (place / _FILE).read_bytes()
    (place / MANIFEST).write_bytes(manifest_text(step, {_FILE: (len(content), _native.crc32c(content, 0))}))


@pytest.mark.parametrize(
    "newest",
    [
        None,
        torch_file(of([1])),
        torch_file(of({LAYOUT_NAME: 1})),
        torch_file(of({})),
        torch_file(named("os", "system") + of(("true",)) + b"R"),
        b"no zip",
    ],
    ids=["sound", "a list", "a number", "nothing", "code", "no zip"],
)
def test_the_newest_sound_one_is_read(tmp_path, newest):
    tensors = live_tensors(flatten({"weights": torch.arange(5.0), "step": 3}))
    seal(tmp_path, 1, lambda path: torch.save(tensors, path))
    seal(tmp_path, 2, lambda path: torch.save(tensors, path) if newest is None else path.write_bytes(newest))
    fresh = {"weights": torch.zeros(5), "step": 0}
    assert checkpointer_class("nvrx")(tmp_path).restore(fresh) == (2 if newest is None else 1)
    assert torch.equal(fresh["weights"], torch.arange(5.0)) and fresh["step"] == 3


@pytest.mark.parametrize("name", ["weights", LAYOUT_NAME])
@pytest.mark.parametrize("other", [torch.zeros(5, dtype=torch.float64), torch.zeros(2, 5), torch.zeros(5)[:0]], ids=str)
def test_a_tensor_of_another_kind_is_refused(tmp_path, name, other):
    tensors = live_tensors(flatten({"weights": torch.arange(5.0)}))
    seal(tmp_path, 1, lambda path: torch.save(tensors, path))
    seal(tmp_path, 2, lambda path: torch.save({**tensors, name: other}, path))
    assert checkpointer_class("nvrx")(tmp_path).restore({"weights": torch.zeros(5)}) == 1
