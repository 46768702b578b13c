"""scripts/benchmark_gpu.py: the bases, the budget, the table, and its cases on tiny shapes on the CPU."""

from __future__ import annotations

import io
import itertools
import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, LlamaForCausalLM

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
sys.path.insert(0, str(SCRIPTS))

import benchmark_gpu  # noqa: E402
import benchmark_gpu_base as bases  # noqa: E402
import benchmark_gpu_cases as cases  # noqa: E402
import benchmark_gpu_inference as inference  # noqa: E402
import benchmark_gpu_report as report  # noqa: E402
import benchmark_operations as operations  # noqa: E402
from benchmark_work import EOS, PAD  # noqa: E402
from ppo_lora import read_adapter  # noqa: E402

BY_NAME = {case.name: case for case in benchmark_gpu.CASES}


def options(tmp_path, *more: str):
    folders = ["--cache", str(tmp_path / "cache"), "--output", str(tmp_path / "out")]
    return benchmark_gpu.parse_arguments(["--device", "cpu", "--tiny", "--threads", "1", *folders, *more])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """A folder in which the tiny bases lie."""
    return tmp_path_factory.mktemp("gpu")


def work(cache, case: str = "peak", **changes):
    made = benchmark_gpu.work_of(BY_NAME[case], options(cache))
    made = bases.GpuWork(**{**vars(made), "prompts": 4, "rollout_rows": 4, **changes})
    bases.make_base(made)
    return made


# Sizes


def test_the_cases_have_the_real_shapes_and_lengths(tmp_path):
    given = benchmark_gpu.parse_arguments(["--cache", str(tmp_path)])
    llama = benchmark_gpu.work_of(BY_NAME["rollouts"], given)
    assert (llama.prompts, llama.prompt_length, llama.response_length, llama.micro_rows) == (64, 512, 512, 1)
    assert (llama.device, llama.dtype, llama.quantization, llama.checkpointing) == ("cuda", "bfloat16", "nf4", True)
    assert llama.shape.weights == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert llama.shape.adapter_weights == 41_943_040  # what PEFT tells of r=16 on all linear layers of Llama-3-8B
    qwen = benchmark_gpu.work_of(BY_NAME["sampling"], given)
    assert (qwen.tied, qwen.shape.kv_width, qwen.eos_rate) == (True, 256, 4 / 512)
    assert llama.base != qwen.base == benchmark_gpu.work_of(BY_NAME["trl"], given).base


def test_grouped_heads_take_what_torch_counts():
    shape = operations.Shape(hidden=32, intermediate=48, layers=2, vocab=60, rank=4, kv_width=16)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 60}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "attn_implementation": "eager"}
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads))
    rollout = operations.Rollout([5] * 3, [7] * 3)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model.model(torch.randint(0, 60, (3, 12)))
    causal_half = operations.attention(shape, rollout.rows)
    expected = operations.forward(shape, rollout, adapter=False) + causal_half
    assert expected == pytest.approx(counter.get_total_flops(), rel=2e-4)  # transformers 5.0 has positions of each row
    assert operations.Shape(32, 48, 2, 60, 4, 32).weights == operations.Shape(32, 48, 2, 60, 4).weights


# The bases


@pytest.mark.parametrize("case", ["peak", "small"])
def test_the_base_is_nf4_with_random_layers_that_leave_the_first_feature_alone(cache, case):
    given = work(cache, case)
    assert not bases.make_base(given)
    model = bases.load_model(given)
    layers = [layer.self_attn.o_proj.weight for layer in model.model.layers]
    assert all(weight.quant_state.quant_type == "nf4" and weight.quant_state.nested for weight in layers)
    first, second = (dequantize_4bit(weight.data, weight.quant_state).float() for weight in layers[:2])
    assert first[0].abs().max() == 0 and not torch.equal(first, second)
    assert first[1:].std().item() == pytest.approx(0.02 / (2 * given.layers) ** 0.5, rel=0.1)
    head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
    assert (head is embedding) == given.tied
    assert embedding[2:, 0].unique().numel() == 1


@pytest.mark.parametrize("case", ["peak", "small"])
@pytest.mark.parametrize("rate", [0.02, 0.3])
def test_eos_comes_with_the_rate_that_is_set_and_padding_never(cache, case, rate):
    model = bases.load_model(work(cache, case))
    bases.set_eos_rate(model, rate)
    head = model.get_output_embeddings().weight
    assert head[[PAD, EOS], 1:].abs().max() == 0 and head[2:, 1:].abs().min(dim=0).values.max() > 0
    tokens = torch.randint(2, 300, (8, 40), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        probabilities = model(tokens).logits[:, 8:].float().softmax(dim=-1).mean(dim=(0, 1))
    assert probabilities[EOS] == pytest.approx(rate, rel=0.25)
    assert probabilities[PAD] < 1e-6


def test_the_reward_adapter_has_a_head_and_all_layers(cache):
    given = work(cache)
    adapter = read_adapter(str(given.reward_adapter))
    assert adapter.head is not None and list(adapter.head["weight"].shape) == [1, given.hidden]
    lora = [tensor for name, tensor in adapter.tensors.items() if "lora_" in name]
    assert sum(tensor.numel() for tensor in lora) == given.shape.adapter_weights


def test_a_base_that_was_half_written_is_written_again(tmp_path):
    given = benchmark_gpu.work_of(BY_NAME["peak"], options(tmp_path))
    given.base.mkdir(parents=True)
    (given.base / "model-00007.safetensors").write_text("half")
    assert bases.make_base(given)
    assert not (given.base / "model-00007.safetensors").exists()


# The cases, on the CPU


def told(case: str, given) -> dict:
    """What a case tells."""
    found: dict = {}
    cases.CASES[case](given, found.update)
    return found


def test_training_tells_peaks_the_plan_and_the_update_s_rate(cache, monkeypatch):
    monkeypatch.setattr(cases, "machine_rates", partial(cases.machine_rates, at_least=0.01))
    found = told("peak", work(cache))
    assert found["peaks_gib"].keys() == {"sampling", "scoring", "updating"}
    assert found["peak_gib"] == max(found["peaks_gib"].values()) > 0 < found["loading_gib"]
    assert found["planned_gib"].keys() == {"peak", "sampling", "scoring", "update"}
    (iteration,) = found["iterations"]
    assert iteration["rollout"] == {"prompts": [16] * 4, "responses": [16] * 4}
    real = {phase: count["real"] for phase, count in found["padding"].items()}
    assert real == {"sampling": 4 * 31, "scoring": 4 * 4 * 32, "updating": 2 * 4 * 32}
    assert 0 < found["update_rate"] < 1
    assert found["seconds"] == iteration["seconds"] > iteration["updating"] > 0


def test_sampling_is_measured_in_real_tokens_of_the_same_prompts(cache):
    found = told("sampling", work(cache, "sampling", rollout_rows=3))
    for one in (found["plain"], found["ours"]):
        assert 4 <= one["tokens"] <= 4 * 16 and 2 <= one["steps"] <= 2 * 16
        assert one["mean_response"] == one["tokens"] / 4
        assert one["tokens_per_second"] == pytest.approx(one["tokens"] / one["seconds"])


def test_prompts_are_put_together_by_length(cache):
    given = work(cache, "sampling", prompts=5, rollout_rows=2)
    batches = inference.left_padded(given, torch.device("cpu"))
    assert [tuple(ids.shape) for ids, _ in batches] == [(2, 16), (2, 12), (1, 8)]
    assert [mask.sum(dim=1).tolist() for _, mask in batches] == [[16, 14], [12, 10], [8]]
    assert all(bool(mask[:, -1].all()) for _, mask in batches)


def test_one_pass_for_all_roles_says_what_their_own_passes_say(cache):
    model = inference.four_roles(work(cache))
    found = inference.compare_passes(model, work(cache), rows=2)
    assert found["difference"] < 0.05
    assert found["ratio"] == found["separate"] / found["fused"]
    roles = {}
    for role in inference.ROLES:
        with inference._acting(model, role), torch.no_grad():
            roles[role] = model(input_ids=torch.arange(2, 12)[None]).logits
    assert all(not torch.equal(one, other) for one, other in itertools.combinations(roles.values(), 2))


def test_the_optimizer_has_its_moments_and_weights_stay(cache):
    given = work(cache)
    trainer = cases.build_on(inference.shared_base(given), given)
    parameters = [p for role in trainer.base.trainable_parameters().values() for p in role]
    before = [parameter.detach().clone() for parameter in parameters]
    cases.make_optimizer_state(trainer)
    assert all(torch.equal(parameter, kept) for parameter, kept in zip(parameters, before, strict=True))
    assert all("exp_avg" in trainer.optimizer.state[parameter] for parameter in parameters)
    assert all(parameter.grad is None for parameter in parameters)


def test_the_sampling_batch_is_the_largest_that_is_planned_to_fit(cache, monkeypatch):
    monkeypatch.setattr(cases, "planned", lambda given: {"peak": given.rollout_rows * 0.5})
    chosen, plan = cases.fitting(work(cache), limit=17)
    assert (chosen.rollout_rows, plan) == (32, {"peak": 16.0})
    assert cases.fitting(work(cache), limit=0.1)[0].rollout_rows == cases.BATCHES[-1]


def test_without_a_plan_the_run_is_measured_all_the_same(cache, monkeypatch):
    def refuse(*args, **options):
        raise RuntimeError("no fake\nattention")

    monkeypatch.setattr(cases, "plan_memory", refuse)
    chosen, plan = cases.fitting(work(cache))
    assert (chosen.rollout_rows, plan) == (32, {"error": "no plan: RuntimeError: no fake attention"})
    rows = report.table_rows({"peak": result(planned_gib=plan)})[1]
    assert rows[0][3] == "yes" and rows[1][2] == "not measured (no plan: RuntimeError: no fake attention)"


def test_peaks_belong_to_the_phase_that_ended(monkeypatch):
    readings = iter([3.0, 1.0, 5.0, 2.0])
    memory = type("Memory", (), {"read": lambda self: next(readings)})()
    phases = iter(["sampling", "sampling", "scoring", "updating", "scoring"])
    monkeypatch.setattr(cases, "phase_of", lambda layer_options: next(phases))
    peaks = cases.PhasePeaks(memory)
    for _ in range(5):
        peaks.phase_of({})
    peaks.close()
    assert peaks.gib == {"sampling": 3.0, "scoring": 2.0, "updating": 5.0}


# The budget


STUB = """import json, sys, time
case, _, result = sys.argv[1:]
Known = {"machine": {"device": "a GPU", "python": "3"}, "versions": {"torch": "2"}}
open(result, "w").write(json.dumps({**Known, "peak_gib": 1.0}))
if case == "small":
    raise MemoryError("one layer too many")
if case == "rollouts":
    time.sleep(60)
"""


@pytest.fixture
def stubs(tmp_path, monkeypatch):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (folder / "benchmark_gpu_base.py").write_text("")
    (folder / "benchmark_gpu_cases.py").write_text(STUB)
    monkeypatch.setattr(benchmark_gpu, "SCRIPTS", folder)


def measured(tmp_path, *more: str, now=None):
    console = Console(file=io.StringIO(), width=300)
    run = benchmark_gpu.Run(console, options(tmp_path, *more), **({"now": now} if now else {}))
    run.measure()
    return run, console.file.getvalue()


def test_a_case_that_breaks_is_a_line_and_the_next_one_is_measured(tmp_path, stubs):
    run, text = measured(tmp_path, "--cases", "small", "trl", "peak")
    assert run.results["peak"]["peak_gib"] == 1.0 and "reason" not in run.results["peak"]
    assert run.results["small"]["reason"] == "ended with 1: MemoryError: one layer too many"
    assert run.results["small"]["peak_gib"] == 1.0 and "Traceback" in run.results["small"]["log"]
    assert run.results["trl"]["reason"] == benchmark_gpu.NO_PEER
    assert list(run.results) == ["peak", "small", "trl"]  # in order of importance, not of the command line
    assert "small: ended with 1: MemoryError: one layer too many" in text and "peak: done" in text
    record = json.loads((tmp_path / "out" / "benchmark_gpu.json").read_text())
    assert record["cases"] == run.results
    assert "A trial" in record["facts"][0] and "a GPU" in record["facts"][1]


def test_cases_without_time_left_are_not_begun(tmp_path, stubs, monkeypatch):
    clock, process = [0.0], benchmark_gpu.Run._process

    def slow(*arguments):
        clock[0] += 40
        return process(*arguments)

    monkeypatch.setattr(benchmark_gpu.Run, "_process", slow)
    run, _ = measured(tmp_path, "--cases", "peak", "passes", "--budget", "105", now=lambda: clock[0])
    assert run.results["peak"].get("reason") is None and run.results["peak"]["took"] == 80
    assert run.results["passes"]["reason"] == benchmark_gpu.NO_TIME
    assert not (tmp_path / "out" / "processes" / "passes.work").exists()


def test_a_case_is_stopped_at_the_end_of_the_budget(tmp_path, stubs, monkeypatch):
    monkeypatch.setattr(benchmark_gpu, "CASES", (benchmark_gpu.Case("rollouts", "llama-3-8b", seconds=0.1),))
    run, _ = measured(tmp_path, "--cases", "rollouts", "--budget", "1.5")
    assert run.results["rollouts"]["reason"] == "stopped at the end of the budget"
    assert run.results["rollouts"]["peak_gib"] == 1.0


# The table


def result(**changes) -> dict:
    peaks = {"peak_gib": 11.0, "loading_gib": 6.0, "peaks_gib": {"sampling": 9.0, "updating": 11.0}}
    times = {"seconds": 4.0, "sampling": 1.0, "scoring": 1.0, "updating": 2.0}
    plan = {"planned_gib": {"peak": 10.5}, "rows": 4, "rollout_rows": 4}
    rates = {"update_rate": 0.5, "rates": {"rate": 8e14}}
    return {**peaks, **plan, **rates, "iterations": [times], **changes}


def cells(results: dict, judged: bool = True) -> dict[str, list[str]]:
    """What is told from the third column on, by the text of a line; of two alike the last."""
    return {row[0]: row[2:] for row in report.table_rows(results, judged)[1]}


def test_peaks_and_plans_are_judged_by_their_limits():
    rows = report.table_rows({"peak": result(), "rollouts": result(peak_gib=22.5), "small": result(peak_gib=4.9)})[1]
    reached = [row[3] for row in rows[:6]]
    assert reached == ["yes", "yes", "no", "no", "yes", "no"]
    assert rows[0][2].startswith("11.00 GiB (loading 6.00, sampling 9.00, updating 11.00); 4 rows")
    assert rows[1][2] == "1.05 (11.00 of 10.50 GiB)"


def test_the_peer_and_plain_generate_are_divided_the_right_way_round():
    peer = result(peak_gib=22.0, iterations=[{"seconds": 10.0, "sampling": 2.0, "scoring": 3.0, "updating": 5.0}])
    sampling = {
        name: {"tokens_per_second": rate, "steps": 512, "mean_response": 128}
        for name, rate in (("plain", 100), ("ours", 250))
    }
    passes = {"passes": [{"rows": 1, "separate": 0.2, "fused": 0.1, "ratio": 2.0}]}
    told = cells({"small": result(), "trl": peer, "sampling": sampling, "passes": passes, "rollouts": result()})
    by_word = {
        word: next(told[what] for what in told if word in what) for word in ("peak of TRL", "time of an", "ragged")
    }
    assert by_word["peak of TRL"] == ["2.00 (22.00 and 11.00 GiB)", ""]
    assert by_word["time of an"][0].startswith("2.50 (10.0 and 4.0 s: sampling 2.0 and 1.0")
    assert by_word["ragged"][0].startswith("2.50 (250 in 512 steps") and by_word["ragged"][1] == "yes"
    assert any("0.50 of 800 TFLOP/s" in cell for row in told.values() for cell in row)
    assert any("2.00 with 1 rows (200 and 100 ms)" in cell for row in told.values() for cell in row)


def test_what_is_missing_is_told_with_its_reason_and_a_trial_is_not_judged():
    told = cells({"peak": {"reason": "no time left", "peak_gib": 3.0}})
    assert told["Llama-3-8B shape, four roles, checkpointing, micro-batch 1: peak"] == [
        "not measured (no time left)",
        "",
    ]
    assert told["the same, 64 rollouts an iteration: peak"] == ["not measured", ""]
    assert {row[3] for row in report.table_rows({"peak": result()}, judged=False)[1]} == {""}


def test_the_page_of_the_docs_has_this_table():
    page = (SCRIPTS.parent / "docs" / "benchmarks.md").read_text()
    assert page.count(benchmark_gpu.BEGIN) == page.count(benchmark_gpu.END) == 1
    table = page.partition(benchmark_gpu.BEGIN)[2].partition(benchmark_gpu.END)[0]
    lines = [[cell.strip() for cell in line.split("|")[1:3]] for line in table.splitlines() if line.startswith("| ")]
    assert lines[2:] == [[row.what, row.wanted] for row in report.ROWS]


# The command


def test_without_a_gpu_there_is_one_line(monkeypatch):
    console = Console(file=io.StringIO(), width=80)
    monkeypatch.setattr(benchmark_gpu, "Console", lambda: console)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert benchmark_gpu.main([]) == 0
    assert console.file.getvalue().count("\n") == 1 and "No GPU" in console.file.getvalue()


def test_the_command_writes_its_table_into_the_page(tmp_path, stubs):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{benchmark_gpu.BEGIN}\nold\n{benchmark_gpu.END}\nafter\n")
    folders = ["--cache", str(tmp_path), "--output", str(tmp_path / "out"), "--docs", str(page)]
    assert benchmark_gpu.main(["--device", "cpu", "--tiny", "--threads", "1", "--cases", "peak", *folders]) == 0
    text = (tmp_path / "out" / "benchmark_gpu.md").read_text()
    assert text in page.read_text() and "old" not in page.read_text() and page.read_text().endswith("after\n")
    assert "not measured" in text
