"""Lightning's own checkpoints through Lastgood's plug-in: durable, checked, and the same training after a load."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch.utils.data import DataLoader

from lastgood.errors import ConfigError, CorruptCheckpoint, StateError, StorageError

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("lightning") is None, reason="lastgood[lightning] is not installed"
)


@pytest.fixture
def plugin():
    from lastgood.integrations.lightning_files import LastgoodIO

    return LastgoodIO()


def fitted(folder, plugins, epochs, ckpt_path=None):
    """The weights after so many epochs, with a ModelCheckpoint that keeps the newest two."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"width": 4, "names": ["a", "b"]})
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch, number):
            return self.layer(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    torch.manual_seed(3)
    module = Module()
    saves = lightning.pytorch.callbacks.ModelCheckpoint(folder, save_top_k=2, monitor="epoch", mode="max")
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=epochs, logger=False, enable_progress_bar=False,
        enable_model_summary=False, callbacks=[saves], plugins=plugins,
    )  # fmt: skip
    trainer.fit(
        module, DataLoader(torch.rand(6, 4, generator=torch.Generator().manual_seed(1)), 2), ckpt_path=ckpt_path
    )
    return module.layer.weight.detach().clone()


def test_a_fit_goes_on_from_its_file(plugin, tmp_path):
    """Epochs are complete there, so the training is the undisturbed one."""
    straight = fitted(tmp_path / "straight", [], 4)
    fitted(tmp_path / "job", [plugin], 2)
    newest = max((tmp_path / "job").iterdir(), key=lambda path: path.stat().st_mtime_ns)
    assert newest.stat().st_mode & 0o777 == 0o600
    assert torch.equal(fitted(tmp_path / "job", [plugin], 4, newest), straight)
    assert torch.load(newest, weights_only=True)["hyper_parameters"] == {"width": 4, "names": ["a", "b"]}
    assert len(list((tmp_path / "job").iterdir())) <= 4, "older ones are removed"


def test_what_was_flipped_is_refused(plugin, tmp_path):
    path = tmp_path / "one.ckpt"
    plugin.save_checkpoint({"state_dict": {"w": torch.full((64,), 3.0)}, "epoch": 1}, path)
    assert plugin.load_checkpoint(path, "cpu")["epoch"] == 1
    content = bytearray(path.read_bytes())
    at = content.index(torch.full((4,), 3.0).numpy().tobytes())
    content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptCheckpoint, match=r"one\.ckpt"):
        plugin.load_checkpoint(path)
    assert torch.load(path, weights_only=True)["epoch"] == 1, "torch itself does not see it"


def test_a_save_that_fails_leaves_what_was_there(plugin, tmp_path, monkeypatch):
    path = tmp_path / "one.ckpt"
    plugin.save_checkpoint({"epoch": 1}, path)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"No space left"):
        plugin.save_checkpoint({"epoch": 2}, path)
    monkeypatch.undo()
    assert plugin.load_checkpoint(path) == {"epoch": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["one.ckpt"]


def test_what_could_not_be_read_again_is_not_written(plugin, tmp_path):
    class Own:
        pass

    with pytest.raises(StateError, match="mine"):
        plugin.save_checkpoint({"mine": Own()}, tmp_path / "one.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_files_that_are_not_there(plugin, tmp_path):
    with pytest.raises(FileNotFoundError):
        plugin.load_checkpoint(tmp_path / "none.ckpt")
    plugin.remove_checkpoint(tmp_path / "none.ckpt")
    (tmp_path / "sharded").mkdir()
    (tmp_path / "sharded" / "part").write_text("")
    plugin.remove_checkpoint(tmp_path / "sharded")
    assert list(tmp_path.iterdir()) == []


def test_what_it_is_not_for(plugin, tmp_path):
    with pytest.raises(ConfigError, match="storage_options are of no use for files on a disk; leave them out"):
        plugin.save_checkpoint({}, tmp_path / "one.ckpt", {"key": "value"})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ConfigError):
        plugin.save_checkpoint({}, "s3://bucket/one.ckpt")
