"""What an import costs, and that floors import downward only."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import lastgood
from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names

ROOT = Path(lastgood.__file__).parent
FLOORS = [
    {"errors", "units", "text", "files", "tokens", "addresses", "bounds", "pickles", "locks", "processes"}
    | {"ports", "sinks", "notices", "host_memory", "extras", "world", "_lazy", "_native"},
    {"state", "storage", "optim", "wire"},
    {"checkpointers", "gradients", "mirror", "sparse", "cluster"},
    {"training", "workloads", "integrations"},
    {"experiments", "cli", "__main__"},
]


def loaded_after(statement):
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize(
    "statement",
    [
        "import lastgood",
        "import lastgood.cli",
        "from lastgood import checkpointer_class as load, checkpointer_names; [load(n) for n in checkpointer_names()]",
        "import lastgood.experiments.plan.load, lastgood.experiments.figures.workflow_plan",
        "import lastgood.experiments.runs.execute",
        "import lastgood.cluster.host_check.check, lastgood.cluster.testbed.testbed",
        "import lastgood.integrations.deepspeed",
        "import lastgood.gradients.shadow.service, lastgood.gradients.shadow.metrics",
        "import lastgood.gradients.protocol.client",
    ],
)
def test_needs_no_torch(statement):
    modules = loaded_after(statement)
    assert not modules & {"torch", "deepspeed", "transformers", "torchvision", "matplotlib", "pandas"}


def test_public_names_exist():
    for name in lastgood.__all__:
        assert getattr(lastgood, name) is not None
    with pytest.raises(AttributeError, match="no_such"):
        _ = lastgood.no_such


def test_every_built_in_system_has_a_public_name():
    named = {getattr(lastgood, name) for name in lastgood.__all__}
    ours = [
        kind for name in checkpointer_names() if (kind := checkpointer_class(name)).__module__.startswith("lastgood.")
    ]
    assert [kind for kind in ours if kind not in named] == []


def test_type_checkers_see_the_public_names():
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    seen = {
        alias.asname: node.module for node in ast.walk(stub) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert seen == lastgood._HOMES
    assert (ROOT / "py.typed").is_file()


def floor_of(module):
    return next((number for number, names in enumerate(FLOORS) if module in names), None)


def imports_of(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("lastgood."):
            yield node.module.split(".")[1]
        elif isinstance(node, ast.Import):
            yield from (name.name.split(".")[1] for name in node.names if name.name.startswith("lastgood."))


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downward(path):
    own = path.relative_to(ROOT).parts[0].removesuffix(".py")
    if own == "__init__":
        return
    assert floor_of(own) is not None, f"{own} stands on no floor of docs/architecture.md"
    for imported in imports_of(path):
        assert floor_of(imported) <= floor_of(own), f"{path} imports upward: {imported}"
