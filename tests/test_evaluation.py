"""Policies sampled and scored side by side, against plain models, and what is refused first."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from datasets import Dataset
from peft import PeftModel
from transformers import AutoModelForCausalLM

from bases import model_folder, plain_model, policy_adapter, reward_adapter
from builders import CHAT_TEMPLATE, EOS, prompts, randomize, tiny_tokenizer
from ppo_lora import (
    EvaluationConfig,
    choose_reference,
    evaluate_policies,
    load_policies,
    parse_policies,
    provenance,
    read_adapter,
)
from ppo_lora.draws import uniform_draws

K, T, TEMPERATURE = 3, 6, 0.9
DRAWS = 4
"""The stream of an evaluation's random numbers."""


def config(**changes) -> EvaluationConfig:
    settings = {
        "num_samples": K,
        "max_completion_length": T,
        "temperature": TEMPERATURE,
        "seed": 5,
        "local_rollout_forward_batch_size": 4,
        "bf16": False,
    }
    return EvaluationConfig(**{**settings, **changes})


def count_w5(completions, **kwargs):
    return [float(text.split().count("w5")) for text in completions]


@pytest.fixture(scope="module")
def base():
    policies = {"sft": policy_adapter(seed=1), "ppo": policy_adapter(seed=3), "twin": policy_adapter(seed=1)}
    return load_policies(model_folder("llama"), policies, config(), reward=reward_adapter())


def evaluated(base, policies=("base", "sft", "ppo"), rows=5, reference="sft", dataset=None, functions=(), **changes):
    tokenizer = tiny_tokenizer()
    dataset = dataset or prompts(rows)
    return evaluate_policies(base, policies, dataset, functions, config(**changes), reference, tokenizer)


@pytest.fixture(scope="module")
def evaluation(base):
    return evaluated(base, functions=[count_w5])


def same(one, other) -> bool:
    """Whether two policies' samples have the same texts and exactly the same numbers."""
    tables = [(one.kl, other.kl), (one.stopped, other.stopped)]
    tables += [(one.scores[name], other.scores[name]) for name in one.scores]
    return one.completion_ids == other.completion_ids and all(torch.equal(a, b) for a, b in tables)


@torch.no_grad()
def plain_sample(model, prompt: list[int], numbers: list[float]) -> list[int]:
    """One response, token by token, through whole forward passes of a plain model."""
    ids = list(prompt)
    for number in numbers:
        logits = model(torch.tensor([ids])).logits[0, -1].double() / TEMPERATURE
        shares = accumulate(logits.softmax(0).tolist())
        ids.append(next(token for token, total in enumerate(shares) if total > number))
        if ids[-1] == EOS:
            break
    return ids[len(prompt) :]


@torch.no_grad()
def plain_logprob(model, prompt: list[int], response: list[int]) -> float:
    logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double() / TEMPERATURE
    return logits.log_softmax(-1)[range(len(response)), response].sum().item()


def plain(policy: str):
    if policy == "base":
        return plain_model()
    return PeftModel.from_pretrained(plain_model(), policy_adapter(seed={"sft": 1, "ppo": 3}[policy])).eval()


@pytest.mark.parametrize("policy", ["base", "ppo"])
def test_a_policy_says_and_is_what_plain_models_say(evaluation, policy):
    own, reference, samples = plain(policy), plain("sft"), evaluation.policies[policy]
    for row, text in enumerate(evaluation.prompts):
        prompt = tiny_tokenizer()(text)["input_ids"]
        numbers = uniform_draws(K, T, 5, DRAWS, row).tolist()
        for k in range(K):
            response = plain_sample(own, prompt, numbers[k])
            assert samples.completion_ids[row][k] == response
            kl = plain_logprob(own, prompt, response) - plain_logprob(reference, prompt, response)
            assert samples.kl[row, k].item() == pytest.approx(kl, abs=1e-4)
            assert samples.stopped[row, k] == (response[-1] == EOS)
    assert torch.equal(samples.lengths, torch.tensor([[len(ids) for ids in row] for row in samples.completion_ids]))


def test_a_policys_divergence_from_itself_is_exactly_zero(base, evaluation):
    assert torch.equal(evaluation.policies["sft"].kl, torch.zeros(5, K))
    assert torch.equal(evaluated(base, ["twin"]).policies["twin"].kl, torch.zeros(5, K))
    assert (evaluation.policies["ppo"].kl != 0).all()


def test_every_scorer_scores_every_response(base, evaluation):
    for samples in evaluation.policies.values():
        assert list(samples.scores) == ["reward_adapter", "count_w5"]
        counted = [[float(text.split().count("w5")) for text in row] for row in samples.completions]
        assert samples.scores["count_w5"].tolist() == counted
        ids = tiny_tokenizer()(evaluation.prompts[1])["input_ids"] + samples.completion_ids[1][0]
        with torch.no_grad():
            score = base.scores(torch.tensor([ids]), torch.ones(1, len(ids)))
        torch.testing.assert_close(samples.scores["reward_adapter"][1, 0], score[0], rtol=0, atol=1e-5)


def test_the_seed_is_all_that_decides(base, evaluation):
    before = torch.random.get_rng_state()
    again = evaluated(base, functions=[count_w5])
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(same(again.policies[name], samples) for name, samples in evaluation.policies.items())
    other = evaluated(base, seed=6)
    assert other.policies["ppo"].completion_ids != evaluation.policies["ppo"].completion_ids


@pytest.mark.parametrize("size", [1, 64])
def test_the_batch_size_changes_rounding_only(base, evaluation, size):
    other = evaluated(base, local_rollout_forward_batch_size=size)
    for name, samples in other.policies.items():
        given = evaluation.policies[name]
        assert samples.completion_ids == given.completion_ids
        torch.testing.assert_close(samples.kl, given.kl, rtol=0, atol=1e-4)
        torch.testing.assert_close(samples.scores["reward_adapter"], given.scores["reward_adapter"], rtol=0, atol=1e-4)


def test_neither_the_order_of_policies_nor_other_policies_matter(base, evaluation):
    other = evaluated(base, ["ppo", "base"], functions=[count_w5])
    assert list(other.policies) == ["ppo", "base"]
    assert all(same(other.policies[name], evaluation.policies[name]) for name in other.policies)


def test_more_prompts_leave_the_first_as_they_were(base, evaluation):
    fewer = evaluated(base, ["ppo"], rows=3)
    assert fewer.policies["ppo"].completion_ids == evaluation.policies["ppo"].completion_ids[:3]
    assert fewer.prompts == evaluation.prompts[:3]


def test_chat_prompts_and_columns_reach_the_functions(base):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    chats = [[{"role": "user", "content": "w7"}], [{"role": "user", "content": "w8"}]]
    seen = []

    def judge(prompts, completions, answer, **kwargs):
        seen.extend(zip(prompts, completions, answer, strict=True))
        return [None if number == 1 else float(number) for number in answer]

    def second(completions, **kwargs):
        return [0.0] * len(completions)

    dataset = Dataset.from_dict({"prompt": chats, "answer": [1, 2]})
    found = evaluate_policies(base, ["ppo"], dataset, [judge, second], config(), "base", tokenizer)
    samples = found.policies["ppo"]
    assert found.prompts == chats and [answer for _, _, answer in seen] == [1] * K + [2] * K
    assert samples.scores["judge"][0].isnan().all() and samples.scores["judge"][1].tolist() == [2.0] * K
    assert samples.completions[0][0] == seen[0][1] and seen[0][1][0]["role"] == "assistant"


def test_progress_counts_responses(base):
    counted = []
    evaluate_policies(
        base,
        ["ppo"],
        prompts(3),
        [],
        config(),
        tokenizer=tiny_tokenizer(),
        progress=lambda *step: counted.append(step),
    )
    assert counted == [("ppo", 4), ("ppo", 4), ("ppo", 1)]


def test_broken_weights_are_named():
    base = load_policies(model_folder("llama"), {"ppo": policy_adapter(seed=1)}, config(), reward=reward_adapter())
    randomize(base.adapters.parameters("ppo"), scale=torch.nan)
    with pytest.raises(FloatingPointError, match="The ppo's logits are not finite, so no token can be sampled"):
        evaluated(base, ["ppo"], reference="base", rows=1, functions=[count_w5])


def test_what_cannot_be_compared_is_refused(base):
    with pytest.raises(ValueError, match="max_completion_length=5000"):
        evaluated(base, max_completion_length=5000)
    with pytest.raises(ValueError, match="expected 'prompt'"):
        evaluated(base, dataset=Dataset.from_dict({"question": ["w3"]}))
    plain_base = load_policies(model_folder("llama"), {}, config())
    with pytest.raises(ValueError, match="no reward source"):
        evaluated(plain_base, ["base"])


# Loading


def test_a_name_on_the_base_is_taken(base):
    for name in ("sft", "base", "value"):
        with pytest.raises(ValueError, match=f"cannot be called '{name}'"):
            base.add_policy(name)


def test_each_adapter_is_on_the_base_once(base):
    ranks = {}
    for name, parameter in base.model.named_parameters():
        if "lora_A" in name:
            ranks.setdefault(name.split(".")[-2], set()).add(parameter.shape[0])
    assert ranks == {"policy": {1}, "sft": {4}, "ppo": {4}, "twin": {4}, "reward": {4}}


def test_adapters_are_read_before_the_base(monkeypatch, tmp_path):
    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("the base was loaded"))
    with pytest.raises(ValueError, match="No adapter_config.json"):
        load_policies(model_folder("llama"), {"ppo": str(tmp_path)}, config())


def test_provenance_names_what_was_compared(base):
    found = provenance(base)
    assert set(found["adapters"]) == {"base", "sft", "ppo", "twin", "reward"}
    assert found["adapters"]["base"] is None
    folder = policy_adapter(seed=3)
    assert found["adapters"]["ppo"] == {
        "source": folder,
        "revision": None,
        "sha256": read_adapter(folder).sha256(),
    }
    assert found["base"]["name"] == model_folder("llama") and found["versions"]["torch"] == torch.__version__


def test_loaded_policies_are_those_of_their_folders():
    base = load_policies(model_folder("llama"), {"ppo": policy_adapter(seed=3)}, config(), reward=reward_adapter())
    randomize(base.adapters.parameters("policy"), 1)  # SharedBase's own policy role is nobody's
    assert same(evaluated(base, ["ppo"], reference="base").policies["ppo"], _with_plain_reference())


def _with_plain_reference():
    base = load_policies(model_folder("llama"), {"ppo": policy_adapter(seed=3)}, config(), reward=reward_adapter())
    return evaluated(base, ["ppo"], reference="base").policies["ppo"]


# What is given


def test_policies_of_a_command_line():
    given = ["base", "sft=runs/sft", "b-2=owner/name@v1:value"]
    assert parse_policies(given) == {"base": None, "sft": "runs/sft", "b-2": "owner/name@v1:value"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no policies"),
        (["sft"], "'sft'; expected 'base'"),
        (["base=runs/sft"], "'base=runs/sft'; expected"),
        (["sft="], "'sft='; expected"),
        (["=runs/sft"], "cannot be called ''"),
        (["a b=runs/sft"], "cannot be called 'a b'"),
        (["reward=runs/sft"], "cannot be called 'reward'"),
        (["pop=runs/sft"], "cannot be called 'pop'"),
        (["sft=one", "sft=two"], "'sft' twice"),
        (["base", "base"], "'base' twice"),
    ],
)
def test_policies_that_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        parse_policies(given)


def test_the_reference():
    assert choose_reference({"base": None, "sft": "x"}) == "sft"
    assert choose_reference({"ppo": "x"}) == "base"
    assert choose_reference({"sft": "x", "ppo": "x"}, "ppo") == "ppo"
    assert choose_reference({"sft": "x"}, "base") == "base"
    with pytest.raises(ValueError, match=r"reference is 'dpo'; expected one of \['base', 'sft'\]"):
        choose_reference({"sft": "x"}, "dpo")


def test_best_of_is_powers_of_two_unless_it_is_given():
    assert [EvaluationConfig(num_samples=n).best_of for n in (1, 4, 6)] == [[1], [1, 2, 4], [1, 2, 4]]
    assert EvaluationConfig(best_of=[3, 1, 3]).best_of == [1, 3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_samples": 2, "best_of": [1, 4]}, "best_of has 4; expected numbers from 1 to num_samples=2"),
        ({"best_of": [0]}, "best_of has 0"),
        ({"num_samples": 0}, "num_samples is 0"),
        ({"temperature": 0.0}, "temperature is 0.0"),
        ({"max_completion_length": 1.5}, "max_completion_length is 1.5"),
        ({"seed": -1}, "seed is -1"),
        ({"overlong_prompts": "keep"}, "overlong_prompts is 'keep'"),
    ],
)
def test_settings_that_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config(**changes)
