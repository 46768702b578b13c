"""docs/options.md says what the options are; docs/metrics.md every metric that runs log."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import fields
from pathlib import Path

import pytest
from trl import TrlParser

from bases import full_base
from ppo_lora import PPOConfig
from runs import trainer

ROOT = Path(__file__).parent.parent


@pytest.fixture
def options(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import options

    yield options
    for name in ("options", "ppo"):
        sys.modules.pop(name, None)


def test_the_committed_page_is_up_to_date(options):
    from ppo import PPOScriptArguments

    TrlParser((PPOScriptArguments, PPOConfig))  # rewrites the fields' types in place, and the page must not change
    assert (ROOT / "docs" / "options.md").read_text() == options.document(), "run `make options`"


def test_every_field_is_in_exactly_one_group(options):
    grouped = [name for names in options.groups(PPOConfig).values() for name in names]
    assert sorted(grouped) == sorted(inspect.get_annotations(PPOConfig))
    assert "" not in options.groups(PPOConfig)


def test_every_choice_is_shown(options):
    page = options.document()
    for field in fields(PPOConfig):
        if field.name in inspect.get_annotations(PPOConfig):
            (line,) = [line for line in page.splitlines() if line.startswith(f"| `{field.name}` |")]
            assert all(f"`{choice}`" in line for choice in field.metadata.get("choices") or [])


def test_check_tells_whether_the_page_is_stale(options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(options, "TARGET", tmp_path / "options.md")
    assert options.main(["--check"]) == 1
    assert options.main([]) == 0 and options.main(["--check"]) == 0
    (tmp_path / "options.md").write_text("old")
    assert options.main(["--check"]) == 1
    assert "make options" in capsys.readouterr().out


def test_every_metric_that_is_logged_is_documented(tmp_path):
    known = re.findall(r"^\| `([^`]+)`", (ROOT / "docs" / "metrics.md").read_text(), re.M)
    assert len(known) == len(set(known))
    patterns = [re.sub(r"<\w+>", "[^/]+", name) for name in known]
    made = trainer(
        tmp_path,
        model=full_base(),
        max_steps=4,
        kl_in="loss",
        log_exact_kl=True,
        importance_sampling_cap=2.0,
        target_kl=1.0,
        score_normalization="running",
        reward_funcs=lambda completion_ids, **kwargs: [[1.0] * len(ids) for ids in completion_ids],
    )
    made.train()
    logged = {name for entry in made.state.log_history for name in entry}
    undocumented = [name for name in logged if not any(re.fullmatch(pattern, name) for pattern in patterns)]
    assert undocumented == []
    unused = [name for name, p in zip(known, patterns, strict=True) if not any(re.fullmatch(p, n) for n in logged)]
    assert set(unused) <= {"memory/peak_gib", "memory/<phase>_rows"}
