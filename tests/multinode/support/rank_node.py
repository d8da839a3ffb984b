"""On a node: forks ranks for the tests of the agreement. Run as: rank_node.py SOCKET; all end with that connection.

It is `rank_server` of tests/checkpointers/support, told what to do over a socket in the file system, which all nodes
share: so the test can talk to a rank whose network is cut.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "checkpointers" / "support"))

import rank_server
import torch


class NodeRank(rank_server.Rank):
    """A rank whose state can grow, so that its disk may become too small."""

    def grow(self, nbytes: int) -> None:
        self.training.plain["more"] = torch.zeros(nbytes, dtype=torch.uint8)

    def shrink(self) -> None:
        del self.training.plain["more"]


rank_server.Rank = NodeRank
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
sys.stdin, sys.stdout = connection.makefile("r"), connection.makefile("w")
rank_server.main()
