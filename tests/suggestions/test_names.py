"""What texts of errors and of the log suggest to write exists: commands, options, keywords, targets, extras, variables.

Here each is looked up; the other modules of this folder follow them.
"""

from __future__ import annotations

import ast
import inspect
import re
from typing import Any

import pytest
import typer.main

from lastgood.checkpointers.base import Checkpointer
from lastgood.checkpointers.export.warm_start import load_parts
from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names
from lastgood.cli import app
from lastgood.experiments.records.dcp import DcpSpec
from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter
from lastgood.sparse.engine import Engine
from lastgood.storage import SlotStore
from tests.suggestions.source_texts import ROOT, TREES, said, text_of

COMMANDS = typer.main.get_command(app)
OTHERS_OPTIONS = {"--force-reinstall", "--format", "--nproc-per-node", "--pyargs", "--basetemp", "--checkpointer"}
"""Of pip, git, torchrun and pytest, and what lastgood.conformance gives to that."""
OTHERS_KEYWORDS = {
    *("slots", "seed", "loss", "project", "run"),  # of a hostfile's and a link's lines, and of clouds' labels
    *(
        "requires_grad",
        "foreach",
        "no_dist",
        "broadcast_buffers",
        "init_sync",
        "sparse",
        "use_reentrant",
        "momentum",
    ),  # of torch
    "iface",  # of DPDK's net_af_packet
    *("epochs", "path"),  # of the configurations of the S3 connector's benchmarks
    *("trial", "reload_dataloaders_every_n_epochs"),  # of the Trainers of Hugging Face and Lightning
    *("shadow", "cause", "bucket", "code", "type"),  # labels of metrics
}
OTHERS_VARIABLES = {
    "SSH_CONNECTION",  # sshd's
    *("CAP_SYS_ADMIN", "CAP_NET_ADMIN", "CAP_NET_RAW", "PR_SET_PDEATHSIG"),  # the kernel's
    "ELEM_SIZE",  # an argument's name
    *("NCCL_BUFFSIZE", "NCCL_NTHREADS", "NCCL_PROTO", "SLURM_CONF"),
    *("NCCL_IB_QPS_PER_CONNECTION", "NCCL_IB_SPLIT_DATA_ON_QPS", "NCCL_MAX_NCHANNELS"),
}


def children_of(command: Any) -> dict[str, Any]:
    """Not by its class: typer may bring a click of its own."""
    return getattr(command, "commands", {})


def all_options(command: Any) -> set[str]:
    own = {name for one in command.params for name in (*one.opts, *one.secondary_opts)} | {"--help"}
    return own.union(*map(all_options, children_of(command).values()))


def program_options() -> set[str]:
    """Of programs that this package starts itself, as they are given to argparse."""
    calls = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Call))
    adds = (node for node in calls if isinstance(node.func, ast.Attribute) and node.func.attr == "add_argument")
    return {text for node in adds for one in node.args if (text := text_of(one))}


def known_keywords() -> set[str]:
    calls = [Checkpointer.attach, Checkpointer.__init__, SlotStore.__init__, load_parts]
    names = set().union(*(inspect.signature(one).parameters for one in calls))
    names |= {*DcpSpec.model_fields}.union(
        *(inspect.signature(one).parameters for one in (LastgoodReader, LastgoodWriter, Engine))
    )
    for system in checkpointer_names():
        kind = checkpointer_class(system)
        names |= {*kind.Options.model_fields, *inspect.signature(kind.restore).parameters}
        names |= set(inspect.signature(kind.__init__).parameters)
    return names


def used_names() -> set[str]:
    """What the source has as a whole literal: a variable that is read stands so, or in a script's text."""
    nodes = (node for tree in TREES.values() for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return {node.value for node in nodes if isinstance(node.value, str)}


OPTIONS = all_options(COMMANDS) | program_options() | OTHERS_OPTIONS
KEYWORDS = known_keywords() | OTHERS_KEYWORDS | {"model", "data", "more", "optimizer", "engine"}
VARIABLES = used_names() | OTHERS_VARIABLES
TARGETS = set(re.findall(r"^rule (\w+)", "\n".join(p.read_text() for p in ROOT.rglob("*.smk")), re.MULTILINE)) | set(
    re.findall(r"^\s*rule (\w+)", (ROOT / "Snakefile").read_text(), re.MULTILINE)
)
_OPTIONAL = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
EXTRAS = set(re.findall(r"^(\w+) = \[", _OPTIONAL, re.MULTILINE))


def wrong_command(words: list[str]) -> str | None:
    command = COMMANDS
    while words and children_of(command) and not words[0].startswith(("-", "{")) and words[0] != "FIGURE":
        if words[0] not in children_of(command):
            return f"no command {words[0]!r}"
        command, words = children_of(command)[words[0]], words[1:]
    known = all_options(command)
    missing = [word for word in words if re.fullmatch(r"--[a-z][a-z-]*", word) and word not in known]
    return f"{command.name} has no option {missing[0]}" if missing else None


def wrong(text: str) -> list[str]:
    """What a text suggests, and does not exist."""
    found = []
    for command in re.findall(r"`lastgood ([a-z][^`]*)`", text):
        found.append(wrong_command(command.split()))
    for option in re.findall(r"(?<![\w-])--[a-z][a-z-]*", text):
        found.append(None if option in OPTIONS else f"no command has an option {option}")
    for name in re.findall(r"(?:^|[\s(`{,])([a-z][a-z_]+)=(?=[\w'\"\[.,;)]|$)", text):
        found.append(None if name in KEYWORDS else f"nothing takes {name}=")
    for name in re.findall(r"(?<![\w$])[A-Z][A-Z0-9]*_[A-Z0-9_]+\b", text):
        found.append(None if name in VARIABLES else f"nothing reads {name}")
    for name in re.findall(r"`snakemake (\w+)`", text):
        found.append(None if name in TARGETS else f"no target {name}")
    for name in re.findall(r"(?:lastgood|\.)\[(\w+)\]'", text):
        found.append(None if name in EXTRAS else f"no extra {name}")
    for name in re.findall(r"\bcheckpointer\.(\w+)\(", text):
        kinds = map(checkpointer_class, checkpointer_names())
        found.append(None if any(hasattr(kind, name) for kind in kinds) else f"no system has {name}()")
    return [one for one in found if one]


@pytest.mark.parametrize(
    "text",
    [
        "call `lastgood mend --all`",
        "see `lastgood shadow serves`",
        "give `lastgood verify --repair`",
        "or raise it with --limit-of-bytes",
        "pass intervall=5",
        'use attach(..., resume_form="x")',
        "set LASTGOOD_NO_SUCH_NAME",
        "`snakemake fig99` makes it",
        "pip install 'lastgood[everything]'",
        "call checkpointer.look(model) first",
    ],
)
def test_an_invented_suggestion_is_found(text):
    assert wrong(text)


def test_what_texts_suggest_exists():
    texts = said()
    assert len(texts) > 2000, "most of what the source says must have been read"
    assert {where: faults for where, text in texts if (faults := wrong(text))} == {}
