"""Decoders of text: sealed documents, addresses, records, tables, configurations, what people and hosts write."""

from __future__ import annotations

import base64
import csv
import io
import json
import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from lastgood import _native
from lastgood.errors import LastgoodError
from tests.fuzz.support.hostile import changed_bytes, changed_text, changed_tree, json_of
from tests.fuzz.support.registry import Prepared, decoder

ROOT = Path(__file__).parents[3]


def put(path: Path, content: bytes) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return len(content)


def tree_or_bits(rng: random.Random, thing: Any) -> Any:
    """A changed tree; now and then its text with other bytes in it."""
    if rng.random() < 0.15:
        return changed_bytes(rng, json_of(thing), fields=False)
    return changed_tree(rng, thing)


def text_of(thing: Any) -> bytes:
    return thing if isinstance(thing, bytes) else json_of(thing)


# -- sealed documents --------------------------------------------------------------------------------------------------


def sealed(thing: Any) -> bytes:
    """With the checksum that a reader of Python's own will find."""
    text = text_of(thing)
    try:
        canonical = json.dumps(json.loads(text), sort_keys=True, separators=(",", ":")).encode()
    except (ValueError, RecursionError):
        canonical = text
    ending = b',"crc32c":"%08x"}' % _native.crc32c(canonical)
    return text[:-1] + ending if text.endswith(b"}") and len(text) > 2 else text


@decoder(
    "job.json",
    lambda: [{"format": "lastgood-slots", "version": 1, "job_id": "ab" * 16, "rank": 1, "world_size": 2}],
    change=tree_or_bits,
)
def _job(thing: Any, folder: Path) -> Prepared:
    from lastgood.storage.reader import read_job

    return put(folder / "job.json", sealed(thing)), partial(read_job, folder)


@decoder(
    "verdicts",
    lambda: [
        {
            "format": "lastgood-verdicts",
            "version": 1,
            "verdicts": [{"sequence": 3, "step": 10, "ok": False, "reason": "loss"}],
            "restarts": [{"sequence": 4, "step": 12, "count": 2}],
            "reached": 20,
        }
    ],
    change=tree_or_bits,
)
def _verdicts(thing: Any, folder: Path) -> Prepared:
    from lastgood.storage.verdicts import VERDICT_FILE, Verdict, VerdictBook

    def read() -> None:
        book = VerdictBook(folder)
        book.count_restart(4, 12, 30)
        book.judge(7, Verdict(30, True))
        book.forget_restarts(40)
        assert book.is_bad(3) in (True, False) and book.highest_sequence >= 7

    return put(folder / VERDICT_FILE, sealed(thing)), read


def _mark_sample() -> list[Any]:
    from lastgood.storage.global_commit import _FORMAT, GlobalCommit

    mark = GlobalCommit(*range(1, len(GlobalCommit._fields) + 1))
    return [{"format": _FORMAT, "version": 1, "job_id": "ab" * 16, "world_size": 2, **mark._asdict()}]


@decoder("mark of all ranks", _mark_sample, change=tree_or_bits)
def _mark(thing: Any, folder: Path) -> Prepared:
    from lastgood.storage.global_commit import GLOBAL_FILE, read_global_commit

    return put(folder / GLOBAL_FILE, sealed(thing)), partial(read_global_commit, folder)


@decoder(
    "status of a remote place",
    lambda: [
        {
            "format": "lastgood-remote",
            "version": 1,
            "place": "s3://bucket/job",
            "job_id": "ab" * 16,
            "sending": [1, 20, 2, 1e9],
            "committed": [1, 10, 1, 9e8],
            **dict.fromkeys(("sent", "replaced", "failed", "sent_bytes", "kept_bytes"), 3),
            "last_error": "away",
        }
    ],
    change=tree_or_bits,
)
def _remote(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.remote.status import REMOTE_FILE, Which, read_status, write_status

    def read() -> None:
        status = read_status(folder)
        if status is not None:
            status.lag(Which(2, 30, 9, 1e9))
            write_status(folder, status)
            assert read_status(folder) == status

    return put(folder / REMOTE_FILE, sealed(thing)), read


@decoder(
    "manifest of a directory",
    lambda: [{"format": "lastgood-directory", "step": 3, "files": {"a": [5, _native.crc32c(b"hello")]}}],
    change=tree_or_bits,
)
def _manifest(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.directories import manifest as directories

    text = text_of(thing).replace(b"lastgood-directory", directories._FORMAT.encode())
    (folder / "a").write_bytes(b"hello")
    nbytes = put(folder / directories.MANIFEST, text + directories._ending(text))
    return nbytes + 5, partial(directories.check_files, folder, 3)


# -- addresses, orders, answers ----------------------------------------------------------------------------------------


@decoder(
    "address of a peer",
    lambda: [{"host": "127.0.0.1", "port": 4711, "pid": 77, "token": "ab" * 32}],
    change=tree_or_bits,
)
def _address(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.gemini.address_file import Address

    def read() -> None:
        found = Address.read(folder / "peer-0-000000.json")
        assert 0 < found.port < 65536 and str(found) and found.on_this_machine in (True, False)

    return put(folder / "peer-0-000000.json", text_of(thing)), read


@decoder("address of a shadow", lambda: [{"host": "h", "port": 4711, "metrics": "h:4712"}], change=tree_or_bits)
def _shadow(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.services.shadows import _read

    return len(text_of(thing)), partial(_read, text_of(thing), "here")


@decoder("job of a directory of checkmate's", lambda: [{"job": "ab" * 16, "promised": 7}], change=tree_or_bits)
def _noted(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.recovery.checkmate_job import JOB_FILE, noted_job

    return put(folder / JOB_FILE, text_of(thing)), partial(noted_job, folder)


def _ticket_sample() -> list[Any]:
    return [
        {
            "token": "t" * 32,
            "addresses": ["127.0.0.1"],
            "port": 4711,
            "how": "ssh",
            "argv": ["python", "train.py"],
            "cwd": "/",
            "env": {"A": "b"},
            "logs": "/tmp/logs",
            "start_s": 60.0,
            "timeout_s": 60.0,
            "grace_s": 5.0,
        }
    ]


@decoder("launch ticket", _ticket_sample, change=tree_or_bits)
def _ticket(thing: Any, folder: Path) -> Prepared:
    from lastgood.cluster.launch.order import Ticket

    word = base64.urlsafe_b64encode(text_of(thing)).decode()
    return len(word), partial(Ticket.decode, word)


@decoder(
    "testbed's state",
    lambda: [
        {
            "version": 1,
            "name": "bed",
            "nodes": 2,
            "slots": 1,
            "rate_bits_per_s": 10**8,
            "subnet": "10.219.1.0/24",
            "complete": True,
        }
    ],
    change=tree_or_bits,
)
def _testbed(thing: Any, folder: Path) -> Prepared:
    from lastgood.cluster.testbed import state as testbed_state

    def read() -> None:
        testbed_state.RUN = folder
        found = testbed_state.load_state("bed")
        if found is not None:
            assert [found[1].address(node) for node in found[1].node_names] and found[1].host_address

    put(folder / "bed.where", str(folder).encode())
    return put(folder / testbed_state._STATE_FILE, text_of(thing)), read


def _facts_sample() -> list[Any]:
    facts = {"hostname": "h", "python": "3.11.7", "executable": "/p", "torch": "2.9", "lastgood": "0", "code": "ab"}
    facts |= {"revision": "c", "dirty": False, "folder": "/", "free_bytes": 1 << 40, "gpus": ["A"], "busy_ports": [1]}  # type: ignore[dict-item]
    return [facts, {"time_s": 1.7e9}, {"error": "no"}]


@decoder("answers of a host's agent", _facts_sample, change=tree_or_bits)
def _facts(thing: Any, folder: Path) -> Prepared:
    from lastgood.cluster.host_check import check as host_check
    from lastgood.cluster.hostfile import parse_hostfile
    from lastgood.cluster.ssh.conversation import Conversation

    line = text_of(thing).replace(b"\n", b" ")

    class Talk(Conversation):
        def __init__(self) -> None:
            self.host = "h"
            self._process = type("Process", (), {"stdin": io.BytesIO()})()

        def _read_line(self, deadline: float, what: str, timeout_s: float) -> bytearray:
            return bytearray(line)

    def read() -> None:
        options = host_check.CheckOptions()
        done = 0
        for ask in (lambda: host_check._ask_facts(Talk(), options), lambda: host_check.read_clock(Talk())):
            try:
                found: Any = ask()
                done += 1
            except LastgoodError:
                continue
            hosts = parse_hostfile("h slots=1")
            told = {"facts": {"h": found}} if isinstance(found, host_check.HostFacts) else {"clocks": {"h": found}}
            report = host_check.CheckReport(hosts.names, told.get("facts", {}), told.get("clocks", {}), ())
            host_check.judge(hosts, report, {}, "ab", options)
        host_check._measure(Talk(), Talk(), options)

    return len(line), read


@decoder(
    "questions to a host's agent",
    lambda: [{"do": "time"}, {"do": "other", "seconds": 1}],
    share=0.5,
    change=tree_or_bits,
)
def _questions(thing: Any, folder: Path) -> Prepared:
    from lastgood.cluster.host_check import agent as host_agent

    line = text_of(thing).replace(b"\n", b" ").decode(errors="replace")

    def read() -> None:
        kept = sys.stdin, sys.stdout, sys.argv
        sys.stdin, sys.stdout, sys.argv = io.StringIO(line + "\n"), io.StringIO(), ["agent", "0"]
        try:
            host_agent.main()
        finally:
            sys.stdin, sys.stdout, sys.argv = kept

    return len(line), read


# -- records -----------------------------------------------------------------------------------------------------------


def _records() -> list[Any]:
    from tests.experiments.support.records import make_record

    made = [make_record("none"), make_record("pccheck", 10, proof=True)]
    return [json.loads(record.model_dump_json()) for record in made]


def _goodput() -> list[Any]:
    from tests.experiments.support.goodput_records import make_goodput

    return [json.loads(make_goodput().model_dump_json())]


def _updates() -> list[Any]:
    from tests.experiments.support.optimizer_records import record_of

    return [json.loads(record_of().model_dump_json())]


def _ceilings() -> list[Any]:
    from tests.experiments.support.records import make_ceilings

    return [json.loads(make_ceilings().model_dump_json())]


@decoder("run record", _records, change=tree_or_bits)
def _record(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.advise.cells import read_cells
    from lastgood.experiments.records.run import RunRecord

    def read() -> None:
        record = RunRecord.load(folder / "r0.json")
        assert record.spec.record_path() and record.spec.title()
        read_cells(folder)

    return put(folder / "r0.json", text_of(thing)), _or_no_cells(read)


def _or_no_cells(read: Callable[[], object]) -> Callable[[], object]:
    """One run alone makes no cell; that is an error of its own, and no fault of the file."""

    def done() -> object:
        try:
            return read()
        except LastgoodError as error:
            if "no cell with a `none` run" in str(error):
                return None
            raise

    return done


@decoder("goodput record", _goodput, change=tree_or_bits)
def _goodput_record(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.records.goodput import GoodputRecord
    from lastgood.experiments.records.kinds import kind_of_file

    def read() -> None:
        kind_of_file(folder / "r0.json")
        assert GoodputRecord.load(folder / "r0.json").spec.record_path()

    return put(folder / "r0.json", text_of(thing)), read


@decoder("record of updates", _updates, change=tree_or_bits)
def _update_record(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.records.optimizer import OptimizerRecord

    return put(folder / "r0.json", text_of(thing)), lambda: OptimizerRecord.load(folder / "r0.json").spec.record_path()


@decoder("ceilings", _ceilings, change=tree_or_bits)
def _ceilings_record(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.ceilings.record import load_ceilings

    def read() -> None:
        found = load_ceilings(folder / "c.json")
        assert found.persist_bytes_per_s is not None
        found.still_good("here", found.where, True)

    return put(folder / "c.json", text_of(thing)), read


# -- tables ------------------------------------------------------------------------------------------------------------


def _rows(path: Path, most: int = 6) -> list[list[str]]:
    with path.open(newline="") as file:
        return list(csv.reader(file))[:most]


def changed_rows(rng: random.Random, rows: Any) -> Any:
    """Other cells, rows and columns; now and then the text itself changed."""
    if rng.random() < 0.2:
        return changed_text(rng, _csv(rows)).encode(errors="surrogatepass")
    return changed_tree(rng, rows, raw=False, most=2)


def _csv(rows: Any) -> str:
    text = io.StringIO()
    lines = rows if isinstance(rows, list) else [rows]
    csv.writer(text, lineterminator="\n", escapechar="\\").writerows(
        line if isinstance(line, (list, tuple)) else [line] for line in lines
    )
    return text.getvalue()


def csv_bytes(rows: Any) -> bytes:
    return rows if isinstance(rows, bytes) else _csv(rows).encode(errors="surrogatepass")


_FIGURES = ["amd-epyc-2c/fig8_vgg16.csv", "amd-epyc-2c/fig9_vgg16.csv", "intel-xeon-2c/checkmate_optimizer.csv"]


@decoder(
    "figure's CSV",
    lambda: [_rows(ROOT / "figures" / "measured" / name, 12) for name in _FIGURES],
    change=changed_rows,
    share=0.5,
)
def _figure(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.claims.judge import judge_claims, load_reference
    from lastgood.experiments.tables.files import load_csvs

    def read() -> None:
        judge_claims(load_csvs([folder / "fig.csv"]), load_reference(ROOT / "figures" / "reference"))

    return put(folder / "fig.csv", csv_bytes(thing)), read


@decoder("runs of a CSV", lambda: [_rows(ROOT / "figures" / "measured" / _FIGURES[0], 12)], change=changed_rows)
def _advise(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.advise.cells import read_cells

    def read() -> None:
        try:
            read_cells(folder)
        except LastgoodError as error:
            if "no cell with a `none` run" not in str(error):
                raise

    return put(folder / "fig8_vgg16.csv", csv_bytes(thing)), read


@decoder("published numbers", lambda: [_rows(ROOT / "figures" / "reference" / "fig8.csv", 30)], change=changed_rows)
def _published(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.claims.judge import load_reference
    from lastgood.experiments.tables.published import load_gains, load_published, load_ranges

    def read() -> None:
        path = folder / "fig8.csv"
        for load in (load_published, load_gains, load_ranges):
            load(path)
        load_reference(folder)

    return put(folder / "fig8.csv", csv_bytes(thing)), read


def _claims() -> list[Any]:
    from lastgood.experiments.claims.judge import claims_csv, judge_claims, load_reference

    text = claims_csv(judge_claims([], load_reference(ROOT / "figures" / "reference"))).decode()
    return [list(csv.reader(io.StringIO(text)))[:6]]


@decoder("claims", _claims, change=changed_rows)
def _claims_table(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.claims.judge import load_claims

    return put(folder / "claims.csv", csv_bytes(thing)), partial(load_claims, folder / "claims.csv")


# -- what people write -------------------------------------------------------------------------------------------------


def _yaml_texts() -> list[str]:
    return [(ROOT / "config" / "default.yaml").read_text()]


def _yaml_trees(paths: list[Path]) -> list[Any]:
    import yaml

    return [yaml.safe_load(path.read_text()) for path in paths]


def _machine_has_no_say(path: Path) -> object:
    from lastgood.experiments.plan.load import parse_config

    return parse_config(path)


def _configurations() -> list[Any]:
    default = ROOT / "config" / "default.yaml"
    return [*_yaml_trees([default]), {"base": str(default), "checkmate": {"options": {"opt": {"layers": 2}}}}]


@decoder("configuration", _configurations, change=tree_or_bits)
def _config(thing: Any, folder: Path) -> Prepared:
    return put(folder / "c.yaml", text_of(thing)), partial(_machine_has_no_say, folder / "c.yaml")


@decoder("configuration as text", _yaml_texts, change=changed_text)
def _config_text(thing: Any, folder: Path) -> Prepared:
    content = thing.encode(errors="surrogatepass")
    return put(folder / "c.yaml", content), partial(_machine_has_no_say, folder / "c.yaml")


@decoder(
    "overrides",
    lambda: ["intervals=[1, 10]", "fig9={window_s: 10, failures: 3}", "machine=here", "repetitions=2"],
    change=changed_text,
)
def _overrides(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.config.yaml_file import parse_overrides
    from lastgood.experiments.plan.load import parse_config

    def read() -> object:
        return parse_config(ROOT / "config" / "laptop.yaml", parse_overrides([thing]))

    return len(thing), read


@decoder(
    "grid of a figure",
    lambda: _yaml_trees([ROOT / "evaluation" / name / "grid.yaml" for name in ("fig11", "checkmate", "fig9")]),
    change=tree_or_bits,
)
def _grid(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.plan.grid import load_grid

    return put(folder / "evaluation" / "fig11" / "grid.yaml", text_of(thing)), partial(load_grid, folder, "fig11")


@decoder(
    "tuned settings",
    lambda: [
        {
            "tuning_version": 1,
            "interval_steps": 10,
            "max_in_flight": 2,
            "writer_threads": 2,
            "chunk_bytes": 1 << 20,
            "pool_bytes": 1 << 22,
            "keep": 2,
            "measured": {"iteration_s": 0.5},
        }
    ],
    change=tree_or_bits,
)
def _tuned(thing: Any, folder: Path) -> Prepared:
    from lastgood.checkpointers.pccheck.tuning_file import read_tuning

    return put(folder / "pccheck.yaml", text_of(thing)), partial(read_tuning, folder / "pccheck.yaml")


@decoder("hostfile", lambda: ["# hosts\nnode-1 slots=4\nnode-2 slots=4\nfe80::1 slots=1\n"], change=changed_text)
def _hostfile(thing: Any, folder: Path) -> Prepared:
    from lastgood.cluster.hostfile import read_hostfile

    content = thing.encode(errors="surrogatepass")
    return put(folder / "hosts", content), lambda: read_hostfile(folder / "hosts").slots


@decoder("trace", lambda: ["# a cluster\nperiod_s 63\n10x56 3x48\n5x52 7x60 2x40\n"], change=changed_text)
def _trace(thing: Any, folder: Path) -> Prepared:
    from lastgood.experiments.traces.trace import load_trace

    def read() -> None:
        found = load_trace(folder / "trace")
        found.stretch(60.0, 10)
        assert found.digest and found.failures >= 0

    content = thing.encode(errors="surrogatepass")
    return put(folder / "trace", content), read


def _squad_sample() -> list[Any]:
    answers = [{"text": "light", "answer_start": 7}]
    asked = {"id": "q1", "question": "what?", "answers": answers}
    impossible = {"id": "q2", "question": "who?", "answers": [], "is_impossible": True}
    return [{"data": [{"paragraphs": [{"context": "let be light", "qas": [asked, impossible]}]}]}]


@decoder("questions of SQuAD", _squad_sample, change=tree_or_bits)
def _squad(thing: Any, folder: Path) -> Prepared:
    from lastgood.workloads.data.squad import read_squad

    return put(folder / "train.json", text_of(thing)), partial(read_squad, folder / "train.json")


@decoder(
    "manifest of data",
    lambda: [
        {
            "manifest_version": 1,
            "name": "n",
            "source": "s",
            "licence": "l",
            "recipe": 1,
            "files": {"a": {"bytes": 1, "sha256": "ab" * 32}},
        }
    ],
    change=tree_or_bits,
)
def _data(thing: Any, folder: Path) -> Prepared:
    from lastgood.workloads.data import store

    (folder / "a").write_bytes(b"x")
    return put(folder / store.MANIFEST, text_of(thing)) + 1, lambda: (
        store.read_manifest(folder).sha256,
        store.check_folder(folder),
    )
