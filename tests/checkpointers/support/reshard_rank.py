"""One process of a pool that takes the part of any rank of any world. Run as: reshard_rank.py.

Reads one JSON object a line: ``work`` (a function below), ``rank``, ``world``, ``meeting`` (a file by which the ranks
meet) and what the function takes. Answers with one line: ``{"ok": ...}`` or ``{"error": kind and text}``.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from lastgood import PCcheck
from lastgood.checkpointers.rank_directory import rank_directory
from lastgood.checkpointers.ranks import sharing
from lastgood.checkpointers.ranks.directories import whole_checkpoints
from lastgood.checkpointers.ranks.replicated import StoreExchange
from lastgood.checkpointers.ranks.reshard import restore_ranks
from lastgood.checkpointers.recovery import recovery
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import LastgoodError, StorageError, WaitTimeout
from lastgood.processes import die_with_parent, keep_stdout
from lastgood.state import RngState, state_digest
from lastgood.storage.objects.folder import FolderClient

WAIT_S = 120.0


class Odd(torch.nn.Module):
    """Shapes that no world size divides, and one smaller than every world."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(5, 7)
        self.second = torch.nn.Linear(7, 5)
        self.tied = torch.nn.Linear(5, 7, bias=False)
        self.tied.weight = self.first.weight
        self.one = torch.nn.Parameter(torch.ones(1))
        self.register_buffer("seen", torch.zeros(3, dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        hidden = torch.tanh(self.first(x)) + self.tied(x)
        return self.second(hidden) * self.one


def named_values():
    """Tensors for distribute_tensor: dtypes, dimensions and cuts."""
    generator = torch.Generator().manual_seed(11)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "rows": (random(7, 5), 0),
        "columns": (random(7, 5, dtype=torch.bfloat16), 1),
        "few": (random(2, 3, dtype=torch.float64), 0),
        "single": (random(1), 0),
        "scalar": (random(dtype=torch.float32), None),
        "alike": (random(4, 4), None),
        "numbers": (torch.arange(11) * 3, 0),
        "flags": (torch.arange(9) % 2 == 0, 0),
        "deep": (random(3, 5, 300), 1),
    }


class Training:
    def __init__(self, mesh, seed, device="cpu"):
        torch.manual_seed(seed)
        self.device = device
        self.model = Odd().to(device)
        if mesh is not None:
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.05)
        self.plain = {"step": 0, "moving": torch.zeros(3)}
        self.spread = {}
        for name, (value, dim) in named_values().items():
            value = (value if seed == 0 else torch.zeros_like(value)).to(device)
            if mesh is not None:
                value = distribute_tensor(value, mesh, [Replicate() if dim is None else Shard(dim)])
            self.spread[name] = value
        self.state = {
            "model": self.model,
            "optimizer": self.optimizer,
            "plain": self.plain,
            "spread": self.spread,
            "rng": RngState(),
        }

    def step(self):
        data = torch.randn(6, 5, generator=torch.Generator().manual_seed(self.plain["step"])).to(self.device)
        loss = (self.model(data) - 1).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.plain["step"] += 1
        self.plain["moving"] += 0.5
        return float(loss.detach())

    def tensors(self):
        """Every tensor of model, optimizer and beside it, by a name that is the same in every world."""
        found = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for number, entry in self.optimizer.state_dict()["state"].items():
            found |= {f"optimizer.{number}.{name}": value for name, value in entry.items()}
        return (
            found | {f"spread.{name}": value for name, value in self.spread.items()} | {"moving": self.plain["moving"]}
        )

    def whole_sums(self):
        return {name: summed(whole(value)) for name, value in self.tensors().items()}


def whole(value):
    return value.full_tensor() if isinstance(value, DTensor) else value


def local(value):
    return value.to_local() if isinstance(value, DTensor) else value


def summed(tensor):
    dense = tensor.detach().cpu().contiguous()
    raw = dense.as_strided((dense.numel(),), (1,)).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} {tuple(tensor.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"


def made(rank, world, seed, kind, device="cpu"):
    mesh = init_device_mesh(device, (world,), mesh_dim_names=("dp",)) if kind == "fsdp" else None
    return Training(mesh, seed, device)


def save(rank, world, job, kind="fsdp", dcp_to=None, device="cpu"):
    """Train two steps, save, train two more."""
    training = made(rank, world, 0, kind, device)
    torch.manual_seed(100 + rank)
    directory = rank_directory(job, rank)
    checkpointer = PCcheck(directory, rank=rank, world_size=world, control="off", chunk_bytes=4096, max_in_flight=1)
    checkpointer.start(training.state)
    losses = [training.step(), training.step()]
    checkpointer.save(2)
    checkpointer.drain(WAIT_S)
    outcomes = [(event.outcome.value, event.error) for event in checkpointer.events]
    answer = {"outcomes": outcomes, "sums": training.whole_sums(), "digest": state_digest(training.state)}
    answer["next"] = torch.rand(1, generator=torch.Generator().set_state(torch.get_rng_state())).item()
    if dcp_to is not None:
        dcp.save(training.tensors(), checkpoint_id=dcp_to)
    checkpointer.close()
    answer["losses"] = [*losses, training.step(), training.step()]
    return answer


def load(rank, world, job, kind="fsdp", dcp_from=None, again=False, own_job=None, device="cpu"):
    """Restore into a training with other values, and train two steps."""
    training = made(rank, world, 7, kind, device)
    if again:  # with moments to read into
        training.step()
    places = {name: local(value).data_ptr() for name, value in training.tensors().items() if name.startswith("model")}
    if own_job is None:
        step = restore_ranks(job, training.state, (rank, world), 2)
    else:
        knobs = {"rank": rank, "world_size": world, "resume_from": str(job), "control": "off", "chunk_bytes": 4096}
        checkpointer = PCcheck(rank_directory(own_job, rank) if world > 1 else own_job, **knobs)
        step = checkpointer.restore(training.state)
    now = {name: local(value).data_ptr() for name, value in training.tensors().items() if name.startswith("model")}
    answer = {"step": step, "in_place": places == now, "sums": training.whole_sums()}
    answer["digest"] = state_digest(training.state)
    answer["next"] = torch.rand(1, generator=torch.Generator().set_state(torch.get_rng_state())).item()
    if dcp_from is not None:
        twins = {name: torch.zeros_like(value) for name, value in training.tensors().items()}
        dcp.load(twins, checkpoint_id=dcp_from)
        answer["as_dcp"] = [
            name for name, value in training.tensors().items() if summed(local(value)) != summed(local(twins[name]))
        ]
    # The naive twin: the whole tensor, and this rank's piece of it.
    answer["as_sliced"] = []
    for name, value in training.tensors().items():
        if isinstance(value, DTensor):
            again_cut = distribute_tensor(whole(value).detach().clone(), value.device_mesh, value.placements)
            if summed(local(again_cut)) != summed(local(value)):
                answer["as_sliced"].append(name)
    answer["losses"] = [training.step(), training.step()]
    return answer


def own_restore(rank, world, job):
    """The way of a restart on as many ranks: the rank's own directory."""
    training = made(rank, world, 7, "fsdp")
    looked = []
    recovery.whole_checkpoints = lambda *found: looked.append(found) or whole_checkpoints(*found)
    step = PCcheck(rank_directory(job, rank), rank=rank, world_size=world, control="off").restore(training.state)
    recovery.whole_checkpoints = whole_checkpoints
    return {"step": step, "digest": state_digest(training.state), "from_own": not looked}


def replicated(rank, world, job):
    """Data-parallel ranks that write what they hold alike once."""
    training = made(rank, world, 0, "plain")
    knobs = {"rank": rank, "world_size": world, "replicated": "ddp", "control": "off", "chunk_bytes": 4096}
    checkpointer = PCcheck(rank_directory(job, rank), **knobs)
    checkpointer.start(training.state)
    torch.manual_seed(100 + rank)
    for step in (1, 2):
        training.step()
        checkpointer.save(step)
        checkpointer.drain(WAIT_S)
    digest = state_digest(training.state)
    outcomes = [event.outcome.value for event in checkpointer.events]
    checkpointer.close()
    dist.barrier()
    found = whole_checkpoints(job)[0].infos[rank]
    fresh = made(rank, world, 7, "plain")
    restored = PCcheck(rank_directory(job, rank), rank=rank, world_size=world, control="off").restore(fresh.state)
    return {
        "outcomes": outcomes,
        "step": restored,
        "same": state_digest(fresh.state) == digest,
        "payload": found.meta_offset,
        "sums": training.whole_sums(),
    }


def start(rank, world, directories, made_equal=False, **given):
    """Ranks with a model each, which DistributedDataParallel makes equal or nobody: what the start says, or ""."""
    torch.manual_seed(rank)
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters())
    if made_equal:
        torch.nn.parallel.DistributedDataParallel(model)
    knobs = {"rank": rank, "world_size": world, "control": "off", "chunk_bytes": 4096, **given}
    checkpointer = PCcheck(directories[rank], **knobs)
    said = ""
    try:
        checkpointer.start({"model": model, "optimizer": optimizer})
    except LastgoodError as error:
        said = str(error)
    checkpointer.close()
    return said


def agreed(rank, world, job, steps, resume_from=None, replicated="none", kind="fsdp", resume_step=None, remote=None):
    """One life of a job whose ranks agree on their checkpoints."""
    training = made(rank, world, 7, kind)
    knobs = {"rank": rank, "world_size": world, "resume_from": resume_from, "replicated": replicated}
    if remote is not None:
        knobs |= {"remote": remote, "remote_every": 1}
    checkpointer = PCcheck(job, interval_steps=1, chunk_bytes=4096, exit_drain_s=10, **knobs)
    parts = {name: part for name, part in training.state.items() if name != "rng"}
    passed_on, real = [], sharing.Sharing.pass_on

    def pass_on(self, reads, threads):
        wanted = sum(len(read.left) for read in reads)
        real(self, reads, threads)
        passed_on.append([wanted, sum(len(read.left) for read in reads)])

    sharing.Sharing.pass_on = pass_on
    try:
        began = checkpointer.attach(resume_step=resume_step, **parts)
    finally:
        sharing.Sharing.pass_on = real
    answer = {"began": began, "restored": training.whole_sums()}
    answer["passed_on"] = passed_on
    for _ in range(steps):
        training.step()
        checkpointer.step()
        checkpointer.drain(
            WAIT_S
        )  # of two in progress the newer may be complete on all ranks first, and the older dropped
    answer["outcomes"] = [(event.outcome.value, event.error) for event in checkpointer.events]
    checkpointer.close()
    answer["sums"] = training.whole_sums()
    return answer


def rolled_back(rank, world, job):
    """Go back from step 4: to step 2, since rank 1 judges that of step 3 bad; and once more, to the newest."""
    training = made(rank, world, 0, "fsdp")
    checkpointer = PCcheck(job, interval_steps=1, chunk_bytes=4096, keep=3)
    checkpointer.attach(**{name: part for name, part in training.state.items() if name != "rng"})
    answer = {"first": [], "again": [], "steps": []}

    def go(losses, until):
        while len(losses) < until:
            losses.append(training.step())
            checkpointer.step()
            checkpointer.drain(WAIT_S)

    go(answer["first"], 3)
    if rank == 1:
        checkpointer.verdict(3, False, "as it looks here")
    answer["first"].append(training.step())  # of step 4, which is not counted
    answer["steps"].append(checkpointer.rollback())
    go(answer["again"], 2)
    training.step()
    answer["steps"].append(checkpointer.rollback())
    answer["restored"] = training.plain["step"]
    checkpointer.close()
    return answer


def two_dimensions(rank, world, job):
    """A mesh of two dimensions: replicated along one, cut along the other, written once."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 7)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    knobs = {"rank": rank, "world_size": world, "replicated": "placements", "control": "off", "chunk_bytes": 4096}
    checkpointer = PCcheck(rank_directory(job, rank), **knobs)
    checkpointer.start(state)
    checkpointer.save(1)
    checkpointer.drain(WAIT_S)
    outcomes = [event.outcome.value for event in checkpointer.events]
    checkpointer.close()
    dist.barrier()
    digest = state_digest(state)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    PCcheck(rank_directory(job, rank), rank=rank, world_size=world, control="off").restore(state)
    return {
        "outcomes": outcomes,
        "same": state_digest(state) == digest,
        "payload": whole_checkpoints(job)[0].infos[rank].meta_offset,
        "weight": summed(whole(model.weight)),
        "bias": summed(whole(model.bias)),
    }


def wide(rank, world, seed):
    """A model whose parts are many chunks long, and its optimizer with moments."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 4096, bias=False), torch.nn.Tanh(), torch.nn.Linear(4096, 256, bias=False)
    )
    if world > 1:
        for layer in (model[0], model[2], model):
            fully_shard(layer, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 256)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def save_wide(rank, world, job):
    state = wide(rank, world, 0)
    checkpointer = PCcheck(rank_directory(job, rank), rank=rank, world_size=world, control="off", chunk_bytes=4096)
    checkpointer.start(state)
    checkpointer.save(1)
    checkpointer.drain(WAIT_S)
    outcomes = [(event.outcome.value, event.error) for event in checkpointer.events]
    checkpointer.close()
    return {"outcomes": outcomes, "sums": sums_of(state["model"], state["optimizer"])}


def load_wide(rank, world, job, plain=False, together=False, fault=None):
    """What a rank fetches of a folder of objects, and the bytes of its own tensors. `fault` befalls the last rank."""
    state = wide(rank, 1 if plain else world, 7)
    fetched, taken = [], []
    real_get, real_take, real_wait = FolderClient.get_range, sharing.Sharing._take, sharing.WAIT_S
    last = rank == world - 1

    def get_range(self, key, begin, nbytes):
        fetched.append(nbytes)
        if last and fault == "store" and threading.current_thread().name.startswith("lastgood-share"):
            raise StorageError("no request of those that are for others succeeds")
        return real_get(self, key, begin, nbytes)

    def take(self, *arguments):
        taken.append(arguments)
        if last and fault == "lost" and len(taken) == 3:
            raise RuntimeError("as if the process had died")
        if last and fault == "late" and len(taken) == 3:
            time.sleep(2 * sharing.WAIT_S)
        real_take(self, *arguments)

    FolderClient.get_range, sharing.Sharing._take, sharing.WAIT_S = get_range, take, 3.0 if fault else real_wait
    began_s = time.monotonic()
    try:
        given = together and not (last and fault == "absent")
        step = restore_ranks(job, state, (rank, world), 4, together=given)
    finally:
        FolderClient.get_range, sharing.Sharing._take, sharing.WAIT_S = real_get, real_take, real_wait
    took_s = time.monotonic() - began_s
    tensors = [*state["model"].state_dict().values()]
    tensors += [value for entry in state["optimizer"].state_dict()["state"].values() for value in entry.values()]
    needed = sum(local(value).nbytes for value in tensors)
    sums = sums_of(state["model"], state["optimizer"])
    return {
        "step": step,
        "fetched": sum(fetched),
        "needed": needed,
        "sums": sums,
        "took_s": took_s,
        "taken": len(taken),
    }


def two_layers():
    return torch.nn.Sequential(OrderedDict(first=torch.nn.Linear(6, 10), second=torch.nn.Linear(10, 6)))


def sums_of(model, optimizer):
    found = {name: summed(whole(value)) for name, value in model.state_dict().items()}
    for number, entry in optimizer.state_dict()["state"].items():
        found |= {f"{number}.{name}": summed(whole(value)) for name, value in entry.items()}
    return found


def tensor_parallel(rank, world, job):
    """FSDP2 over tensor parallelism: strided shards, of 5 rows over 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = two_layers()
    parallelize_module(model, mesh["tp"], {"first": ColwiseParallel(), "second": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(2, 6)).square().sum().backward()
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    checkpointer = PCcheck(rank_directory(job, rank), rank=rank, world_size=world, control="off", chunk_bytes=4096)
    checkpointer.start(state)
    checkpointer.save(1)
    checkpointer.drain(WAIT_S)
    outcomes = [(event.outcome.value, event.error) for event in checkpointer.events]
    checkpointer.close()
    kinds = sorted({type(one).__name__ for value in model.state_dict().values() for one in value.placements})
    return {"outcomes": outcomes, "sums": sums_of(model, optimizer), "kinds": kinds}


def two_layers_again(rank, world, job):
    """The same model over one dimension, or in one piece."""
    model = two_layers()
    if world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.Adam(model.parameters())
    restore_ranks(job, {"model": model, "optimizer": optimizer}, (rank, world), 2)
    return sums_of(model, optimizer)


def places(rank, world, shapes):
    """Where torch says that parts lie, beside what Lastgood says."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    from lastgood.state.shards import describe_shard

    mesh = init_device_mesh("cpu", (world,))
    wrong = []
    for shape in shapes:
        for dim in range(len(shape)):
            tensor = distribute_tensor(torch.zeros(shape), mesh, [Shard(dim)])
            local_shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, tensor.placements)
            runs = describe_shard(tensor, "x").runs
            found = tuple(sum(length for _, length in one) for one in runs)
            begins = tuple(one[0][0] if one else None for one in runs)
            expected = tuple(at if size else None for at, size in zip(offset, local_shape, strict=True))
            if found != tuple(local_shape) or begins != expected:
                wrong.append([shape, dim, runs, list(local_shape), list(offset)])
    return wrong


def refused(rank, world, what):
    """What a state with a pending sum says, and what a system says that cannot keep parts."""
    from torch.distributed.tensor import Partial

    from lastgood.state import flatten

    mesh = init_device_mesh("cpu", (world,))
    state = {"x": DTensor.from_local(torch.ones(2), mesh, [Partial()])}
    flatten(state, spread=what == "sum")


def lonely(rank, world):
    """Rank 0 shows something that rank 1 does not wait for; then both meet again, with another exchange."""
    found = None
    if rank == 0:
        try:
            StoreExchange(rank, world, 1.0).gather(b"{}")
        except WaitTimeout as error:
            found = str(error)
    else:
        StoreExchange(rank, world, 1.0)
    dist.barrier()
    texts = [text.decode() for text in StoreExchange(rank, world, WAIT_S).gather(f"{rank} again".encode())]
    return found or texts


def train(rank, world, system, folder, steps, attached=None, interval_steps=1, **given):
    """Begin, and train so many steps; what it began at, and what it was refused with."""
    if attached is not None and rank not in attached:
        return {"began": None, "error": None}
    knobs = {"control": "off"} if system == "pccheck" else {}
    checkpointer = checkpointer_class(system)(folder.format(rank=rank), interval_steps=interval_steps, **knobs)
    found = {"began": None, "error": None}
    refused = False
    try:
        found["began"] = checkpointer.attach(model=torch.nn.Linear(2, 2), **given)
    except LastgoodError as error:
        found["error"], refused = f"{type(error).__name__}: {error}", True
    refusals = [None] * world
    if attached is None:  # as the exchange of gradients: nobody's step ends before all have begun
        dist.all_gather_object(refusals, refused)
    try:
        for _ in range(0 if any(refusals) else steps):
            checkpointer.step()
    except LastgoodError as error:
        found["error"] = f"{type(error).__name__}: {error}"
    checkpointer.close()
    return found


def main():
    die_with_parent()
    keep_stdout()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for line in sys.stdin:
        asked = json.loads(line)
        work, meeting = globals()[asked.pop("work")], Path(asked.pop("meeting"))
        limit = datetime.timedelta(seconds=WAIT_S)
        backend = "gloo"
        if asked.get("device", "cpu") != "cpu":
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(asked["rank"])
        try:
            dist.init_process_group(
                backend, init_method=f"file://{meeting}", rank=asked["rank"], world_size=asked["world"], timeout=limit
            )
            answer = {"ok": work(**asked)}
            dist.barrier()
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
