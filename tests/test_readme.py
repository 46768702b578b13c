"""The README's snippets are what a newcomer copies: they run, or at least stand on names that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from builders import randomize, save_tiny_model, tiny_model
from ppo_lora import PPOConfig, Role, SharedBase
from ppo_lora.adapters import write_adapter

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


@pytest.fixture
def quickstart_folder(tmp_path, monkeypatch):
    """What `make quickstart` leaves behind, in small."""
    root = tmp_path / "runs" / "quickstart"
    save_tiny_model(root / "base" / "nf4")
    start = SharedBase(tiny_model())
    randomize(start.trainable_parameters()[Role.POLICY])
    write_adapter(root / "sft", start.adapter(Role.POLICY))
    prompts = root / "data" / "prompts"
    prompts.mkdir(parents=True)
    (prompts / "train.jsonl").write_text("".join(f'{{"prompt": "w{3 + i % 40}"}}\n' for i in range(64)))
    monkeypatch.chdir(tmp_path)
    return root


@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_the_python_example_runs(quickstart_folder, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(quickstart_folder / "cache"))
    example = snippets("python")[0].replace("total_episodes=256", 'total_episodes=32, use_cpu=True, report_to="none"')
    assert len([line for line in snippets("python")[0].splitlines() if line.strip()]) <= 15
    exec(compile(example, "README.md", "exec"), {})
    assert (quickstart_folder.parent / "short" / "adapter_model.safetensors").is_file()


def test_the_gpu_example_stands_on_names_that_exist():
    code = snippets("python")[1]
    assert len(code.strip().splitlines()) <= 11
    compile(code, "README.md", "exec")
    imports = "\n".join(line for line in code.splitlines() if line.startswith(("import", "from")))
    names: dict = {}
    exec(imports, names)
    arguments = re.search(r"args = PPOConfig\((.*)\)", code).group(1).replace("bf16=True", "use_cpu=True")
    made = eval(f"PPOConfig({arguments})", names)
    assert isinstance(made, PPOConfig)


def test_the_commands_are_targets_and_files():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make (\w+)", "\n".join(snippets("bash")), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target
    for path in re.findall(r"(?:scripts|configs)/[\w/]+\.(?:py|yaml)", README):
        assert (ROOT / path).is_file(), path


@pytest.mark.parametrize("page", ["README.md", *(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\((?!https?://)([^)#]+)", text):
        assert ((ROOT / page).parent / target).exists(), target
