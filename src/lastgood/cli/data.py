"""`lastgood data`: list, prepare and check the small real data that the workloads train on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lastgood.cli._app import App
from lastgood.cli._output import console, emit_json, emit_table
from lastgood.errors import DataError
from lastgood.names import nearest
from lastgood.units import format_bytes

if TYPE_CHECKING:
    from lastgood.workloads.data.prepare import Dataset
    from lastgood.workloads.data.store import Manifest

__all__ = ["app"]

app = App(help="List, prepare and check the small real data that the workloads train on.", no_args_is_help=True)

DataDir = Annotated[Path, typer.Option("--data-dir", help="Folder of the prepared data.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print to stdout as JSON.")]
Kinds = Annotated[list[str] | None, typer.Argument(help="images, squad, wikitext; all if none is named.")]


@app.command("list")
def list_data(data_dir: DataDir = Path("data"), as_json: AsJson = False) -> None:
    """List the data sets: what they are, where they come from, who uses them, and whether they are prepared."""
    from lastgood.workloads.data.prepare import DATASETS

    found = [_facts(dataset, data_dir) for dataset in DATASETS.values()]
    if as_json:
        emit_json(found)
        return
    rows = [
        (row["kind"], row["name"], row["package"], " ".join(row["workloads"]), row["state"], row["size"])
        for row in found
    ]
    emit_table(f"Data in {data_dir}", ["kind", "set", "package", "workloads", "state", "size"], rows)


@app.command()
def prepare(
    kinds: Kinds = None,
    data_dir: DataDir = Path("data"),
    force: Annotated[bool, typer.Option("--force", help="Make it again, also if it is there.")] = False,
) -> None:
    """Make the data sets from installed packages; needs no network. What is there already stays as it is."""
    from rich.progress import Progress

    from lastgood.workloads.data.prepare import prepare_dataset

    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("", total=len(_chosen(kinds)))
        for kind in _chosen(kinds):
            progress.update(task, description=f"preparing {kind}")
            manifest = prepare_dataset(kind, data_dir, force=force)
            progress.console.print(f"{manifest.name}: {_size(manifest)} in {data_dir / manifest.name}")
            progress.advance(task)


@app.command()
def check(kinds: Kinds = None, data_dir: DataDir = Path("data"), as_json: AsJson = False) -> None:
    """Compare prepared files and cached tokenizers with their SHA-256 sums; exit 1 if one is missing or damaged."""
    from lastgood.workloads.data.prepare import DATASETS
    from lastgood.workloads.data.store import check_folder, prepared_folders

    chosen = [DATASETS[kind].folder(data_dir) for kind in _chosen(kinds)]
    caches = [] if kinds else [folder for folder in prepared_folders(data_dir) if folder not in chosen]
    problems = {folder: check_folder(folder) for folder in [*chosen, *caches]}
    if as_json:
        emit_json(
            [{"folder": str(folder), "passed": not found, "problems": found} for folder, found in problems.items()]
        )
    else:
        for folder, found in problems.items():
            typer.echo(f"{'FAILED' if found else 'passed'}: {folder}")
            for problem in found:
                typer.echo(f"  {problem}")
    if any(problems.values()):
        console.print("Damaged data is made again by `lastgood data prepare --force`; a damaged cache can be removed.")
        raise typer.Exit(1)


def _chosen(kinds: list[str] | None) -> list[str]:
    from lastgood.workloads.data.prepare import DATASETS

    unknown = [kind for kind in kinds or () if kind not in DATASETS]
    if unknown:
        meant = nearest(unknown[0], DATASETS)
        raise typer.BadParameter(f"unknown data set {unknown[0]!r}{meant}; known: {', '.join(DATASETS)}")
    return list(kinds or DATASETS)


def _facts(dataset: Dataset, data_dir: Path) -> dict[str, Any]:
    from lastgood.workloads.data.store import check_folder, read_manifest
    from lastgood.workloads.registry import workload_data_kind, workload_names

    folder = dataset.folder(data_dir)
    try:
        manifest = read_manifest(folder)
    except DataError:
        manifest = None
    state = "missing" if manifest is None else "damaged" if check_folder(folder) else "prepared"
    return {
        "kind": dataset.kind,
        "name": f"{dataset.kind}/{dataset.name}",
        "what": dataset.what,
        "package": dataset.package,
        "licence": dataset.licence,
        "workloads": [name for name in workload_names() if workload_data_kind(name) == dataset.kind],
        "folder": str(folder),
        "state": state,
        "size": None if manifest is None else _size(manifest),
        "sha256": None if manifest is None else manifest.sha256,
    }


def _size(manifest: Manifest) -> str:
    return format_bytes(sum(file.bytes for file in manifest.files.values()))
