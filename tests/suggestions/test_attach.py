"""Advice in error texts is followed to the letter, and must work: what a message says to write is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from lastgood import PCcheck
from lastgood.checkpointers.registry import checkpointer_class
from lastgood.errors import LastgoodError
from lastgood.gradients.trainer.parameters import TrackedParameters
from tests.checkpointers.support.wrapped_optimizers import Forwarding
from tests.suggestions.following import advice, follows, refusal

MODEL = torch.nn.Linear(2, 2)
CheckFreq, GPM = checkpointer_class("checkfreq"), checkpointer_class("gpm")


def attached(directory, **parts):
    checkpointer = PCcheck(directory, interval_steps=1)
    checkpointer.attach(**parts)
    return checkpointer


def call_of(message: str, **known) -> dict:
    """The keyword arguments of the `attach(...)` that a message says to write."""
    text = advice(message, r"(?:as|dict,) attach\((.*?)\)(?:[,;: ]|$)").replace("..., ", "")
    return eval(f"dict({text})", {"model": MODEL, **known})


@pytest.mark.parametrize("system", ["sync", "checkfreq", "gpm", "pccheck", "dcp"])
@follows("attach() needs interval_steps")
def test_a_missing_interval(system, tmp_path):
    kind = checkpointer_class(system)
    message = refusal(lambda: kind(tmp_path / "a b'c").attach(model=MODEL))
    checkpointer = eval(advice(message, r"for instance (.*)"), {kind.__name__: kind})
    checkpointer.attach(model=MODEL)
    assert (checkpointer.interval_steps, checkpointer.directory) == (10, tmp_path / "a b'c")
    checkpointer.close()


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("interval", "interval_steps"),
        ("interval_step", "interval_steps"),
        ("steps_interval", "interval_steps"),
        ("writer_thread", "writer_threads"),
        ("keeps", "keep"),
        ("chunksize_bytes", "chunk_bytes"),
        ("in_flight", "max_in_flight"),
        ("archive_directory", "archive_dir"),
        ("max_restarts", "max_failed_restarts"),
    ],
)
def test_a_name_of_an_option_that_is_nearly_right(given, meant, tmp_path):
    message = refusal(lambda: PCcheck(tmp_path, **{given: 5}))
    assert advice(message, r"did you mean (\w+)\?") == meant
    assert meant in ("interval_steps", *PCcheck.Options.model_fields)


def test_a_name_that_is_nothing_like_an_option_is_not_guessed(tmp_path):
    message = refusal(lambda: PCcheck(tmp_path, zzz=5))
    assert "did you mean" not in message
    listed = advice(message, r"\(options: (.*)\)").split(", ")
    assert {"interval_steps", "readable_by", "max_unsaved_s"} < set(listed)
    for name in listed:  # each of them is taken as a name: what is refused is at most the value
        try:
            PCcheck(tmp_path, **{name: object()})
        except (LastgoodError, TypeError) as error:
            assert "no such option" not in str(error)


@follows("an interval is given by name", "make them with {}.Options()")
def test_an_interval_without_its_name(tmp_path):
    message = refusal(lambda: PCcheck(tmp_path, 10))
    made = eval(advice(message, r"by name, as (.*)"), {"PCcheck": PCcheck})
    assert made.interval_steps == 10
    message = refusal(lambda: PCcheck(tmp_path, "fast"))
    assert eval(advice(message, r"make them with (.*)"), {"PCcheck": PCcheck}) == PCcheck.Options()


@follows("not both; put all into one")
def test_options_given_twice(tmp_path):
    message = refusal(lambda: PCcheck(tmp_path, PCcheck.Options(), keep=3, pressure="skip"))
    options = eval(advice(message, r"as (PCcheck\.Options.*)"), {"PCcheck": PCcheck})
    assert (PCcheck(tmp_path, options).options.keep, options.pressure) == (3, "skip")


@follows("with interval_steps=0 only save(step) saves")
def test_an_interval_below_zero(tmp_path):
    message = refusal(lambda: PCcheck(tmp_path, interval_steps=-1))
    checkpointer = eval(
        f"PCcheck(where, {advice(message, 'interval_steps=0')})", {"PCcheck": PCcheck, "where": tmp_path}
    )
    checkpointer.attach(model=MODEL)
    checkpointer.step()
    assert checkpointer.latest() is None
    checkpointer.save(1)
    checkpointer.close()
    assert PCcheck(tmp_path).latest() == 1


def test_a_budget_beside_an_interval(tmp_path):
    message = refusal(lambda: CheckFreq(tmp_path, overhead_budget=0.1, interval_steps=3))
    assert "leave one out" in message
    for given in ({"overhead_budget": 0.1}, {"interval_steps": 3}):
        checkpointer = CheckFreq(tmp_path, **given)
        checkpointer.attach(model=MODEL)
        checkpointer.close()


def test_half_of_an_archive(tmp_path):
    message = refusal(lambda: PCcheck(tmp_path, archive_every=2))
    assert "archive_every and archive_dir go together" in message
    PCcheck(tmp_path, archive_every=2, archive_dir=str(tmp_path / "archive"))


@pytest.mark.parametrize("name", ["rng", "progress"])
@follows("makes {} by itself; give your part another name")
def test_a_name_that_is_taken(name, tmp_path):
    message = refusal(lambda: attached(tmp_path, model=MODEL, **{name: {"a": 1}}))
    other = advice(message, r"as attach\((\w+)=\.\.\.\)")
    attached(tmp_path, model=MODEL, **{other: {"a": 1}}).close()


@pytest.mark.parametrize("parts", [{"epoch": 3}, {"note": "it's"}, {"rate": 0.5}, {}, {"model": None}])
@follows("put it into a dict, attach(", "nothing to keep; pass at least the model", one_of_them=True)
def test_parts_that_cannot_be_kept_so(parts, tmp_path):
    attached(tmp_path, **call_of(refusal(lambda: attached(tmp_path, **parts)))).close()


@follows("must be called first, as attach(model=model)", "close() it first", "as attach(..., data=loader)")
def test_calls_out_of_order(tmp_path):
    checkpointer = PCcheck(tmp_path, interval_steps=1)
    checkpointer.attach(**call_of(refusal(checkpointer.step)))
    assert "close() it first" in refusal(lambda: checkpointer.attach(model=MODEL))
    checkpointer.close()
    checkpointer.attach(model=MODEL)
    message = refusal(lambda: checkpointer.data)
    checkpointer.close()
    checkpointer.attach(model=MODEL, **call_of(message, loader=[1, 2]))
    assert "as for batch in checkpointer.data" in refusal(checkpointer.step)
    for _ in checkpointer.data:
        checkpointer.step()
    checkpointer.close()


def test_data_that_can_be_gone_through_once(tmp_path):
    loader = DataLoader(torch.arange(4))
    assert "give the loader itself" in refusal(lambda: attached(tmp_path, model=MODEL, data=iter(loader)))
    attached(tmp_path, model=MODEL, data=loader).close()


@follows("data_changed='samples') goes on after")
def test_data_that_changed(tmp_path):
    checkpointer = attached(tmp_path, model=MODEL, data=DataLoader(torch.arange(8), 2))
    for _ in checkpointer.data:
        checkpointer.step()
        break
    checkpointer.close()
    message = refusal(lambda: attached(tmp_path, model=MODEL, data=DataLoader(torch.arange(8), 4)))
    choices = re.findall(r"attach\(\.\.\., (data_changed='\w+')\)", message)
    assert len(choices) == 2
    for choice in choices:
        again = PCcheck(tmp_path, interval_steps=0)
        more = eval(f"dict({choice})")
        assert again.attach(model=MODEL, data=DataLoader(torch.arange(8), 4), **more) == 1
        again.close()
    attached(tmp_path, model=MODEL, data=DataLoader(torch.arange(8), 2)).close()


@follows("more=[{}{}]")
def test_what_no_part_holds(tmp_path):
    loose = [torch.nn.Parameter(torch.ones(2)) for _ in range(5)]
    optimizer = torch.optim.SGD([{"params": [*MODEL.parameters(), loose[0]]}, {"params": loose[1:]}], 0.1)
    message = refusal(lambda: attached(tmp_path, model=MODEL, optimizer=optimizer))
    listed = advice(message, r"attach\(\.\.\., more=\[(.*), \.\.\.\]\)")
    named = eval(f"[{listed}]", {"optimizer": optimizer})
    assert [id(one) for one in named] == [id(one) for one in loose[:3]] and "and 2 more" in message
    attached(tmp_path / "a", model=MODEL, optimizer=optimizer, more=named + loose[3:]).close()
    other = eval(f"dict({advice(message, 'unattached=.allow.')})")
    attached(tmp_path / "b", model=MODEL, optimizer=optimizer, **other).close()


@follows("numpy.random.set_bit_generator")
def test_another_kind_of_numpys_generator(tmp_path):
    usual = numpy.random.get_bit_generator()
    try:
        numpy.random.set_bit_generator(numpy.random.PCG64(1))
        first = attached(tmp_path, model=MODEL)
        first.step()
        first.close()
        numpy.random.set_bit_generator(usual)
        message = refusal(lambda: attached(tmp_path, model=MODEL))
        exec(advice(message, r"call (numpy\..*\(\)\)) before"), {"numpy": numpy})
        attached(tmp_path, model=MODEL).close()
    finally:
        numpy.random.set_bit_generator(usual)


def test_state_of_replaced_parameters(tmp_path):
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    old = model.weight
    model.weight = torch.nn.Parameter(torch.zeros(2, 2))
    optimizer.param_groups[0]["params"][0] = model.weight
    message = refusal(lambda: attached(tmp_path, model=model, optimizer=optimizer))
    assert "make the optimizer again" in message and "take the old ones out of its `state`" in message
    attached(tmp_path, model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1)).close()
    del optimizer.state[old]
    attached(tmp_path, model=model, optimizer=optimizer).close()


@follows("call its close()")
def test_a_lock_of_this_very_process(tmp_path):
    first = attached(tmp_path, model=MODEL)
    assert "call its close()" in refusal(lambda: attached(tmp_path, model=MODEL))
    first.close()
    attached(tmp_path, model=MODEL).close()


@follows("as attach({}={}.optimizer)")
def test_an_optimizer_that_wraps_another_under_checkmate():
    optimizer = Forwarding(torch.optim.SGD(MODEL.parameters()))
    message = refusal(lambda: TrackedParameters({"model": MODEL, "optimizer": optimizer}))
    TrackedParameters({"model": MODEL, **call_of(message, optimizer=optimizer)})


@follows("[p for p in model.parameters()")
def test_frozen_parameters_under_checkmate():
    model = torch.nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    message = refusal(lambda: TrackedParameters({"model": model, "optimizer": torch.optim.SGD(model.parameters())}))
    parameters = eval(advice(message, r"\[p for .*\]"), {"model": model})
    TrackedParameters({"model": model, "optimizer": torch.optim.SGD(parameters)})


@follows("{}: {}; name a step, restore with good_only=False, or move the directory")
def test_checkpoints_that_are_judged_bad(tmp_path):
    first = attached(tmp_path, model=MODEL)
    first.step()
    first.drain()
    first.verdict(1, ok=False)
    first.close()
    message = refusal(lambda: attached(tmp_path, model=MODEL))
    for words in ("name a step", "good_only=False", "move the directory away"):
        assert words in message
    again = PCcheck(tmp_path, interval_steps=0)
    assert again.attach(model=MODEL, resume_step=1) == 1
    state = again.state
    again.close()
    assert PCcheck(tmp_path).restore(state, good_only=False) == 1
    Path(tmp_path).rename(tmp_path.with_name("away"))
    attached(tmp_path, model=MODEL).close()


def test_values_that_cannot_be_stored(tmp_path):
    class Plain:
        value = 1

    class Kept(Plain):
        def state_dict(self):
            return {"value": self.value}

        def load_state_dict(self, state):
            self.value = state["value"]

    message = refusal(lambda: attached(tmp_path, model=MODEL, own={"a": Plain()}))
    assert "give it state_dict and load_state_dict, or keep it out of the state" in message
    attached(tmp_path, model=MODEL, own={"a": Kept()}).close()
