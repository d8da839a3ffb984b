"""Ranks that save and load through DCP, forked from one process that has imported torch.

Run as: dcp_rank.py. See `forked_ranks`.
"""

from __future__ import annotations

import datetime
import functools
import os
import signal
import time
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from lastgood.checkpointers.dcp.torch_io import first_cause
from lastgood.integrations.dcp import LastgoodReader, LastgoodWriter, folder, folder_save
from lastgood.integrations.dcp.together import TogetherDCP
from tests.integrations.forked_ranks import serve

DTYPES = {name: name for name in ("float64", "int64", "bool", "complex64", "float16")} | {"columns": "bfloat16"}
SHAPES = {"rows": (7, 5), "columns": (3, 9), "both": (8, 6), "small": (1, 4), "empty": (0, 3), "scalar": ()}


def whole(seed, name, shape):
    """The tensor of which each rank has a part."""
    generator = torch.Generator().manual_seed(1000 * seed + sum(name.encode()))
    found = torch.randn(shape, generator=generator)
    return found.to(getattr(torch, DTYPES.get(name.rpartition(" ")[2], "float32")))


@functools.cache
def whole_mesh():
    return init_device_mesh("cpu", (dist.get_world_size(),))


def make_state(seed, shapes=None, placed=None):
    """A state of parts of tensors, of tensors that all ranks have, and of values."""
    mesh = whole_mesh()
    shapes = shapes or SHAPES
    placed = placed or {"rows": 0, "columns": 1, "both": 0, "small": 0, "empty": 0, "scalar": None}
    state = {}
    for name, shape in shapes.items():
        axis = placed[name]
        placement = Replicate() if axis is None else Shard(axis)
        state[name] = distribute_tensor(whole(seed, name, tuple(shape)), mesh, [placement], src_data_rank=None)
    return {"model": state, "plain": whole(seed, "plain", (4, 4)), "value": {"step": seed, "rates": [0.1, seed]}}


def emptied(value):
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 77)
    if isinstance(value, dict):
        return {key: emptied(item) for key, item in value.items()}
    return [emptied(item) for item in value] if isinstance(value, list) else type(value)()


def differences(first, second, path=""):
    """The names of what is not the same to the bit."""
    if isinstance(first, dict):
        return [found for key in first for found in differences(first[key], second[key], f"{path}.{key}")]
    if isinstance(first, torch.Tensor):
        ours, theirs = (one.to_local() if isinstance(one, DTensor) else one for one in (first, second))
        same = ours.dtype == theirs.dtype and ours.shape == theirs.shape
        same = same and torch.equal(*(one.reshape(-1).view(torch.uint8) for one in (ours, theirs)))
        return [] if same else [path]
    return [] if first == second else [path]


def loaded(state, reader):
    into = emptied(state)
    dcp.load(into, storage_reader=reader)
    return differences(state, into)


def save(state, storage, how="sync", **options):
    if how == "sync":
        dcp.save(state, storage_writer=storage, **options)
        return
    kind = AsyncCheckpointerType.PROCESS if how == "process" else AsyncCheckpointerType.THREAD
    dcp.async_save(state, storage_writer=storage, async_checkpointer_type=kind, **options).result(60)


def both_ways(rank, asked):
    """Save with both writers, load with both readers; what differs by way."""
    del rank
    place = Path(asked["place"])
    state = make_state(asked.get("seed", 1), asked.get("shapes"), asked.get("placed"))
    found = {}
    save(state, LastgoodWriter(place / "ours", timeout_s=20), asked.get("how", "sync"))
    found["ours"] = loaded(state, LastgoodReader(place / "ours", timeout_s=20))
    save(state, LastgoodWriter(place / "files", layout="dcp", timeout_s=20))
    found["files"] = loaded(state, LastgoodReader(place / "files", timeout_s=20))
    found["files by torch"] = loaded(state, dcp.FileSystemReader(place / "files"))
    save(state, dcp.FileSystemWriter(place / "torch"))
    found["torch"] = loaded(state, LastgoodReader(place / "torch", timeout_s=20))
    yield found


def many_ways(rank, asked):
    """`both_ways` for one case after another: the cases that failed, with what differed."""
    found = []
    for number, case in enumerate(asked["cases"]):
        place = Path(asked["place"]) / str(number)
        (answer,) = both_ways(rank, {**case, "place": str(place)})
        if any(answer.values()):
            found.append([case, answer])
    yield found


def sharded_models(rank, asked):
    """Models under FSDP1 (ShardedTensor) and FSDP2 with an optimizer: saved, changed, loaded again."""
    del rank
    found = {}
    for kind in ("fsdp1", "fsdp2"):
        for layout in ("lastgood", "dcp"):
            place = Path(asked["place"]) / f"{kind}-{layout}"
            model, optimizer = training(kind)
            dcp.save(
                app_state(kind, model, optimizer), storage_writer=LastgoodWriter(place, layout=layout, timeout_s=20)
            )
            before = local_bytes(model, optimizer)
            other, other_optimizer = training(kind, steps=2)
            found[f"{kind} {layout} changed"] = local_bytes(other, other_optimizer) != before
            state = app_state(kind, other, other_optimizer)
            dcp.load(state, storage_reader=LastgoodReader(place, timeout_s=20))
            take_state(kind, other, other_optimizer, state)
            found[f"{kind} {layout} again"] = local_bytes(other, other_optimizer) == before
    yield found


def training(kind, steps=1):
    torch.manual_seed(steps)
    model = torch.nn.Sequential(torch.nn.Linear(7, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
    if kind == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=True)
    else:
        fully_shard(model, mesh=whole_mesh())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.randn(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def app_state(kind, model, optimizer):
    if kind == "fsdp1":
        FullyShardedDataParallel.set_state_dict_type(model, StateDictType.SHARDED_STATE_DICT)
        return {"model": model.state_dict(), "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer)}
    weights, moments = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": moments}


def take_state(kind, model, optimizer, state):
    if kind == "fsdp1":
        model.load_state_dict(state["model"])
        moments = FullyShardedDataParallel.optim_state_dict_to_load(model, optimizer, state["optimizer"])
        optimizer.load_state_dict(moments)
        return
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


def local_bytes(model, optimizer):
    tensors = [*model.parameters(), *(one for state in optimizer.state.values() for one in state.values())]
    plain = [one.to_local() if isinstance(one, DTensor) else one for one in tensors]
    return [one.detach().reshape(-1).view(torch.uint8).tolist() for one in plain if one.numel()]


def load_into(rank, asked):
    """Load what another number of ranks wrote, placed in another way."""
    del rank
    state = make_state(asked.get("seed", 1), asked.get("shapes"), asked.get("placed"))
    yield {name: loaded(state, LastgoodReader(Path(asked["place"]) / name, timeout_s=20)) for name in asked["names"]}


def cached_plans(rank, asked):
    """Three saves with cached plans, one of them of a state of other shapes."""
    del rank
    found = []
    for seed, shapes in ((1, None), (2, None), (3, {"rows": (4, 2)})):
        state = make_state(seed, shapes)
        planner = DefaultSavePlanner(enable_plan_caching=True)
        place = Path(asked["place"]) / f"step-{seed}"
        save(state, LastgoodWriter(place, timeout_s=20), planner=planner)
        found.append(loaded(state, LastgoodReader(place, timeout_s=20)))
    yield found


def without_collectives(rank, asked):
    """Each rank saves by itself into one folder; then each into a folder of its own, with `no_dist`."""
    state = {"mine": torch.full((3,), float(rank)), "rank": rank}
    place = Path(asked["place"])
    found = {}
    for _ in range(2):
        save(state, LastgoodWriter(place / "together", timeout_s=20), use_collectives=False)
        found["together"] = loaded(state, LastgoodReader(place / "together", timeout_s=20))
    save(state, LastgoodWriter(place / f"alone-{rank}", timeout_s=20), no_dist=True)
    into = emptied(state)
    dcp.load(into, storage_reader=LastgoodReader(place / f"alone-{rank}", timeout_s=20), no_dist=True)
    yield {**found, "alone": differences(state, into)}


def system_together(rank, asked):
    """The system `dcp` over FSDP2's shards: three checkpoints, and all that they hold in a fresh training."""
    place, mode = Path(asked["place"]) / asked["mode"], asked["mode"]
    found = {}
    model, optimizer = training("fsdp2")
    mine = torch.full((3,), float(rank))
    state = {"model": model, "optimizer": optimizer, "mine": mine, "step": 0}
    ckpt = TogetherDCP(place, mode=mode, keep=2, limit_s=30)
    ckpt.start(state)
    for step in (1, 2, 3):
        model(torch.ones(4, 7)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        mine += 10
        state["step"] = step
        ckpt.save(step)
    ckpt.drain()
    found["outcomes"] = [str(event.outcome) for event in ckpt.events]
    found["wrote"] = all(event.bytes_written for event in ckpt.events)
    found["latest"] = ckpt.latest()
    saved = local_bytes(model, optimizer)
    ckpt.close()
    dist.barrier()
    if asked.get("damage") and rank == 1:
        (file,) = sorted(place.glob("*-step-3/__1_*"))
        file.write_bytes(file.read_bytes()[:-100])
    dist.barrier()
    model, optimizer = training("fsdp2", steps=asked["fresh"])
    again = {"model": model, "optimizer": optimizer, "mine": torch.zeros(3), "step": 0}
    ckpt = TogetherDCP(place, mode=mode, keep=2, limit_s=30)
    found["restored"] = ckpt.restore(again)
    found["equal"] = local_bytes(model, optimizer) == saved
    found["own"] = (
        again["mine"].tolist() == [rank + 10.0 * found["restored"]] * 3 and again["step"] == found["restored"]
    )
    ckpt.start(again)
    ckpt.save(7)
    ckpt.drain()
    found["after"] = ckpt.latest()
    ckpt.close()
    dist.barrier()
    yield found


# -- bad days ----------------------------------------------------------------------------------------------------------


class Dying(DefaultSavePlanner):
    """Ends its process, or fails, when it is to plan."""

    def __init__(self, dies):
        super().__init__()
        self.dies = dies

    def create_local_plan(self):
        if self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("this planner cannot plan")


def refused(call):
    began = time.monotonic()
    try:
        call()
    except (CheckpointException, Exception) as error:
        cause = first_cause(error)
        return {"kind": type(cause).__name__, "text": str(cause), "seconds": time.monotonic() - began}
    return {"kind": "nothing", "text": "", "seconds": time.monotonic() - began}


def bad_day(rank, asked):
    """An older checkpoint is there; then one rank dies or fails at a place. What each survivor is told."""
    place = Path(asked["place"]) / "step-1"
    older = make_state(1)
    save(older, LastgoodWriter(place, timeout_s=20))
    yield "saved"
    state = make_state(2)
    planner = None
    if rank == asked["victim"]:
        dies = asked["dies"]

        def strike(*_args, **_kwargs):
            if dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(5, "Input/output error")

        if asked["where"] == "plan":
            planner = Dying(dies)
        elif asked["where"] == "write":
            folder_save.write_slot_file = strike
        elif asked["where"] == "finish":
            folder.CheckpointFolder.publish = strike
        elif asked["where"] == "before":
            time.sleep(asked.get("late_s", 0))
            if dies:
                strike()
    new = LastgoodWriter(place, timeout_s=asked["timeout_s"])
    found = refused(lambda: save(state, new, planner=planner))
    found["older"] = loaded_alone(older, LastgoodReader(place, timeout_s=20))
    yield found
    if asked["dies"]:
        os._exit(0)  # its group has lost a rank
    if asked.get("again"):
        folder_save.write_slot_file = REAL_WRITE
        folder.CheckpointFolder.publish = REAL_PUBLISH
        save(state, LastgoodWriter(place, timeout_s=20))
        found["again"] = loaded(state, LastgoodReader(place, timeout_s=20))
    yield found


REAL_WRITE = folder_save.write_slot_file
REAL_PUBLISH = folder.CheckpointFolder.publish


def loaded_alone(state, reader):
    """What this rank reads without the others: the parts that it has."""
    into = emptied(state)
    dcp.load(into, storage_reader=reader, no_dist=True)
    return differences(state, into)


def other_folders(rank, asked):
    """Ranks that name different folders, and ranks whose folder of one name is not one folder."""
    place = Path(asked["place"])
    state = {"w": torch.ones(3)}
    found = {"names": refused(lambda: save(state, LastgoodWriter(place / f"step-{rank}", timeout_s=10)))}
    if rank:
        folder.CheckpointFolder.draft = property(lambda self: self.final.with_name(".not-here"))
        folder._APPEARS_S = 1.0
    state = make_state(1)
    found["places"] = refused(lambda: save(state, LastgoodWriter(place / "step-9", timeout_s=10)))
    yield found


def failed_load(rank, asked):
    """One rank cannot read; all are told why."""
    state = make_state(1)
    place = Path(asked["place"]) / "step-1"
    save(state, LastgoodWriter(place, timeout_s=20))
    dist.barrier()
    if rank == 0:
        (mine,) = place.glob("__0_0*.lgs")
        content = bytearray(mine.read_bytes())
        content[(1 << 20) + 3] ^= 1
        mine.write_bytes(content)
    dist.barrier()
    found = [refused(lambda: dcp.load(emptied(state), storage_reader=LastgoodReader(place, timeout_s=20)))]
    reader = LastgoodReader(Path(asked["place"]) / "nowhere", timeout_s=20)
    found.append(refused(lambda: dcp.load(emptied(state), storage_reader=reader)))
    yield found


def save_until_killed(rank, asked):
    """Saves of one name, one after another, until a signal comes."""
    del rank
    place = Path(asked["place"]) / "step-1"
    for seed in range(1000):
        save(make_state(seed), LastgoodWriter(place, timeout_s=asked["timeout_s"]))
        yield seed


def newest_is_complete(rank, asked):
    """Read the one checkpoint that is there: its step says what each tensor must be."""
    del rank
    place = Path(asked["place"]) / "step-1"
    state = make_state(0)
    into = emptied(state)
    dcp.load(into, storage_reader=LastgoodReader(place, timeout_s=20))
    found = {"step": into["value"]["step"], "differs": differences(make_state(into["value"]["step"]), into)}
    save(state, LastgoodWriter(place, timeout_s=20))
    yield {**found, "left": sorted(path.name for path in place.parent.iterdir())}


WORKS = {
    one.__name__: one
    for one in (
        both_ways,
        many_ways,
        sharded_models,
        load_into,
        cached_plans,
        without_collectives,
        system_together,
        bad_day,
        other_folders,
        failed_load,
        save_until_killed,
        newest_is_complete,
    )
}


def one_rank(rank, asked):
    """In a forked process: do the work."""
    torch.set_num_threads(1)
    # A store in a file outlives rank 0, as that of a launcher does.
    kept = f"file://{asked['folder']}/store" if asked.get("store") == "file" else None
    world = {} if kept is None else {"rank": rank, "world_size": asked["world"]}
    dist.init_process_group("gloo", init_method=kept, timeout=datetime.timedelta(seconds=80), **world)
    yield from WORKS[asked["work"]](rank, asked)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    serve(one_rank)
