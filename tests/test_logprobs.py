"""Token log-probabilities and entropies against the whole log-softmax, and what they cost in memory."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import oracles
from batches import assert_close
from ppo_lora import token_logprobs

ROWS, HIDDEN, VOCABULARY = 11, 6, 17


def _plain(weight, bias, hidden):
    return hidden @ weight.T


def _biased(weight, bias, hidden):
    return hidden @ weight.T + bias


def _softcapped(weight, bias, hidden):
    return 3.0 * torch.tanh(hidden @ weight.T / 3.0)


HEADS = {"plain": _plain, "bias": _biased, "softcap": _softcapped}


class Problem:
    """Random hidden states, an output head and tokens."""

    def __init__(self, head="plain", rows=ROWS, dtype=torch.float32, seed=0):
        generator = torch.Generator().manual_seed(seed)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.hidden = draw(rows, HIDDEN).to(dtype).requires_grad_()
        weight, bias = draw(VOCABULARY, HIDDEN).to(dtype), draw(VOCABULARY).to(dtype)
        self.head = partial(HEADS[head], weight, bias)
        self.tokens = torch.randint(0, VOCABULARY, (rows,), generator=generator)
        self.cotangents = draw(rows).to(dtype), draw(rows).to(dtype)

    def chunked(self, temperature=1.0, **options):
        return token_logprobs(self.hidden, self.head, self.tokens, temperature, vocab_size=VOCABULARY, **options)

    def whole(self, temperature=1.0):
        """The same through autograd and the full table."""
        table = torch.log_softmax(self.head(self.hidden) / temperature, dim=-1)
        return table.gather(1, self.tokens[:, None])[:, 0], -(table.exp() * table).sum(dim=1)

    def gradient(self, logprobs, entropy=None):
        total = (logprobs * self.cotangents[0]).sum()
        if entropy is not None:
            total = total + (entropy * self.cotangents[1]).sum()
        return torch.autograd.grad(total, self.hidden)[0]


@pytest.fixture(params=HEADS)
def head(request):
    return request.param


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_three_logits_by_hand(temperature):
    logits = torch.tensor([[math.log(1.0), math.log(2.0), math.log(5.0)]]) * temperature
    logprobs, entropy = token_logprobs(logits, torch.nn.Identity(), torch.tensor([1]), temperature, vocab_size=3)
    assert_close(logprobs, [math.log(0.25)])
    assert_close(entropy, [-(0.125 * math.log(0.125) + 0.25 * math.log(0.25) + 0.625 * math.log(0.625))])


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_numbers_equal_the_oracles(head, temperature):
    problem = Problem(head)
    logprobs, entropy = problem.chunked(temperature)
    logits = problem.head(problem.hidden).tolist()
    rows = list(zip(logits, problem.tokens.tolist(), strict=True))
    assert_close(logprobs, [oracles.token_logprob(row, token, temperature) for row, token in rows])
    assert_close(entropy, [oracles.entropy(row, temperature) for row in logits])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_gradients_equal_autograd_through_the_whole_table(head, temperature, dtype):
    problem = Problem(head, dtype=dtype)
    expected_logprobs, expected_entropy = problem.whole(temperature)
    logprobs, entropy = problem.chunked(temperature, entropy_gradient=True)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert_close(logprobs, expected_logprobs)
    assert_close(entropy, expected_entropy)
    gradient = problem.gradient(logprobs, entropy)
    assert gradient.dtype == dtype
    assert_close(gradient, problem.gradient(*problem.whole(temperature)), 2e-5)


@pytest.mark.parametrize("temperature", [0.3, 1.7])
def test_each_output_has_its_own_gradient(head, temperature):
    problem = Problem(head)
    for chosen in (0, 1):
        gradients = []
        for outputs in (problem.chunked(temperature, entropy_gradient=True), problem.whole(temperature)):
            gradients.append(torch.autograd.grad((outputs[chosen] * problem.cotangents[0]).sum(), problem.hidden)[0])
        assert_close(gradients[0], gradients[1], 2e-5)


def test_the_gradient_is_the_slope_of_finite_differences():
    problem, step = Problem("softcap", rows=4, dtype=torch.float64), 1e-2
    gradient = problem.gradient(*problem.chunked(0.8, entropy_gradient=True))

    def total(hidden):
        logits = problem.head(hidden).tolist()
        rows = zip(logits, problem.tokens.tolist(), *(c.tolist() for c in problem.cotangents), strict=True)
        return sum(a * oracles.token_logprob(x, t, 0.8) + b * oracles.entropy(x, 0.8) for x, t, a, b in rows)

    for index in ((0, 0), (1, 3), (3, 5)):
        nudge = torch.zeros_like(problem.hidden)
        nudge[index] = step
        slope = (total(problem.hidden + nudge) - total(problem.hidden - nudge)) / (2 * step)
        assert gradient[index].item() == pytest.approx(slope, rel=2e-3, abs=1e-4)


@pytest.mark.parametrize("chunk_rows", [1, 2, 3, 5, 6, 100])
def test_the_chunk_size_never_matters(head, chunk_rows):
    reference, problem = Problem(head), Problem(head)
    whole = reference.chunked(0.7, entropy_gradient=True, chunk_elements=VOCABULARY)
    pieces = problem.chunked(0.7, entropy_gradient=True, chunk_elements=VOCABULARY * chunk_rows)
    for expected, actual in zip(whole, pieces, strict=True):
        assert_close(actual, expected, 1e-6)
    assert_close(problem.gradient(*pieces), reference.gradient(*whole), 1e-6)


def test_a_chunk_smaller_than_a_row_is_one_row():
    problem = Problem()
    assert_close(problem.chunked(chunk_elements=1)[0], problem.whole()[0])


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_few_rows(rows, graph):
    problem = Problem(rows=rows)
    with torch.set_grad_enabled(graph):
        logprobs, entropy = problem.chunked(0.7, entropy_gradient=True)
    assert logprobs.shape == entropy.shape == (rows,)
    assert logprobs.dtype == entropy.dtype == torch.float32
    expected = problem.whole(0.7)
    assert_close(logprobs, expected[0])
    assert_close(entropy, expected[1])
    assert logprobs.requires_grad is graph
    if graph:
        assert_close(problem.gradient(logprobs, entropy), problem.gradient(*expected), 2e-5)


@pytest.mark.parametrize("entropy_gradient", [False, True])
def test_both_paths_give_the_same_numbers(head, entropy_gradient):
    problem = Problem(head)
    with_graph = problem.chunked(0.7, entropy_gradient=entropy_gradient)
    with torch.no_grad():
        without = problem.chunked(0.7, entropy_gradient=entropy_gradient)
    for expected, actual in zip(with_graph, without, strict=True):
        assert torch.equal(expected, actual)
        assert not actual.requires_grad


def test_states_without_gradient_need_no_graph():
    problem = Problem()
    problem.hidden = problem.hidden.detach()
    assert not any(output.requires_grad for output in problem.chunked())


def test_entropy_has_a_gradient_only_when_asked():
    problem = Problem()
    logprobs, entropy = problem.chunked()
    assert logprobs.requires_grad and not entropy.requires_grad
    assert_close(problem.gradient(logprobs), problem.gradient(problem.whole()[0]), 2e-5)


def test_bfloat16_states_get_bfloat16_gradients():
    problem = Problem(dtype=torch.bfloat16)
    logprobs, _ = problem.chunked(0.7)
    assert logprobs.dtype == torch.float32
    gradient = problem.gradient(logprobs)
    assert gradient.dtype == torch.bfloat16
    assert_close(gradient, problem.gradient(problem.whole(0.7)[0]), 0.1)


@pytest.mark.parametrize("graph", [True, False])
def test_mixed_precision_rounds_logits_and_nothing_after_them(graph):
    problem = Problem()
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.set_grad_enabled(graph):
        table = torch.log_softmax(problem.head(problem.hidden).float(), dim=-1)
        logprobs, entropy = problem.chunked()
    assert entropy.dtype == torch.float32
    assert_close(entropy, -(table.exp() * table).sum(dim=1), 1e-5)
    assert_close(logprobs, table.gather(1, problem.tokens[:, None])[:, 0], 1e-5)


def test_the_head_gets_no_gradient():
    problem, weight = Problem(), torch.randn(VOCABULARY, HIDDEN).requires_grad_()
    problem.head = partial(_plain, weight, None)
    problem.chunked()[0].sum().backward()
    assert weight.grad is None and problem.hidden.grad is not None


def test_huge_logits_stay_finite():
    problem = Problem()
    problem.head = lambda hidden: torch.cat([hidden[:, :1] * 0 + 1e4, hidden[:, :1] * 0 - 1e4], dim=1)
    problem.tokens = torch.arange(ROWS) % 2
    outputs = problem.chunked(entropy_gradient=True)
    assert_close(outputs[0], [-2e4 * (i % 2) for i in range(ROWS)])
    assert_close(outputs[1], [0.0] * ROWS)
    assert problem.gradient(*outputs).isfinite().all()


def test_a_forbidden_token_leaves_gradients_finite():
    problem = Problem()
    forbidden = torch.zeros(VOCABULARY)
    forbidden[3] = -math.inf
    problem.tokens[problem.tokens == 3] = 4
    allowed = torch.arange(VOCABULARY) != 3
    head = problem.head
    problem.head = lambda hidden: head(hidden) + forbidden
    outputs = problem.chunked(0.7, entropy_gradient=True)
    gradient = problem.gradient(*outputs)
    problem.head = lambda hidden: head(hidden)[:, allowed]
    problem.tokens -= (problem.tokens > 3).long()
    expected = problem.whole(0.7)
    assert_close(outputs[0], expected[0])
    assert_close(outputs[1], expected[1])
    assert_close(gradient, problem.gradient(*expected), 2e-5)


class LargestTensor(TorchDispatchMode):
    """Records how many elements the largest tensor had that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.elements = max([self.elements, *sizes])
        return result


@pytest.mark.parametrize("rows", [7, 8, 64])
@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize("graph", [True, False])
def test_no_tensor_of_all_logits_is_ever_made(rows, entropy_gradient, graph):
    problem = Problem(rows=rows)
    with LargestTensor() as largest, torch.set_grad_enabled(graph):
        logprobs, entropy = problem.chunked(0.7, entropy_gradient=entropy_gradient)
        if graph:
            problem.gradient(logprobs, entropy if entropy_gradient else None)
    assert 0 < largest.elements < rows * VOCABULARY


def test_chunks_hold_no_more_than_asked():
    problem = Problem(rows=64)
    with LargestTensor() as largest:
        problem.gradient(*problem.chunked(0.7, entropy_gradient=True, chunk_elements=4 * VOCABULARY + 1))
    assert largest.elements <= max(4 * VOCABULARY + 1, 64 * HIDDEN)


def test_the_recorder_sees_the_whole_table():
    problem = Problem()
    with LargestTensor() as largest:
        problem.gradient(*problem.whole())
    assert largest.elements >= ROWS * VOCABULARY
