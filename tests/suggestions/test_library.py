"""Suggestions of checkpointers, states, tokens and shadows' processes, followed to the letter."""

from __future__ import annotations

import ctypes
import logging
import re
import shlex
import shutil
import subprocess
from functools import partial

import pytest
import torch

from lastgood import PCcheck
from lastgood.checkpointers.checkmate.options import CheckmateOptions
from lastgood.checkpointers.events import CheckpointEvent
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.checkpointers.shadows.restore import read_token
from lastgood.checkpointers.torch_files.files import TorchFiles
from lastgood.gradients.shadow.launch_env import find_place
from lastgood.gradients.trainer.parameters import memory_order
from lastgood.state.flatten import flatten
from lastgood.storage import SlotStore
from lastgood.tokens import check_token
from lastgood.tokens import read_token as read_token_file
from tests.suggestions.following import advice, follows, hear, refusal

Checkmate, FlowCheck, GPM = (checkpointer_class(name) for name in ("checkmate", "flowcheck", "gpm"))


def training():
    model = torch.nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), 0.1)}


@follows("start() was called twice", "start(state) must be called first")
def test_starts_out_of_order(tmp_path):
    checkpointer = PCcheck(tmp_path)
    assert "start(state)" in refusal(lambda: checkpointer.state)
    checkpointer.start(training())
    assert checkpointer.state
    advice(refusal(lambda: checkpointer.start(training())), r"close\(\) the first")
    checkpointer.close()
    checkpointer.start(training())
    checkpointer.close()


@follows("not open; call start(state) first")
@pytest.mark.parametrize("kind", [GPM, PCcheck])
def test_areas_that_are_not_open(kind, tmp_path):
    checkpointer = kind(tmp_path)
    state = training()
    message = refusal(lambda: checkpointer._save(CheckpointEvent(1, 0.0)) if kind is GPM else checkpointer._opened())
    checkpointer.start(eval(advice(message, r"call start\((state)\)"), {"state": state}))
    checkpointer.save(1)
    checkpointer.close()


@follows("{}: nothing may be written for step {} before void()")
def test_a_slot_is_made_void_first(tmp_path):
    content = bytearray(b"a" * 5000)
    address = (ctypes.c_char * len(content)).from_buffer(content)
    with SlotStore(tmp_path, slots=3, job_id=bytes(16)) as store:
        early, write = (store.begin(1, len(content), 10.0, later=True) for _ in range(2))
        message = refusal(lambda: early.copy_host([(ctypes.addressof(address), len(content))], 10.0))
        eval(f"write.{advice(message, r'before (void[(][)])')}", {"write": write})
        write.copy_host([(ctypes.addressof(address), len(content))], 10.0)
        write.commit(len(content) - 10, 10, bytes(32), 10.0)
        assert [info.step for info in store.committed()] == [1]


@follows("call step() of the checkpointer once after each optimizer.step()")
def test_steps_between_updates(tmp_path, caplog):
    def train(step_at):
        caplog.clear()
        parts = training()
        checkpointer = PCcheck(tmp_path / step_at, interval_steps=1)
        checkpointer.attach(**parts)
        for micro_batch in range(4):
            parts["model"](torch.ones(1, 2)).sum().backward()
            if micro_batch % 2:
                parts["optimizer"].step()
                parts["optimizer"].zero_grad()
            if micro_batch % 2 or step_at == "micro-batch":
                checkpointer.step()
        checkpointer.close()
        return " ".join(record.getMessage() for record in caplog.records)

    with caplog.at_level(logging.WARNING):
        hear(train("micro-batch"))
        assert train("update") == ""


@follows("a save was asked for inside {}.step()", "saves work again after the next complete step")
def test_saves_inside_a_step(tmp_path, caplog):
    parts = training()
    optimizer = parts["optimizer"]
    checkpointer = PCcheck(tmp_path, interval_steps=0)
    checkpointer.attach(**parts)
    flag = []

    def save_inside(*_):
        checkpointer.save(1)
        flag.append(2)

    hook = optimizer.register_step_pre_hook(save_inside)
    optimizer.step()
    hook.remove()
    checkpointer.save(flag.pop())  # the flag was set there; the step is finished
    hook = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    hook.remove()
    checkpointer.save(3)
    checkpointer.drain()
    assert checkpointer.latest() == 2
    for record in caplog.records:
        hear(record.getMessage())
    optimizer.step()
    checkpointer.save(4)
    checkpointer.drain()
    assert checkpointer.latest() == 4
    checkpointer.close()


@follows("it follows every step, so each one is a checkpoint; leave it out")
@pytest.mark.parametrize("system", [Checkmate, FlowCheck])
def test_an_interval_of_a_system_that_keeps_every_step(tmp_path, system):
    for interval in (-1, 0, 5):
        advice(refusal(partial(system, tmp_path, interval_steps=interval)), "leave it out")
    checkpointer = system(tmp_path)
    assert checkpointer.interval_steps is None
    checkpointer.close()


@follows('give shadows=["host:port", ...]', "give token_file=, the one that `lastgood shadow serve --token-file` has")
def test_what_checkmate_needs_of_its_shadows(tmp_path):
    message = refusal(lambda: read_token(CheckmateOptions()))
    given = advice(message, r"give (shadows=\[.*?\])").replace("host:port", "127.0.0.1:29400").replace(", ...", "")
    message = refusal(lambda: read_token(eval(f"CheckmateOptions({given})")))
    read_token_file(tmp_path / "token", make=True)  # as `lastgood shadow serve --token-file` does
    given += ", " + advice(message, r"give (token_file=)") + "path"
    assert read_token(eval(f"CheckmateOptions({given})", {**globals(), "path": str(tmp_path / "token")}))


@follows("ring_listen and ring_next are of no use without")
def test_addresses_of_a_ring_without_one():
    ring = {"ring_listen": ("127.0.0.1:29500", "127.0.0.1:29501"), "ring_next": ("127.0.0.1:29501", "127.0.0.1:29500")}
    message = refusal(lambda: Checkmate("unused", **ring))
    kept = eval(f"dict({advice(message, r'without (tap=.ring.)')})")
    assert CheckmateOptions(**ring, **kept).tap == "ring"


@follows("checkmate can shadow it once it is made contiguous()")
def test_a_tensor_with_gaps():
    gaps = torch.ones(4, 4)[:, :2]
    message = refusal(lambda: memory_order(gaps, "weight"))
    made = eval("gaps." + advice(message, r"contiguous\(\)"), {"gaps": gaps})
    assert memory_order(made, "weight") == (0, 1)


@follows("give one of them memory of its own with clone()")
def test_memory_seen_as_two_dtypes():
    one = torch.ones(4)
    other = one.view(torch.int32)
    message = refusal(lambda: TorchFiles.check({"a": one, "b": other}))
    TorchFiles.check({"a": one, "b": eval("other." + advice(message, r"clone\(\)"), {"other": other})})


@follows("are different ones in the checkpoint; make it a tensor of its own with clone()")
def test_an_expanded_tensor(tmp_path):
    first = PCcheck(tmp_path)
    first.start({"a": torch.arange(3.0)})
    first.save(1)
    first.close()
    expanded = torch.zeros(1).expand(3)
    message = refusal(lambda: PCcheck(tmp_path).restore({"a": expanded}))
    own = eval("expanded." + advice(message, r"clone\(\)"), {"expanded": expanded})
    PCcheck(tmp_path).restore({"a": own})
    assert own.tolist() == [0.0, 1.0, 2.0]


@follows("text.encode('utf-16', 'surrogatepass').decode('utf-16') makes one of them")
def test_halves_of_a_surrogate_pair():
    text = "\ud83d\ude00"
    message = refusal(lambda: flatten({"a": text}))
    made = eval(advice(message, r"; (text\..*\)) makes one"), {"text": text})
    flatten({"a": made})
    assert made == "\U0001f600"


@follows("`openssl rand -hex 32` makes one", "copy the other side's file there")
def test_tokens(tmp_path):
    message = refusal(lambda: check_token(b"short", "here"))
    if shutil.which("openssl"):
        made = subprocess.run(shlex.split(advice(message, r"`(.*)`")), capture_output=True, check=True, timeout=60)
        assert check_token(made.stdout.strip(), "here")
    refusal(lambda: read_token_file(tmp_path / "mine"))
    read_token_file(tmp_path / "theirs", make=True)
    shutil.copy(tmp_path / "theirs", tmp_path / "mine")
    assert read_token_file(tmp_path / "mine") == read_token_file(tmp_path / "theirs")


def test_a_token_that_others_may_read(tmp_path):
    path = tmp_path / "token"
    path.write_text("x" * 32)
    path.chmod(0o644)
    command = advice(refusal(lambda: read_token_file(path)), r"(chmod 600 .*)")
    subprocess.run(shlex.split(command), check=True, timeout=60)
    assert read_token_file(path)


@follows("which of {} shadows is this one?", "give --shadow and --shadows")
def test_which_shadow():
    message = refusal(lambda: find_place(None, 2, None, {}))
    advice(message, r"give --shadow, or RANK")
    assert find_place(1, 2, None, {}).shadow == find_place(None, 2, None, {"RANK": "1"}).shadow == 1
    elsewhere = {"RANK": "0", "WORLD_SIZE": "5"}
    advice(refusal(lambda: find_place(None, 2, 2, elsewhere)), r"give --shadow and --shadows")
    assert find_place(1, 2, 2, elsewhere).shadow == 1


@follows("a rendezvous needs MASTER_ADDR and MASTER_PORT")
def test_a_rendezvous_without_a_place():
    from lastgood.gradients.shadow.rendezvous import Rendezvous
    from lastgood.ports import free_ports

    place = find_place(None, 1, None, {})
    message = refusal(lambda: Rendezvous({}, place, 5.0))
    names = re.findall(r"MASTER_\w+", message)
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_ports(1)[0])}
    told = Rendezvous({name: values[name] for name in names}, place, 5.0).exchange(0, "127.0.0.1:1")
    assert told == ["127.0.0.1:1"]
