"""What an import costs, and that rooms and floors import downward only, without circles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import lastgood
from lastgood.checkpointers.known import BUILT_IN
from lastgood.checkpointers.registry import checkpointer_class, checkpointer_names

ROOT = Path(lastgood.__file__).parent
ROOMY = {"checkpointers", "cluster", "experiments", "gradients", "mirror"}
"""Folders whose folders are rooms. Everywhere else a room is a module or a folder of src/lastgood."""

FLOORS = [
    [
        "errors names units text files tokens addresses bounds pickles locks processes ports sinks notices host_memory "
        "extras mounts world models locations _lazy _moved _native",
    ],
    ["state storage optim wire"],
    [
        "cluster.hostfile gradients.layout gradients.protocol",
        "cluster.ssh cluster.provision gradients.link gradients.shadow gradients.switch gradients.trainer",
        "cluster.host_check cluster.launch cluster.testbed gradients.conductor gradients.tap",
        "mirror.agent mirror.capture mirror.odds",
        "mirror.job mirror.setup mirror.streams",
        "mirror.conversation",
        "mirror.extract mirror.generate",
        "mirror.handover",
        "mirror.node",
        "sparse",
        "checkpointers.traits checkpointers.rank_directory checkpointers.torch_files checkpointers.events",
        "checkpointers.known",
        "checkpointers.agreement checkpointers.attach checkpointers.copies checkpointers.steps",
        "checkpointers.slots",
        "checkpointers.directories checkpointers.ranks",
        "checkpointers.recovery",
        "checkpointers.shadows",
        "checkpointers.options checkpointers.save_health checkpointers.telling",
        "checkpointers.base",
        "checkpointers.directory_system checkpointers.export checkpointers.one_at_a_time checkpointers.remote",
        "checkpointers.kept",
        "checkpointers.baselines checkpointers.checkfreq checkpointers.gpm checkpointers.gemini",
        "checkpointers.pccheck checkpointers.checkmate checkpointers.flowcheck checkpointers.dcp",
        "checkpointers.third_party",
        "checkpointers.registry",
    ],
    ["integrations workloads", "training"],
    [
        "experiments.formulas experiments.records experiments.traces",
        "experiments.dcp experiments.machine experiments.systems",
        "experiments.ceilings experiments.optbench experiments.services experiments.config",
        "experiments.advise experiments.runs experiments.plan",
        "experiments.goodput experiments.multirank experiments.figures",
        "experiments.dcp_runs experiments.flowcheck experiments.tables",
        "experiments.remote_runs experiments.stellatrain_runs",
        "experiments.claims experiments.plots",
        "experiments.report",
        "conformance",
        "cli",
        "__main__",
    ],
]
"""The rooms of docs/architecture.md, from the ground up. A room imports from its own line and those above it here."""

RANKS = {room: rank for rank, line in enumerate(line for floor in FLOORS for line in floor) for room in line.split()}


WITHOUT_TORCH = [
    "import lastgood",
    "import lastgood.cli",
    "from lastgood import checkpointer_class as load, checkpointer_names; [load(n) for n in checkpointer_names()]",
    "import lastgood.experiments.plan.load, lastgood.experiments.figures.workflow_plan",
    "import lastgood.experiments.runs.execute",
    "import lastgood.cluster.host_check.check, lastgood.cluster.testbed.testbed",
    "import lastgood.integrations.deepspeed",
    "import lastgood.gradients.shadow.service, lastgood.gradients.shadow.metrics",
    "import lastgood.gradients.protocol.client",
    "import lastgood.storage.objects.opening, lastgood.storage.objects.sweep",
    "import lastgood.experiments.services.object_store",
    "import lastgood.checkpointers.remote.tier, lastgood.checkpointers.pccheck.system",
]
ONE_AFTER_ANOTHER = """
import sys
for statement in sys.argv[1:]:
    before = set(sys.modules)
    exec(statement, {})
    print(*set(sys.modules) - before)
"""


@pytest.fixture(scope="module")
def loaded():
    """What each statement loads in one process, after those before it."""
    command = [sys.executable, "-c", ONE_AFTER_ANOTHER, *WITHOUT_TORCH]
    lines = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout.splitlines()
    return dict(zip(WITHOUT_TORCH, map(str.split, lines), strict=True))


def test_something_was_loaded(loaded):
    assert "lastgood" in loaded["import lastgood"]
    assert "lastgood.cli" in loaded["import lastgood.cli"]


@pytest.mark.parametrize("statement", WITHOUT_TORCH)
def test_needs_no_torch(statement, loaded):
    modules = set(loaded[statement])
    assert not modules & {"torch", "deepspeed", "transformers", "torchvision", "matplotlib", "pandas"}
    assert not modules & {"boto3", "botocore", "obstore"}


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


MODULES = {
    ".".join(("lastgood", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
}


def imports_of(path):
    """Modules that a file imports anywhere: at its top, in functions, for type checkers."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports are not followed here"
            for alias in node.names:
                one = f"{node.module}.{alias.name}"
                # Of lastgood itself there are the compiled module, which has no file here, and the public names.
                yield one if one in MODULES or node.module == "lastgood" else str(node.module)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def room_of(module):
    parts = module.split(".")[1:]
    return ".".join(parts[: 2 if parts[0] in ROOMY else 1])


IMPORTS = {
    module: {one for one in imports_of(path) if one.startswith("lastgood.") and one != module}
    for module, path in MODULES.items()
}


def circles(graph):
    """Groups of nodes, each of which can be reached from all others of its group."""
    found, open_nodes, numbers, lowest = [], [], {}, {}

    def visit(node):
        numbers[node] = lowest[node] = len(numbers)
        open_nodes.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in numbers:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in open_nodes:
                lowest[node] = min(lowest[node], numbers[target])
        if lowest[node] == numbers[node]:
            place = open_nodes.index(node)
            group, open_nodes[place:] = open_nodes[place:], []
            if len(group) > 1:
                found.append(sorted(group))

    for node in graph:
        if node not in numbers:
            visit(node)
    return found


def test_all_imports_are_read(tmp_path):
    path = tmp_path / "module.py"
    path.write_text(
        "from lastgood import _native, units\nif TYPE_CHECKING:\n    from lastgood.text import read_bytes\n"
        "def late():\n    import lastgood.errors as errors\n    from lastgood.state import layout\n"
    )
    read = {"lastgood._native", "lastgood.units", "lastgood.text", "lastgood.errors", "lastgood.state.layout"}
    assert set(imports_of(path)) == read


def test_circles_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"a"}}
    assert circles(graph) == [["a", "b", "c"]]
    assert circles({"a": {"b"}, "b": {"c"}, "d": {"c", "b"}}) == []


def test_the_page_of_rooms_names_them_all_and_no_others():
    page = (ROOT.parents[1] / "docs" / "architecture.md").read_text()
    rows = dict(re.findall(r"^\| \d \| (\w+)/ \| (.*) \|$", page, re.MULTILINE))
    systems = {target.split(".")[2] for target in BUILT_IN.values()}
    for house in ROOMY:
        named = set(re.findall(r"\w+", rows[house].rpartition(": ")[2])) - {"beside", "them"}
        folders = {path.parent.name for path in (ROOT / house).glob("*/__init__.py")}
        rooms = {room.partition(".")[2] for room in RANKS if room.startswith(f"{house}.")}
        assert folders - systems - named == set(), f"docs/architecture.md does not name all rooms of {house}/"
        assert named - rooms == set(), f"docs/architecture.md names rooms that {house}/ has not"


def test_every_place_is_taken():
    assert sorted(RANKS.keys() - {room_of(module) for module in MODULES if module != "lastgood"} - {"_native"}) == []


def test_every_room_has_a_place():
    houses = {"lastgood", *(f"lastgood.{name}" for name in ROOMY)}
    assert sorted({room_of(module) for module in MODULES.keys() - houses} - RANKS.keys()) == [], "on no line of FLOORS"


@pytest.mark.parametrize("module", [module for module in MODULES if IMPORTS[module]])
def test_imports_run_downward(module):
    if module == "lastgood":
        return
    for imported in IMPORTS[module]:
        assert RANKS[room_of(imported)] <= RANKS[room_of(module)], f"{module} imports upward: {imported}"


def test_nothing_imports_the_public_names():
    """They stand for modules of all floors; each is imported from its own room."""
    public = {f"lastgood.{name}" for name in lastgood.__all__}
    assert {module: found for module, imported in IMPORTS.items() if (found := imported & public)} == {}


def test_no_circle_between_modules():
    assert circles(IMPORTS) == []


def test_no_circle_between_rooms():
    graph = {}
    for module, imported in IMPORTS.items():
        if module != "lastgood":
            own = room_of(module)
            graph.setdefault(own, set()).update(room for one in imported if (room := room_of(one)) != own)
    assert circles(graph) == []


def test_class_variables_have_full_types():
    """Pydantic cannot read a plain ``ClassVar`` on Python 3.10: a module with one cannot be imported there."""
    plain = re.compile(r"^\s+\w+: ClassVar\s*(=|$)", re.MULTILINE)
    assert [str(path) for path in ROOT.rglob("*.py") if plain.search(path.read_text())] == []
