"""Makes the kept captures beside it: ``python -m tests.mirror.samples.make`` as root, in the project's folder.

`gloo-2.pcap.xz` and `gloo-3.pcap.xz` are rank 0's port in a training of `tests.mirror.support.training.make` by 2 and
3 ranks, 4 steps, bucket_cap_mb 0.002; `.npz` beside each is the truth (`tests.mirror.support.live_rank`), without the
states between; `.json` is what DDP logged about its buckets.
"""

from __future__ import annotations

import lzma
import tempfile
from pathlib import Path

import numpy as np

from tests.mirror.support.live import train

STEPS = 4


def main() -> None:
    here = Path(__file__).parent
    for ranks in (2, 3):
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            train(out, ranks, STEPS)
            packed = lzma.compress((out / "capture.pcap").read_bytes(), preset=9 | lzma.PRESET_EXTREME)
            (here / f"gloo-{ranks}.pcap.xz").write_bytes(packed)
            truth = np.load(out / "truth.npz")
            between = tuple(f"after.{step}." for step in range(STEPS - 1))
            kept = {name: truth[name] for name in truth.files if not name.startswith(between)}
            # Buffers cannot be computed from what passes: those of each step are kept.
            kept |= {name: truth[name] for name in truth.files if name.startswith(between) and ".norm." in name}
            np.savez_compressed(here / f"gloo-{ranks}.npz", **kept)
            (here / f"gloo-{ranks}.json").write_bytes((out / "ddp.json").read_bytes())


if __name__ == "__main__":
    main()
