"""scripts/benchmark.py: the formulas, the counting, the base, and the command without the peer, on tiny shapes."""

from __future__ import annotations

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from rich.console import Console
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark  # noqa: E402
import benchmark_checks  # noqa: E402
import benchmark_measure  # noqa: E402
import benchmark_operations as operations  # noqa: E402
import benchmark_report  # noqa: E402
import benchmark_summary as summary  # noqa: E402
import benchmark_watch  # noqa: E402
import benchmark_work  # noqa: E402
from benchmark_work import EOS, PAD, Work  # noqa: E402

TINY = {"hidden": 32, "layers": 2, "intermediate": 48, "vocab": 60}
SHAPE = operations.Shape(**TINY, rank=4)
ROWS, PROMPT, RESPONSE = 3, 5, 7
ROLLOUT = operations.Rollout([PROMPT] * ROWS, [RESPONSE] * ROWS)


# Operations


def tiny_llama(adapter: bool = True):
    config = LlamaConfig(
        vocab_size=SHAPE.vocab,
        hidden_size=SHAPE.hidden,
        intermediate_size=SHAPE.intermediate,
        num_hidden_layers=SHAPE.layers,
        num_attention_heads=4,
        num_key_value_heads=4,
        attn_implementation="eager",
    )
    model = LlamaForCausalLM(config)
    if not adapter:
        return model
    options = {**benchmark_work.lora_options(), "r": SHAPE.rank}
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options)).get_base_model()


def counted_operations(model, heads, backward: bool = True) -> int:
    """What torch counts in one pass with `heads` at the response positions."""
    ids = torch.randint(0, SHAPE.vocab, (ROWS, PROMPT + RESPONSE))
    with FlopCounterMode(display=False) as counter, torch.set_grad_enabled(backward):
        states = model.model(ids).last_hidden_state[:, PROMPT - 1 : -1]
        loss = sum(head(states).square().sum() for head in heads)
        if backward:
            loss.backward()
    return counter.get_total_flops()


def causal_half(passes: int) -> int:
    """What torch counts of attention beyond the causal half, in so many forwards' worth."""
    return passes * operations.attention(SHAPE, ROLLOUT.rows)


@pytest.mark.parametrize("value", ["separate", "shared", "full"])
def test_the_update_takes_what_torch_counts(value):
    needed = operations.update(SHAPE, ROLLOUT, value)
    policy, value_head = tiny_llama(), torch.nn.Linear(SHAPE.hidden, 1, bias=False)
    heads = [policy.lm_head, value_head] if value == "shared" else [policy.lm_head]
    assert needed["policy_update"] + causal_half(3) == counted_operations(policy, heads)
    if value == "shared":
        assert needed["value_update"] == 0
    else:
        own = tiny_llama(adapter=value == "separate")
        assert needed["value_update"] + causal_half(3) == counted_operations(own, [value_head])


def test_a_forward_takes_what_torch_counts():
    for adapter in (True, False):
        model = tiny_llama(adapter)
        for head in (True, False):
            needed = operations.forward(SHAPE, ROLLOUT, adapter, head)
            assert needed + causal_half(1) == counted_operations(model, [model.lm_head] if head else [], False)


def test_scoring_is_four_forwards_of_which_two_have_the_output_head():
    head = 2 * SHAPE.hidden * SHAPE.vocab * ROWS * RESPONSE
    adapter = 2 * SHAPE.adapter_weights * ROLLOUT.tokens
    assert operations.scoring(SHAPE, ROLLOUT) == 4 * operations.forward(SHAPE, ROLLOUT) - adapter + 2 * head


def test_sampling_takes_operations_or_bytes_whichever_take_longer():
    shape = operations.Shape(hidden=2, intermediate=3, layers=1, vocab=5, rank=1)
    weights, adapter, head = 4 * 4 + 3 * 6, 4 * 4 + 3 * 5, 10
    rollout = operations.Rollout(prompts=[2, 1], responses=[3, 1])
    slow = operations.Machine(rate=1.0, bandwidth=1e12)
    prompts = 2 * (weights + adapter) * 3 + 2 * 2 * (4 + 1) + 2 * head * 2
    steps = [2 * (weights + adapter + head) + 4 * 2 * seen for seen in (3, 4)]
    assert operations.sampling_seconds(shape, rollout, slow) == prompts + sum(steps)
    narrow = operations.Machine(rate=1e12, bandwidth=1.0, number_bytes=2, weight_bytes=0.5)
    read = 0.5 * weights + 2 * (adapter + head)
    cache = [2 * 2 * seen * 2 for seen in (3, 4)]
    assert operations.sampling_seconds(shape, rollout, narrow) == 3 * read + sum(cache)


# The base and the prompts


def work(tmp_path, name: str = "ragged", **changes) -> Work:
    return Work(name, **{**TINY, "prompts": 4, "prompt_length": 12, "cache": str(tmp_path), **changes})


def sampled(model, rows: int, tokens: int) -> torch.Tensor:
    torch.manual_seed(3)
    ids = torch.randint(benchmark_work.FIRST_WORD, TINY["vocab"], (rows, 8))
    options = {"do_sample": True, "top_k": 0, "max_new_tokens": tokens, "eos_token_id": EOS, "pad_token_id": PAD}
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, 8:]


def test_ragged_responses_are_geometric_with_a_mean_of_a_quarter_of_the_limit(tmp_path):
    responses = sampled(benchmark_work.build_model(work(tmp_path)), rows=768, tokens=64)
    lengths = (responses != PAD).sum(dim=1).float()
    expected = (1 - (1 - 1 / 16) ** 64) * 16
    assert lengths.mean() == pytest.approx(expected, rel=0.12)
    assert (lengths == 1).float().mean() == pytest.approx(1 / 16, abs=0.03)
    assert (lengths <= 16).float().mean() == pytest.approx(1 - (1 - 1 / 16) ** 16, abs=0.06)


def test_fixed_responses_never_stop_and_nothing_samples_padding(tmp_path):
    responses = sampled(benchmark_work.build_model(work(tmp_path, "fixed")), rows=256, tokens=64)
    assert responses.shape == (256, 64)
    assert responses.min() >= benchmark_work.FIRST_WORD


def test_prompts_have_the_lengths_of_their_workload_and_read_back(tmp_path):
    ragged = work(tmp_path, prompts=16, prompt_length=64)
    ids = benchmark_work.prompt_ids(ragged)
    assert sorted(map(len, ids)) == sorted(torch.linspace(8, 64, 16).round().int().tolist())
    assert ids == benchmark_work.prompt_ids(ragged)
    tokenizer = benchmark_work.build_tokenizer(ragged.vocab)
    assert tokenizer(benchmark_work.prompt_texts(ragged))["input_ids"] == ids
    assert {len(each) for each in benchmark_work.prompt_ids(replace(ragged, name="fixed"))} == {64}
    assert PAD not in {token for each in ids for token in each} and EOS not in {token for row in ids for token in row}


# Counting


def test_padding_is_what_goes_through_the_first_layer_without_being_real():
    model = tiny_llama(adapter=False)
    phase = ["scoring"]
    counter = benchmark_measure.TokenCounter(lambda layer_options: phase[0])
    counter.attach(model.model)
    ids = torch.tensor([[PAD, PAD, 5, 6], [7, 8, 9, PAD], [3, 4, 5, 6]])
    model(ids, attention_mask=(ids != PAD).long())
    phase[0] = "updating"
    states = model.model.embed_tokens(ids[2:])
    positions = model.model.rotary_emb(states, torch.arange(4)[None])
    layer = model.model.layers[0]
    given = {"position_embeddings": positions, "attention_mask": None}
    checkpoint(lambda hidden: layer(hidden, **given), states, use_reentrant=False).sum().backward()
    counts = counter.counts()
    assert counts == {"scoring": {"computed": 12, "real": 9}, "updating": {"computed": 4, "real": 4}}
    shares = summary.padding_shares(counts)
    assert shares == {"scoring": 0.25, "updating": 0.0, "all": pytest.approx(3 / 16)}
    counter.reset()
    assert counter.counts() == {}


def test_phases_follow_one_another_without_a_gap():
    times = iter([0.0, 2.0, 5.0, 6.0, 10.0])
    phases = benchmark_measure.Phases(now=lambda: next(times))
    for phase in ("sampling", "scoring", "sampling", None):
        phases.enter(phase)
    assert phases.pop() == {"sampling": 3.0, "scoring": 3.0}


def test_peak_memory_is_what_was_held_at_once_above_the_start():
    memory = benchmark_measure.PeakMemory("cpu")
    for _ in range(3):
        torch.ones(24 * 2**20)  # 96 MiB, given back at once
    assert 90 < memory.read() < 130


def test_rates_are_positive_and_the_better_one_is_taken(tmp_path):
    rates = benchmark_measure.machine_rates(work(tmp_path), at_least=0.01)
    assert rates["rate"] == max(rates["used_shape"], rates["square"]) > 1e6
    assert rates["bandwidth"] > 1e6
    assert benchmark_measure.better({"a": 1.0, "b": 4.0}, {"a": 2.0, "b": 3.0}) == {"a": 2.0, "b": 4.0}


# The peer's phases, on a loop as its train() is one


class Slow(torch.autograd.Function):
    """The identity, which moves a clock in both directions."""

    @staticmethod
    def forward(ctx, given, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        clock[0] += seconds
        return given.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock[0] += ctx.seconds
        return gradient, None, None


class Backbone(torch.nn.Module):
    def __init__(self, clock, seconds):
        super().__init__()
        self.linear, self.clock, self.seconds = torch.nn.Linear(2, 2), clock, seconds

    def forward(self, given):
        output = Slow.apply(self.linear(given), self.clock, self.seconds)
        return type("Output", (), {"last_hidden_state": output})()


def test_the_peer_s_phases_and_the_value_s_part_of_the_joint_backward():
    clock = [0.0]
    watch = benchmark_watch.Watch("cpu", now=lambda: clock[0])
    policy, value = Backbone(clock, 5.0), Backbone(clock, 2.0)
    watch.attach_value(value)
    head = torch.nn.Linear(2, 1)
    queries = torch.tensor([[PAD, 5], [6, 7]])
    answers = torch.tensor([[PAD, 5, 8, EOS], [6, 7, EOS, PAD]])
    batch_generation = watch.generation(lambda model, queries, *rest: (answers, None))
    optimizer_step = watch.step(lambda: pass_time(3.0))
    backward = watch.backward(lambda loss: loss.backward())

    def pass_time(seconds):
        clock[0] += seconds

    def both(given):  # the value's backbone first, as TRL's PolicyAndValueWrapper has it
        values = head(value(given).last_hidden_state)
        return policy(given).last_hidden_state, values

    forward = watch.forward(both)
    watch.on_train_begin(None, None, None)
    for _ in range(2):
        pass_time(1.0)
        with torch.no_grad():
            batch_generation(None, queries)
            forward(torch.ones(1, 2))
        texts, values = forward(torch.ones(1, 2))
        backward(texts.sum() + values.sum())
        optimizer_step()
        watch.on_step_end(None, None, None)
    last = watch.seen[-1]
    assert last["rollout"] == {"prompts": [1, 2], "responses": [2, 1]}
    assert (last["sampling"], last["scoring"], last["updating"]) == (1.0, 7.0, 17.0)
    assert (last["policy_update"], last["value_update"], last["optimizer"]) == (10.0, 4.0, 3.0)
    assert last["seconds"] == 25.0


# From measurements to what is told


def result(seconds: float, updating: float, peak: float) -> dict:
    iteration = {"sampling": 1.0, "scoring": 0.5, "updating": updating}
    rollout = {"prompts": [PROMPT] * ROWS, "responses": [RESPONSE] * ROWS}
    iterations = [{"seconds": each, **iteration, "rollout": rollout} for each in (99.0, seconds)]
    counts = {"updating": {"computed": 8 * ROWS * 14, "real": 8 * ROWS * 12}}
    rates = {"used_shape": 1e6, "square": 2e9, "rate": 2e9, "bandwidth": 1e6}
    return {"iterations": iterations, "padding": counts, "peak_mib": peak, "rates": rates}


def test_a_run_s_numbers_leave_the_warm_up_out(tmp_path):
    given = work(tmp_path, "fixed", epochs=4)
    run = summary.summarize_run("separate", given, result(seconds=4.0, updating=2.0, peak=10.0))
    assert (run.seconds, run.tokens, run.tokens_per_second, run.mean_response) == (4.0, 36, 9.0, 7.0)
    assert run.phases == {"sampling": 1.0, "scoring": 0.5, "updating": 2.0, "other": 0.5}
    needed = 4 * sum(operations.update(replace(SHAPE, rank=16), ROLLOUT, "separate").values())
    assert run.update_rate == pytest.approx(needed / 2.0 / 2e9)
    assert run.padding == {"updating": pytest.approx(1 / 7), "all": pytest.approx(1 / 7)}
    assert run.floors["policy_update"] + run.floors["value_update"] == pytest.approx(needed / 2e9)


def test_operations_count_only_the_tokens_that_went_through(tmp_path):
    given = work(tmp_path, "fixed", epochs=4)
    whole = result(seconds=4.0, updating=2.0, peak=10.0)
    half = {**whole, "padding": {"updating": {"computed": 1000, "real": 4 * ROWS * 12}}}
    rates = [summary.update_rate(given, each, "separate") for each in (whole, half)]
    assert rates[1] == pytest.approx(rates[0] / 2)


def test_ratios_are_the_peer_s_time_over_ours_and_our_memory_over_the_peer_s(tmp_path):
    given = work(tmp_path, "fixed")
    runs = [summary.summarize_run("separate", given, result(each, 2.0, peak=8.0)) for each in (4.0, 2.0, 6.0)]
    peer = summary.summarize_run("trl", given, result(10.0, 5.0, peak=40.0))
    rows = {row["what"]: row for row in summary.ratios([peer, summary.combine(runs)])}
    assert rows["iteration, TRL time / ours"]["measured"] == 2.5
    assert rows["iteration, TRL time / ours"]["reached"] is True
    assert rows["peak memory, ours / TRL"]["measured"] == 0.2
    assert rows["peak memory, ours / TRL"]["reached"] is True
    assert rows["update's share of the product's rate"]["reached"] is False
    alone = summary.ratios([summary.combine(runs)])
    assert [row["what"] for row in alone] == ["update's share of the product's rate"]


def test_tables_have_the_numbers_and_leave_out_what_nobody_has(tmp_path):
    given = work(tmp_path, "fixed")
    runs = [summary.summarize_run(name, given, result(4.0, 2.0, 8.0)) for name in ("trl", "shared")]
    heading, rows = benchmark_report.measure_rows(runs)
    assert heading == ["fixed", "TRL 1.12", "ours, shared"]
    told = {row[0]: row[1:] for row in rows}
    assert told["iteration, s"][0] == "4.00" and told["iteration, s"][1].startswith("4.00 (")
    assert told["sampling, s"][0] == "1.00" and told["sampling, s"][1].startswith("1.00 (")
    assert "policy update, s" not in told
    text = benchmark_report.markdown(runs, summary.ratios(runs), ["a fact"])
    assert "- a fact" in text and "| iteration, s | 4.00 | 4.00 (" in text


# The extra rows


def test_checks_are_judged_by_their_limits():
    rows = benchmark_checks.rows(
        roles={"reference": 0.02, "value": 0.051, "reward": 0.02, benchmark_checks.SWITCH: 40.0},
        vocabulary=(1000.0, 1120.0, 100.0),
        seconds_a_token=(0.010, 0.0114),
    )
    told = {row["what"]: (row["measured"], row["reached"]) for row in rows}
    assert told["memory of the value role / the base's"] == (0.051, False)
    assert told["memory of the reward role / the base's"] == (0.02, True)
    vocabulary = next(row for row in rows if "vocabulary" in row["what"])
    assert (vocabulary["measured"], vocabulary["reached"]) == (20.0, True)
    seconds = next(row for row in rows if "seconds a real token" in row["what"])
    assert seconds["measured"] == pytest.approx(1.14) and seconds["reached"] is True


def test_a_role_costs_its_adapter_and_head(tmp_path):
    given = work(tmp_path, "fixed", layers=1)
    benchmark_work.make_base(given)
    shares = benchmark_checks.role_shares(given)
    shape = replace(SHAPE, layers=1, rank=16)
    base = 2 * shape.head_weights + shape.weights + 3 * shape.hidden
    assert shares["reference"] == pytest.approx(shape.adapter_weights / base)
    assert shares["reward"] == pytest.approx((shape.adapter_weights + shape.hidden) / base)
    assert shares["value"] == pytest.approx(shape.adapter_weights / base)
    assert 0 < shares[benchmark_checks.SWITCH] < 1e6


# The command


def test_the_command_measures_and_writes_without_the_peer(tmp_path, monkeypatch):
    console = Console(file=io.StringIO(), width=120)
    monkeypatch.setattr(benchmark, "Console", lambda: console)
    sizes = [f"--{name}={size}" for name, size in {**TINY, "prompts": 4, "prompt-length": 12, "micro-rows": 2}.items()]
    page = tmp_path / "page.md"
    page.write_text(f"before\n{benchmark.BEGIN}\nold\n{benchmark.END}\nafter\n")
    folders = [
        f"--{name}={tmp_path / path}" for name, path in {"cache": "cache", "output": "out", "docs": page}.items()
    ]
    runs = ["--no-peer", "--workload=ragged", "--value=separate", "--repeats=1", "--iterations=2", "--threads=1"]
    assert benchmark.main([*sizes, *folders, *runs, "--response-length=8"]) == 0
    record = json.loads((tmp_path / "out" / "benchmark.json").read_text())
    (told,) = record["summaries"]
    assert told["seconds"] >= told["phases"]["updating"] > 0
    assert told["phases"].keys() >= {"sampling", "scoring", "updating"}
    assert told["tokens"] == record["processes"][0]["padding"]["updating"]["real"] / 8
    assert 1 <= told["mean_response"] <= 8
    assert 0 <= told["padding"]["scoring"] < 1 and 0 < told["update_rate"] < 1
    assert (tmp_path / "out" / "benchmark.png").stat().st_size > 10_000
    text = (tmp_path / "out" / "benchmark.md").read_text()
    assert page.read_text().startswith("before\n") and page.read_text().endswith(f"{benchmark.END}\nafter\n")
    assert text in page.read_text() and "old" not in page.read_text() and (tmp_path / "page.png").is_file()
    assert "| ragged | ours, separate |" in text and "wanted" in console.file.getvalue().lower()


def test_a_peer_that_cannot_be_installed_is_told_in_one_line(tmp_path, monkeypatch):
    def refuse(cache):
        raise OSError("no matching distribution")

    monkeypatch.setattr(benchmark, "install_peer", refuse)
    console = Console(file=io.StringIO(), width=200)
    made = benchmark.Benchmark(console, benchmark.parse_arguments(["--cache", str(tmp_path)]))
    assert made.contenders() == ["separate", "shared"]
    assert console.file.getvalue().count("\n") == 1 and "no matching distribution" in console.file.getvalue()


def test_an_installed_peer_is_not_installed_again(tmp_path):
    folder = tmp_path / "trl-1.12.0"
    (folder / "trl-1.12.0.dist-info").mkdir(parents=True)
    assert benchmark.install_peer(tmp_path) == folder


def test_rows_that_do_not_divide_are_refused(tmp_path):
    options = benchmark.parse_arguments(["--prompts", "6", "--cache", str(tmp_path)])
    with pytest.raises(SystemExit, match="not a multiple"):
        benchmark.works(options)


def test_a_page_without_markers_is_refused(tmp_path):
    page = tmp_path / "page.md"
    page.write_text("nothing here")
    with pytest.raises(SystemExit, match="lacks the lines"):
        benchmark.write_page(page, "tables")
    assert page.read_text() == "nothing here"


def test_the_page_of_the_docs_has_its_markers():
    page = (SCRIPTS.parent / "docs" / "benchmarks.md").read_text()
    assert page.count(benchmark.BEGIN) == page.count(benchmark.END) == 1


def test_a_failing_process_ends_with_its_log(tmp_path, monkeypatch):
    (tmp_path / "benchmark_ours.py").write_text("raise SystemExit('no such base')")
    monkeypatch.setattr(benchmark, "SCRIPTS", tmp_path)
    variables = benchmark.environment(benchmark.parse_arguments(["--threads", "1"]))
    with pytest.raises(RuntimeError, match="benchmark_ours.py ended with 1: no such base"):
        benchmark.run("separate", work(tmp_path), tmp_path / "out", variables)


def test_a_measured_process_has_its_threads_and_the_peer_s_folder_first(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "here")
    variables = benchmark.environment(benchmark.parse_arguments(["--threads", "3"]), tmp_path)
    assert variables["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), "here"]
    assert (variables["OMP_NUM_THREADS"], variables["CUDA_VISIBLE_DEVICES"]) == ("3", "")
