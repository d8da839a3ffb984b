"""What a plain installation holds and can do, what each extra adds, and what is said where one is missing."""

from __future__ import annotations

import ast
import contextlib
import importlib.metadata
import json
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.utils import canonicalize_name

import lastgood
from lastgood import cli
from lastgood.extras import EXTRAS, why_missing
from tests.support.bare import distributions, make_environment

ROOT = Path(__file__).resolve().parents[1]
SOURCE = Path(lastgood.__file__).parent
CORE = {"numpy", "psutil", "pydantic", "pyyaml", "safetensors", "torch", "typing-extensions"}
CORE_IMPORTS = CORE - {"pyyaml", "typing-extensions"} | {"yaml", "typing_extensions"}
ABOVE = {"cli", "experiments", "__main__"}
"""Floor 4: the command and the harness, which come with extras."""

AT_IMPORT = {
    ("checkpointers", "triton"),  # torch brings it where there are CUDA devices; the module is imported for those only
    ("conformance", "pytest"),  # tests, which nothing else imports
    ("gradients", "prometheus_client"),  # gradients/shadow/metrics.py, which `lastgood shadow serve` imports
    ("sparse", "prometheus_client"),  # sparse/control/telemetry_metrics.py, which `lastgood stellatrain serve` imports
    ("wire", "prometheus_client"),  # wire/scrape.py, for both of these
    *(("workloads", package) for package in ("tokenizers", "torchvision", "transformers")),  # a workload's own module
}
"""Room, and package of an extra that a module there needs when it is imported."""
AT_USE = {
    *(("checkpointers", package) for package in ("nvidia_resiliency_ext", "torchsnapshot")),
    *(("integrations", package) for package in ("deepspeed", "transformers")),
    *(("storage", package) for package in ("boto3", "botocore", "obstore")),
    *(("sparse", package) for package in ("scipy", "sklearn")),  # the controller's search, and the profiler's surface
    ("training", "deepspeed"),
    *(("workloads", package) for package in ("PIL", "sklearn", "torchvision", "transformers")),
}
"""The same of packages that a function there imports when it is called."""


# -- what is declared ----------------------------------------------------------------------------------------------


def names_in(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", text)[0].lower().replace("_", "-") for text in requirements}


def test_the_core_needs_few_packages() -> None:
    declared = importlib.metadata.requires("lastgood") or []
    assert names_in([text for text in declared if "extra ==" not in text]) == CORE


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 does not tell whose a package is in every case")
def test_each_package_comes_with_the_extra_that_is_named() -> None:
    owners = importlib.metadata.packages_distributions()
    checked = set()
    for package, extra in EXTRAS.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # an extra that is not installed here
            brought = distributions((extra,))
            assert {canonicalize_name(owner) for owner in owners[package]} & set(brought), (package, extra)
            checked.add(extra)
    assert {"cli", "harness"} <= checked


def test_the_harness_includes_the_command() -> None:
    assert set(distributions(("cli",))) < set(distributions(("harness",)))


def test_documents_name_extras_that_exist() -> None:
    known = set(importlib.metadata.metadata("lastgood").get_all("Provides-Extra") or ())
    named: dict[str, set[str]] = {}
    for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), ROOT / "install.sh", ROOT / ".ci" / "run"]:
        for extras in re.findall(r"(?:(?:lastgood|\.)\[|\bextras=)([\w,-]+)(?:\]['\"]|$)", path.read_text(), re.M):
            named.setdefault(path.name, set()).update(extras.split(","))
    assert {"README.md", "install.sh", "CONTRIBUTING.md"} <= set(named)
    assert {name: extras - known for name, extras in named.items() if extras - known} == {}


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("pandas", "lastgood plot needs pandas, which is not installed: pip install 'lastgood[harness]'"),
        ("typer", "lastgood plot needs typer, which is not installed: pip install 'lastgood[cli]'"),
        ("pandas.core.gone", None),
        ("some_module", None),
        (None, None),
    ],
)
def test_only_a_missing_package_of_an_extra_is_explained(name: str | None, said: str | None) -> None:
    assert why_missing(ModuleNotFoundError("gone", name=name), "lastgood plot") == said


# -- what is imported ----------------------------------------------------------------------------------------------


def foreign_imports(nodes: Iterator[ast.AST]) -> Iterator[str]:
    for node in nodes:
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules = [node.module]
        else:
            continue
        tops = {module.partition(".")[0] for module in modules}
        yield from tops - CORE_IMPORTS - set(sys.stdlib_module_names) - {"lastgood"}


def at_import(body: list[ast.stmt]) -> Iterator[ast.AST]:
    """Statements that an import of the module executes; what only type checkers see is among them."""
    for statement in body:
        yield statement
        if not isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef)):
            for name in ("body", "orelse", "finalbody"):
                yield from at_import(getattr(statement, name, []))
            for handler in getattr(statement, "handlers", []):
                yield from at_import(handler.body)


def test_core_modules_import_no_package_of_an_extra() -> None:
    first: set[tuple[str, str]] = set()
    later: set[tuple[str, str]] = set()
    for path in SOURCE.rglob("*.py"):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room not in ABOVE:
            tree = ast.parse(path.read_text())
            own = {(room, package) for package in foreign_imports(at_import(tree.body))}
            first |= own
            later |= {(room, package) for package in foreign_imports(ast.walk(tree))} - own
    assert first == AT_IMPORT
    assert later == AT_USE
    assert {package for _, package in first | later} - {"triton"} <= set(EXTRAS)


# -- a plain installation ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("bare") / "environment")


@pytest.fixture(scope="module")
def with_cli(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_environment(tmp_path_factory.mktemp("cli") / "environment", ("cli",))


def call(*command: str | Path, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)


def run_example(python: Path, folder: Path) -> list[str]:
    """The README's example in `folder`, twice; where each began."""
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    loop = "while step < 1000:\n"
    assert loop in code
    (folder / "train.py").write_text(code.replace(loop, f"print('from', step)\n{loop}", 1).replace("1000", "25"))
    ran = [call(python, "train.py", folder=folder) for _ in range(2)]
    assert [one.returncode for one in ran] == [0, 0], ran
    return [one.stdout for one in ran]


def test_nothing_of_the_harness_is_in_a_plain_installation(bare: Path) -> None:
    tried = "import importlib.util, sys; print(*(n for n in sys.argv[1:] if importlib.util.find_spec(n)))"
    # torch itself brings these.
    found = set(call(bare, "-c", tried, *EXTRAS, "pytest").stdout.split()) - {"jinja2", "markupsafe"}
    assert found == set()


@pytest.fixture(scope="module")
def trained(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the README's example has run in a plain installation."""
    folder = tmp_path_factory.mktemp("trained")
    assert run_example(bare, folder) == ["from 0\n", "from 20\n"]
    return folder


def test_the_example_of_the_readme_runs_in_a_plain_installation(trained: Path) -> None:
    assert (trained / "checkpoints" / "job1").is_dir()


WALK = """
import importlib, pkgutil, sys
import lastgood
for name in lastgood.__all__:
    getattr(lastgood, name)
for module in pkgutil.walk_packages(lastgood.__path__, "lastgood."):
    room = module.name.split(".")[1]
    if room not in sys.argv[1:]:
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError as error:
            print(room, error.name)
"""


def test_core_modules_load_in_a_plain_installation(bare: Path) -> None:
    done = call(bare, "-c", WALK, *ABOVE)
    assert done.returncode == 0, done.stderr
    assert {tuple(line.split()) for line in done.stdout.splitlines()} <= AT_IMPORT


def test_the_command_without_its_extra_names_it(bare: Path) -> None:
    for command in ([bare.with_name("lastgood"), "inspect", "."], [bare, "-m", "lastgood"]):
        done = call(*command)
        assert (done.returncode, done.stdout) == (1, "")
        assert re.fullmatch(
            r"lastgood: the command lastgood needs \w+, which is not installed: pip install 'lastgood\[cli\]'\n",
            done.stderr,
        )


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["plot", "fig8", "a.csv", "--out-stem", "a"], "plot"),
        pytest.param(["claims", "a.csv", "--out", "b.csv"], "claims", marks=pytest.mark.slow),
        pytest.param(["report", "--figures-dir", ".", "--out", "a.html"], "report", marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_command_of_the_harness_names_itself_and_the_extra(
    with_cli: Path, tmp_path: Path, arguments: list[str], command: str
) -> None:
    done = call(with_cli.with_name("lastgood"), *arguments, folder=tmp_path)
    assert done.returncode == 1
    assert re.search(
        rf"^lastgood: lastgood {command} needs \w+, which is not installed: pip install 'lastgood\[harness\]'$",
        done.stderr,
        re.MULTILINE,
    )
    assert "Traceback" not in done.stderr


def test_a_command_of_a_group_is_named_with_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise ModuleNotFoundError("no pandas", name="pandas")

    monkeypatch.setattr(type(cli.app), "__call__", fail)
    monkeypatch.setattr(sys, "argv", ["lastgood", "advise", "score", "--records", "."])
    with pytest.raises(SystemExit, match="1"):
        cli.main()
    assert "lastgood advise score needs pandas" in capsys.readouterr().err


CALLS = """
import json, sys
from lastgood.__main__ import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["lastgood", *arguments]
    try:
        main()
    except SystemExit as end:
        assert not end.code, (arguments, end.code)
"""


def test_commands_of_the_library_need_no_harness(with_cli: Path, trained: Path) -> None:
    directory, exported = trained / "checkpoints" / "job1", trained / "exported"
    calls = [["inspect", directory], ["verify", directory], ["export", directory, exported]]
    done = call(with_cli, "-c", CALLS, json.dumps(calls, default=str))
    assert done.returncode == 0, done.stderr
    assert exported.exists()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_pip_install_of_a_checkout(tmp_path: Path) -> None:
    """For real: pip builds the wheel and brings what it requires, and nothing else."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    for name in listed.stdout.rstrip("\0").split("\0"):
        (tmp_path / "checkout" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "checkout" / name)
    venv.create(tmp_path / "environment", with_pip=True, symlinks=True)
    python = tmp_path / "environment" / "bin" / "python"
    done = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "-c", "constraints.txt", "."],
        cwd=tmp_path / "checkout",
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "work").mkdir()
    assert run_example(python, tmp_path / "work") == ["from 0\n", "from 20\n"]
    told = call(python.with_name("lastgood"))
    assert told.returncode == 1 and "pip install 'lastgood[cli]'" in told.stderr
    typed = call(
        python, "-c", "import pathlib, lastgood; print(pathlib.Path(lastgood.__file__).with_name('py.typed').exists())"
    )
    assert typed.stdout == "True\n"
