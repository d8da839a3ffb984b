"""The native kernels against torch's operations: to the bit, on each instruction set, and for any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood import _native
from lastgood.sparse.blocks import SparseGradient
from lastgood.sparse.steps import Hyperparameters, adam_row, sgd_row
from lastgood.sparse.update import catch_up, update, update_all
from tests.sparse.support import update_twin as twin

VARIANTS = _native.step_variants()


def drawn(source, elements, width, count, dtype=torch.float32):
    places = -(-elements // width)
    indices = np.sort(source.choice(places, min(count, places), replace=False)).astype(np.uint32)
    values = torch.from_numpy(source.standard_normal((len(indices), width)).astype(np.float32)).to(dtype)
    if len(indices) and indices[-1] == places - 1:
        values[-1, width - (places * width - elements) :] = 0
    return SparseGradient(elements, width, indices, values.flatten())


def rows_of(source, adam, steps):
    """Rows of a schedule that changes now and then, also in what kind of step they are."""
    made = []
    given = None
    for step in range(1, steps + 1):
        if given is None or source.random() < 0.1:
            chosen = float(source.choice([0.0, 0.1]))
            momentum = float(source.choice([0.0, 0.5, 0.9]))
            beta1 = float(source.choice([0.4, 0.9]))
            given = Hyperparameters(
                lr=float(source.uniform(0.001, 0.1)),
                weight_decay=chosen,
                maximize=source.random() < 0.3,
                momentum=momentum,
                dampening=0.0 if adam else float(source.choice([0.0, 0.25])),
                nesterov=momentum != 0 and source.random() < 0.5,
                beta1=beta1,
                beta2=0.97,
                eps=1e-6,
                decoupled=source.random() < 0.5,
            )
        made.append(adam_row(given, step) if adam else sgd_row(given, first=source.random() < 0.05))
    return np.array(made)


def tensors(source, elements):
    start = [torch.from_numpy(source.standard_normal(elements).astype(np.float32)) for _ in range(3)]
    return [start[0], start[1], start[2].square()]


def bits(values):
    return [value.numpy().tobytes() for value in values]


class Case:
    """Arguments of one call, and what the twin makes of them."""

    def __init__(self, seed, adam, elements, width, count, ranks, steps, lazy, dtypes=(torch.float32,)):
        source = np.random.default_rng(seed)
        self.adam, self.width, self.base = adam, width, 5
        self.start = tensors(source, elements)[: 3 if adam else 2]
        self.rows = rows_of(source, adam, steps)
        self.gathered = [drawn(source, elements, width, count, dtypes[i % len(dtypes)]) for i in range(ranks)]
        places = -(-elements // width)
        made = torch.from_numpy(source.integers(0, steps, places).astype(np.int32))
        self.touched = self.base + made if lazy else None

    def run(self, module, everywhere=False, **more):
        parameter, *moments = values = [tensor.clone() for tensor in self.start]
        touched = None if self.touched is None else self.touched.clone()
        if everywhere:
            module.catch_up(self.adam, parameter, moments, self.rows, self.base, touched, self.width, **more)
        else:
            module.update(self.adam, parameter, moments, self.gathered, 1 / 3, self.rows, self.base, touched, **more)
        return bits([*values, *([] if touched is None else [touched])])


class Native:
    update = staticmethod(update)
    catch_up = staticmethod(catch_up)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    adam=st.booleans(),
    elements=st.integers(1, 3000),
    width=st.sampled_from([1, 16]),
    share=st.floats(0, 1),
    ranks=st.integers(1, 6),
    steps=st.integers(1, 40),
    lazy=st.booleans(),
    variant=st.sampled_from(VARIANTS),
    threads=st.integers(1, 4),
)
def test_a_step_is_the_twins_to_the_bit(seed, adam, elements, width, share, ranks, steps, lazy, variant, threads):
    dtypes = (torch.float32, torch.float16, torch.bfloat16)
    case = Case(seed, adam, elements, width, round(share * elements / width), ranks, steps, lazy, dtypes)
    assert case.run(Native, variant=variant, threads=threads) == case.run(twin)
    if lazy:
        assert case.run(Native, everywhere=True, variant=variant, threads=threads) == case.run(twin, everywhere=True)


@pytest.mark.parametrize("adam", [False, True])
@pytest.mark.parametrize("width", [1, 16])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("ranks", [1, 2, 4, 5])
def test_instruction_sets_and_threads_change_no_bit(adam, width, lazy, ranks):
    """Of tensors that are cut into parts."""
    case = Case(1, adam, 400_003, width, 100_000 // width, ranks, 3, lazy)
    expected = case.run(twin)
    for variant in VARIANTS:
        for threads in (1, 2, 3):
            assert case.run(Native, variant=variant, threads=threads) == expected, f"{variant}, {threads} threads"


@pytest.mark.parametrize("adam", [False, True])
def test_several_tensors_in_one_call_are_each_the_twins(adam):
    sizes = [(40_001, 1, 9000), (70, 16, 3), (1, 1, 1), (35, 16, 3), (100_003, 16, 4000), (500, 1, 0)]
    dtypes = (torch.float32, torch.bfloat16)
    cases = [
        Case(seed, adam, elements, width, count, 3, 1, False, dtypes)
        for seed, (elements, width, count) in enumerate(sizes)
    ]
    rows = np.concatenate([case.rows for case in cases])
    for variant in VARIANTS:
        held = [[tensor.clone() for tensor in case.start] for case in cases]
        tensors = [(one[0], one[1:], case.gathered) for one, case in zip(held, cases, strict=True)]
        update_all(adam, tensors, 1 / 3, rows, threads=2, variant=variant)
        assert [bits(one) for one in held] == [case.run(twin) for case in cases], variant
    bad = SparseGradient(500, 1, np.array([7, 7], np.uint32), torch.ones(2))
    held = [[tensor.clone() for tensor in case.start] for case in cases]
    tensors = [(one[0], one[1:], case.gathered) for one, case in zip(held, cases, strict=True)]
    with pytest.raises(ValueError, match=r"rank 0: .* do not ascend"):
        update_all(adam, [*tensors[:-1], (held[-1][0], held[-1][1:], [bad])], 1.0, rows)
    assert [bits(one) for one in held] == [bits(case.start) for case in cases]


@pytest.mark.parametrize("adam", [False, True])
def test_more_missed_steps_than_any_row_is_apart(adam):
    """So many that momentum ends at its smallest denormal, and lanes of all histories meet."""
    case = Case(2, adam, 700, 1, 300, 2, 1200, lazy=True)
    case.rows[:] = case.rows[0]
    assert case.run(Native) == case.run(twin)
    assert case.run(Native, everywhere=True) == case.run(twin, everywhere=True)


def test_sums_are_in_the_order_of_ranks():
    values = [1e8, 1.0, -1e8, 1.0]
    parameter = torch.zeros(3)
    gathered = [SparseGradient(3, 1, np.array([1], np.uint32), torch.tensor([value])) for value in values]
    rows = np.array([sgd_row(Hyperparameters(lr=1.0, weight_decay=0.0, maximize=True), first=False)])
    update(False, parameter, [], gathered, 1.0, rows)
    assert parameter.tolist() == [0, 1, 0]


def refused(text, **changes):
    case = Case(3, True, 100, 1, 20, 2, 4, lazy=True)
    for name, value in changes.items():
        setattr(case, name, value)
    parameter, *moments = [tensor.clone() for tensor in case.start]
    touched = case.touched.clone()
    with pytest.raises(ValueError, match=text):
        update(case.adam, parameter, moments, case.gathered, 1.0, case.rows, case.base, touched)
    assert bits([parameter, *moments, touched]) == bits([*case.start, case.touched])


def test_what_is_not_valid_changes_nothing():
    good = SparseGradient(100, 1, np.array([1, 2], np.uint32), torch.ones(2))
    tail = torch.zeros(16, dtype=torch.bfloat16)
    tail[4] = 1

    def bad(indices, values, width=1):
        return [good, SparseGradient(100, width, np.array(indices, np.uint32), values)]

    refused("rank 1: .* do not ascend", gathered=bad([2, 2], torch.ones(2)))
    refused("rank 1: .* do not ascend", gathered=bad([2, 1], torch.ones(2)))
    refused("rank 1: .* beyond the end", gathered=bad([2, 100], torch.ones(2)))
    refused("rank 1: .* not finite", gathered=bad([2, 3], torch.tensor([1.0, float("nan")])))
    refused("rank 1: .* not finite", gathered=bad([2], torch.tensor([float("-inf")], dtype=torch.float16)))
    refused("rank 0: .* values beyond the end", gathered=bad([6], tail, width=16)[1:])
    refused("lacks an address", start=[torch.zeros(100)])
    refused("no step", rows=np.empty((0, 9)))
    refused("more steps", base=2**31 - 3)


def test_counters_beyond_the_rows_are_refused():
    case = Case(4, False, 100, 1, 20, 2, 4, lazy=True)
    for value in (4, 10, -1):
        case.touched[7] = value
        with pytest.raises(ValueError, match="counter"):
            case.run(Native, everywhere=True)


def test_an_unknown_variant_is_refused():
    with pytest.raises(ValueError, match="no variant 'sse9'"):
        Case(5, False, 100, 1, 20, 2, 4, lazy=False).run(Native, variant="sse9")


def test_what_lies_beside_is_not_touched():
    """One place of a block at the end, in the middle of a larger buffer."""
    held = torch.full((64,), 7.0)
    parameter = held[16:37]
    rows = np.array([sgd_row(Hyperparameters(lr=1.0, weight_decay=0.0, maximize=False), first=False)])
    values = torch.ones(16)
    values[5:] = 0
    update(False, parameter, [], [SparseGradient(21, 16, np.array([1], np.uint32), values)], 1.0, rows)
    assert held.tolist() == [7.0] * 32 + [6.0] * 5 + [7.0] * 27
