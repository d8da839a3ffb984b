"""Transformer-XL against a twin that was written independently, from the paper's equations."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lastgood.errors import MismatchError
from lastgood.workloads.transformer_xl import Memory, RelativeAttention, TransformerXL, sinusoid
from tests.workloads.transformer_xl_twin import twin_attention, twin_sinusoid


def random_attention(hidden: int, heads: int) -> RelativeAttention:
    attention = RelativeAttention(hidden, heads).double()
    with torch.no_grad():
        attention.content_bias.normal_()
        attention.position_bias.normal_()
    return attention


def twin(attention: RelativeAttention, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    return twin_attention(
        x,
        memory,
        attention.query.weight,
        attention.key.weight,
        attention.value.weight,
        attention.position.weight,
        attention.output.weight,
        attention.content_bias,
        attention.position_bias,
        attention.heads,
    )


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 2),
    length=st.integers(1, 5),
    reach=st.integers(0, 6),
    heads=st.integers(1, 3),
    half_width=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_attention_equals_its_twin(batch: int, length: int, reach: int, heads: int, half_width: int, seed: int) -> None:
    torch.manual_seed(seed)
    hidden = 2 * half_width * heads
    attention = random_attention(hidden, heads)
    x, memory = torch.randn(batch, length, hidden).double(), torch.randn(batch, reach, hidden).double()
    with torch.no_grad():
        torch.testing.assert_close(attention(x, memory), twin(attention, x, memory), rtol=0, atol=1e-10)


def test_gradients_equal_the_twins() -> None:
    torch.manual_seed(0)
    attention = random_attention(8, 2)
    x, memory = torch.randn(2, 4, 8).double().requires_grad_(), torch.randn(2, 3, 8).double().requires_grad_()
    weights = torch.randn(2, 4, 8).double()
    wanted = [x, *attention.parameters()]
    ours = torch.autograd.grad((attention(x, memory) * weights).sum(), wanted)
    theirs = torch.autograd.grad((twin(attention, x, memory) * weights).sum(), wanted)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-10)


def test_sinusoid_equals_its_twin() -> None:
    distances = torch.arange(50).double()
    expected = torch.stack([twin_sinusoid(distance, 12) for distance in range(50)])
    torch.testing.assert_close(sinusoid(distances, 12), expected, rtol=0, atol=1e-12)


def small_model() -> TransformerXL:
    torch.manual_seed(1)
    return TransformerXL(vocabulary=40, layers=3, hidden=12, heads=3, feedforward=20).double().eval()


def no_memory(batch: int) -> torch.Tensor:
    return torch.zeros(3, batch, 0, 12, dtype=torch.float64)


def test_segments_with_a_memory_of_all_before_equal_one_long_context() -> None:
    model, tokens = small_model(), torch.randint(40, (2, 12))
    whole, _ = model(tokens, no_memory(2))
    memory, parts = no_memory(2), []
    for segment in tokens.split(4, dim=1):
        logits, states = model(segment, memory)
        memory = torch.cat([memory, states], dim=2)
        parts.append(logits)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=0, atol=1e-10)


def test_a_shorter_memory_forgets() -> None:
    model, tokens = small_model(), torch.randint(40, (1, 12))
    whole, _ = model(tokens, no_memory(1))
    _, states = model(tokens[:, :8], no_memory(1))
    short, _ = model(tokens[:, 8:], states[:, :, -2:])
    assert not torch.allclose(short, whole[:, 8:], atol=1e-6)


@pytest.mark.parametrize("changed", range(6))
def test_no_token_sees_a_later_one(changed: int) -> None:
    model, tokens = small_model(), torch.randint(40, (1, 6))
    before, _ = model(tokens, no_memory(1))
    tokens[0, changed] = (tokens[0, changed] + 1) % 40
    after, _ = model(tokens, no_memory(1))
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.allclose(before[:, changed], after[:, changed])


def test_no_gradient_flows_through_the_memory() -> None:
    model, tokens = small_model(), torch.randint(40, (1, 4))
    _, states = model(tokens, no_memory(1))
    assert not states.requires_grad
    given_memory = torch.randn(3, 1, 4, 12, dtype=torch.float64, requires_grad=True)
    logits, _ = model(tokens, given_memory)
    (gradient,) = torch.autograd.grad(logits.sum(), given_memory, allow_unused=True)
    assert gradient is None or not gradient.any()


@settings(max_examples=30, deadline=None)
@given(capacity=st.integers(0, 7), lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_memory_holds_the_newest_states_in_place(capacity: int, lengths: list[int]) -> None:
    memory = Memory(2, 1, capacity, 3, "cpu")
    address, pushed = memory.hidden.data_ptr(), torch.zeros(2, 1, 0, 3)
    for length in lengths:
        states = torch.randn(2, 1, length, 3)
        memory.push(states)
        pushed = torch.cat([pushed, states], dim=2)
        expected = pushed[:, :, max(0, pushed.shape[2] - capacity) :]
        assert torch.equal(memory.read(), expected)
    assert memory.hidden.data_ptr() == address


def test_memory_comes_back_to_the_bit_and_only_into_its_own_shape() -> None:
    memory, other = Memory(2, 2, 5, 4, "cpu"), Memory(2, 2, 5, 4, "cpu")
    memory.push(torch.randn(2, 2, 3, 4))
    other.load_state_dict(memory.state_dict())
    assert torch.equal(other.read(), memory.read())
    assert other.filled == 3
    with pytest.raises(MismatchError, match=r"\(2, 2, 6, 4\)"):
        Memory(2, 2, 6, 4, "cpu").load_state_dict(memory.state_dict())
