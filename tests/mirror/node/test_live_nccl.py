"""Live NCCL traffic of two GPUs over sockets: the mirror node's state is the trainers', to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

from lastgood import FlowCheck
from lastgood.gradients.shadow.settings import ShadowSettings
from lastgood.mirror.capture.interface import InterfaceSource
from lastgood.mirror.job.describe import describe
from lastgood.mirror.job.description import Backend
from lastgood.mirror.node.node import MirrorNode
from lastgood.mirror.node.settings import NodeSettings
from lastgood.mirror.node.stages import local_stages
from lastgood.ports import free_ports
from lastgood.units import MIB
from tests.mirror.support.nccl_rank import make_cuda_training
from tests.support.patience import PATIENCE, wait_until

ROOT = Path(__file__).parents[3]
STEPS = 100
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to capture"),
]


def version() -> str:
    return ".".join(map(str, torch.cuda.nccl.version()))


def start_ranks(folder: Path, kind: str, protocol: str, channels: int) -> list[subprocess.Popen[bytes]]:
    port = str(free_ports()[0])
    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": "2",
        "NCCL_NET": "Socket",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": {"simple": "Simple", "ll": "LL"}[protocol],
        "NCCL_MIN_NCHANNELS": str(channels),
        "NCCL_MAX_NCHANNELS": str(channels),
    }
    words = [sys.executable, "-m", "tests.mirror.support.nccl_rank", str(folder / "end.pt"), str(STEPS), kind]
    ranks = []
    for rank in range(2):
        with (folder / f"rank-{rank}.log").open("wb") as log:
            environment = {**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [*words, str(folder / "go")]
            ranks.append(subprocess.Popen(command, env=environment, cwd=ROOT, stdout=log, stderr=log))
    return ranks


@pytest.mark.parametrize("channels", [1, 2])
@pytest.mark.parametrize("protocol", ["simple", "ll"])
@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_node_holds_the_trainers_state(kind: str, protocol: str, channels: int, tmp_path: Path) -> None:
    backend = Backend(kind="nccl", version=version(), protocol=protocol, channels=channels)  # type: ignore[arg-type]
    job = describe(make_cuda_training(kind, "cuda:0"), ranks=2, backend=backend, steps=2 * STEPS)
    ranks = start_ranks(tmp_path, kind, protocol, channels)
    # Each frame of the loopback is seen twice: as it goes out, and as it comes in.
    source = InterfaceSource("lo", own_frames=False, ring_bytes=512 * MIB)
    node = MirrorNode(
        job,
        tmp_path / "node",
        local_stages(source, job, ["127.0.0.1"], NodeSettings()),
        token_file=tmp_path / "token",
        settings=NodeSettings(),
        shadow=ShadowSettings(0, 1),
    )
    thread = threading.Thread(target=node.run, daemon=True)
    thread.start()
    try:
        (tmp_path / "go").touch()
        for rank, process in enumerate(ranks):
            assert process.wait(120 * PATIENCE) == 0, (tmp_path / f"rank-{rank}.log").read_text()[-3000:]
        wait_until(lambda: STEPS in node.status().held, lambda: node.status(), 30)
        found = make_cuda_training(kind, "cuda:0")
        checkpointer = FlowCheck(tmp_path / "job", nodes=[node.address], token_file=str(tmp_path / "token"))
        state = {"model": found.model, "optimizer": found.optimizer}
        assert checkpointer.restore(state) == STEPS
        checkpointer.close()
    finally:
        for process in ranks:
            process.kill()
            process.wait(30)
        node.stop()
        thread.join(60)
        node.close()
    truth = torch.load(tmp_path / "end.pt", weights_only=True)
    for name, value in truth["model"].items():
        assert torch.equal(found.model.state_dict()[name], value), name
    for number, values in truth["optimizer"]["state"].items():
        for name, value in values.items():
            ours = found.optimizer.state_dict()["state"][number][name]
            assert torch.equal(torch.as_tensor(ours), torch.as_tensor(value)), (number, name)
