"""The decode loop, against a loop without cache, without padding and without a batch."""

from __future__ import annotations

import pytest
import torch

from bases import KINDS, full_base
from builders import ARCHITECTURES, EOS, PAD, padded_batch, randomize
from ppo_lora import Role
from ppo_lora.draws import uniform_draws
from ppo_lora.sampling import DecodeLoop

P, T = 5, 9


def one_by_one(base, role, ids, mask, draws, stops, temperature):
    """Each row by itself, every token from a whole forward; the log-probabilities beside it."""
    rows = []
    for prompt, real, numbers in zip(ids, mask, draws.tolist(), strict=True):
        text, said, logprobs = prompt[real][None], [], []
        for number in numbers:
            with base.role(role), torch.no_grad():
                logits = base.model(text, use_cache=False).logits[0, -1].double() / temperature
            probabilities = logits.softmax(-1)
            token = int((probabilities.cumsum(-1) <= number).sum())
            said.append(token)
            logprobs.append(probabilities[token].log().item())
            text = torch.cat([text, torch.tensor([[token]])], dim=1)
            if token in stops:
                break
        rows.append((said, logprobs))
    return rows


def prompts(rows: int = 6):
    ids, mask = padded_batch(rows, P, T)
    return ids[:, :P], mask[:, :P]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_responses_are_those_of_each_row_by_itself(architecture, kind):
    base = full_base(architecture, kind)
    ids, mask = prompts()
    draws, stops = uniform_draws(6, T, 3), list(range(EOS, 24))
    for role, temperature in ((Role.POLICY, 1.0), (Role.REFERENCE, 0.6)):
        responses, logprobs = base.sample(ids, mask, draws, stops, PAD, role, temperature)
        expected = one_by_one(base, role, ids, mask, draws, stops, temperature)
        assert responses.shape == logprobs.shape == (6, max(len(said) for said, _ in expected))
        for row, given, (said, spoken) in zip(responses.tolist(), logprobs, expected, strict=True):
            assert row == said + [PAD] * (len(row) - len(said))
            torch.testing.assert_close(given[: len(said)], torch.tensor(spoken), rtol=1e-3, atol=1e-4)
            assert not given[len(said) :].any()


def batch_sizes(base, **options) -> tuple[list[int], torch.Tensor]:
    """Rows of each pass, and the responses, where rows end after 1, 2, 3, ... tokens."""
    sizes = []
    hook = base.model.get_input_embeddings().register_forward_pre_hook(
        lambda _, given: sizes.append(given[0].shape[0])
    )
    ids, mask = prompts(8)
    responses, _ = base.sample(ids, mask, uniform_draws(8, T, 3), list(range(EOS, 24)), PAD, **options)
    hook.remove()
    return sizes, responses


def test_finished_rows_leave_the_batch():
    base = full_base()
    sizes, responses = batch_sizes(base)
    lengths = [next((i + 1 for i, t in enumerate(row) if EOS <= t < 24), T) for row in responses.tolist()]
    assert len(set(lengths)) > 2
    assert sizes == [sum(length > step for length in lengths) for step in range(max(lengths))]


def test_other_caches_say_the_same():
    base = full_base()
    sizes, responses = batch_sizes(base, cache_implementation="dynamic")
    assert sizes == batch_sizes(base)[0] and torch.equal(responses, batch_sizes(base)[1])


def test_rows_without_padding_need_no_mask():
    base = full_base()
    masks = []
    base.backbone.register_forward_pre_hook(
        lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True
    )
    ids = torch.randint(4, 40, (3, P), generator=torch.Generator().manual_seed(0))
    draws = uniform_draws(3, T, 1)
    plain, _ = base.sample(ids, torch.ones_like(ids), draws, [EOS], PAD)
    assert set(masks) == {None}
    padded = torch.cat([torch.full((3, 2), PAD), ids], dim=1)
    masked, _ = base.sample(padded, padded != PAD, draws, [EOS], PAD)
    assert torch.equal(plain, masked) and masks[-1] is not None


def test_logits_that_are_not_finite_stop_with_the_role():
    base = full_base()
    randomize(base.trainable_parameters()[Role.POLICY], scale=float("inf"))
    ids, mask = prompts()
    with pytest.raises(FloatingPointError, match="The policy's logits are not finite, so no token can be sampled"):
        base.sample(ids, mask, uniform_draws(6, T, 3), [EOS], PAD)


def test_a_model_without_such_a_cache_is_refused():
    ids, mask = prompts()
    loop = DecodeLoop(torch.nn.Identity(), torch.nn.Identity(), mask, uniform_draws(6, T, 3), 1.0, [EOS], PAD, True)
    with pytest.raises(ValueError, match="Identity does not keep keys and values as transformers' caches do"):
        loop(torch.nn.Identity(), ids)
