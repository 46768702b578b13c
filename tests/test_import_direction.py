"""Which module may import which: the design's direction of imports, held by walking the syntax trees.

Files are parsed, not imported, so imports inside functions and under `TYPE_CHECKING` are seen too.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10, where pytest brings tomli
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "ppo_lora"
LEAVES = {"types", "masking"}
MATHS = {"logprobs", "rewards", "advantages", "losses", "kl_control", "statistics", "normalization"}
PPO = {"config", "trainer", "rollout", "scorers", "losses", "advantages", "rewards", "kl_control"}
PPO_FREE = {"shared_base", "adapters"}
PEERS = {"benchmark_peer", "benchmark_gpu_peer"}
"""Scripts that run an old TRL's PPO itself, in processes of their own, to be compared with."""

# What the modules import and the distributions call otherwise.
DISTRIBUTION_OF = {"huggingface_hub": "huggingface-hub"}


class Import(NamedTuple):
    """One imported thing: `from a.b import c` is ("a.b", "c"), `import a.b` is ("a.b", None)."""

    module: str
    name: str | None
    line: int

    def __str__(self) -> str:
        return f"line {self.line}: {self.module}" + (f".{self.name}" if self.name else "")

    @property
    def top(self) -> str:
        return self.module.split(".")[0]

    @property
    def path(self) -> list[str]:
        return [*self.module.split("."), *([self.name] if self.name else [])]


def imports(source: str, package: str = PACKAGE) -> Iterator[Import]:
    """Every import in `source`, relative ones resolved against `package`, `trl.x` after `import trl` included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, None, node.lineno)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            for alias in node.names:
                yield Import(module, alias.name, node.lineno)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "trl":
            yield Import("trl", node.attr, node.lineno)


def internal(imported: Import, modules: set[str]) -> str | None:
    """The module of the package that `imported` comes from, "__init__" for the package itself, else None."""
    if imported.top != PACKAGE:
        return None
    inner = imported.path[1:]
    return inner[0] if inner and (inner[0] in modules or imported.module != PACKAGE) else "__init__"


def outside_maths(module: str, source: str) -> list[str]:
    """What a leaf or maths module may not import: anything but torch, the standard library, leaves and other maths."""
    allowed = {"torch", *sys.stdlib_module_names}
    pure = LEAVES if module in LEAVES else LEAVES | MATHS
    return [
        f"{module}, {imported}: only torch, the standard library, {', '.join(sorted(pure))} may be imported here"
        for imported in imports(source)
        if imported.top not in allowed and internal(imported, pure) not in pure
    ]


def reached(module: str, sources: Mapping[str, str]) -> dict[str, list[str]]:
    """Every module of the package that `module` imports, through others too, with the way it gets there."""
    ways: dict[str, list[str]] = {module: [module]}
    waiting = [module]
    while waiting:
        here = waiting.pop()
        for imported in imports(sources.get(here, "")):
            target = internal(imported, set(sources))
            if target is not None and target not in ways:
                ways[target] = [*ways[here], target]
                waiting.append(target)
    return ways


def ppo_reached(module: str, sources: Mapping[str, str]) -> list[str]:
    """Ways by which a module that should know no PPO gets to one that does."""
    return [
        f"{' -> '.join(way)}: {module} may know no PPO"
        for target, way in reached(module, sources).items()
        if target in PPO | {"__init__"}
    ]


def scripts_imported(module: str, source: str) -> list[str]:
    """Imports of scripts from the package."""
    return [f"{module}, {found}: no script may be imported" for found in imports(source) if found.top == "scripts"]


def private_trl(module: str, source: str) -> list[str]:
    """Imports of what TRL does not promise to keep: leading underscores and `trl.experimental`."""
    return [
        f"{module}, {imported}: not a public part of TRL"
        for imported in imports(source)
        if imported.top == "trl" and any(map(is_private, imported.path[1:]))
    ]


def is_private(part: str) -> bool:
    return part == "experimental" or (part.startswith("_") and not part.endswith("__"))


def beyond_public(script: str, source: str, public: set[str]) -> list[str]:
    """Imports in a script of anything in the package but its public names."""
    return [
        f"{script}, {imported}: scripts write `from {PACKAGE} import <a name in __all__>`"
        for imported in imports(source, package="")
        if imported.top == PACKAGE and (imported.module != PACKAGE or imported.name not in public)
    ]


def undeclared(module: str, source: str, declared: set[str]) -> list[str]:
    """Third-party imports that pyproject.toml does not name as dependencies."""
    known = {PACKAGE, *sys.stdlib_module_names}
    return [
        f"{module}, {imported}: not among the dependencies in pyproject.toml"
        for imported in imports(source)
        if imported.top not in known and DISTRIBUTION_OF.get(imported.top, imported.top) not in declared
    ]


def public_names(source: str) -> set[str]:
    """The names in the `__all__` of `source`, a literal; none without it."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]:
            return set(ast.literal_eval(node.value))
    return set()


def read(folder: str) -> dict[str, str]:
    """Source by module name, of the files of one folder."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).glob("*.py"))}


SOURCES = read(PACKAGE)
SCRIPTS = read("scripts")
each_module = pytest.mark.parametrize("module", SOURCES)
each_script = pytest.mark.parametrize("script", SCRIPTS)


def test_the_package_has_no_folders_that_these_tests_do_not_see():
    assert [path for path in (ROOT / PACKAGE).glob("*/*.py")] == []


@pytest.mark.parametrize("module", sorted((LEAVES | MATHS) & SOURCES.keys()))
def test_leaves_and_maths_take_tensors_and_numbers(module):
    assert outside_maths(module, SOURCES[module]) == []


@pytest.mark.parametrize("module", sorted(PPO_FREE & SOURCES.keys()))
def test_the_base_and_its_adapters_know_no_ppo(module):
    assert ppo_reached(module, SOURCES) == []


@each_module
def test_the_package_imports_no_script(module):
    assert scripts_imported(module, SOURCES[module]) == []


@each_module
def test_the_package_uses_only_public_trl(module):
    assert private_trl(module, SOURCES[module]) == []


@each_module
def test_the_package_imports_only_what_it_declares(module):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[<>=!~ \[;]", line, maxsplit=1)[0] for line in project["dependencies"]}
    assert undeclared(module, SOURCES[module], declared) == []


@each_script
def test_scripts_use_only_public_trl(script):
    assert script in PEERS or private_trl(script, SCRIPTS[script]) == []


@pytest.mark.parametrize("peer", sorted(PEERS))
def test_the_measured_peer_has_nothing_of_the_package(peer):
    reached, waiting = set(), [peer]
    while waiting:
        reached.add(waiting.pop())
        waiting += {each.top for name in reached for each in imports(SCRIPTS[name])} & SCRIPTS.keys() - reached
    assert [str(each) for name in reached for each in imports(SCRIPTS[name]) if each.top == PACKAGE] == []


@each_script
def test_scripts_use_the_public_api_only(script):
    assert beyond_public(script, SCRIPTS[script], public_names(SOURCES.get("__init__", ""))) == []


# The checks themselves: each must refuse what it is there for.


@pytest.mark.parametrize(
    "source",
    [
        "import numpy as np",
        "from transformers import PreTrainedModel",
        "from .config import PPOConfig",
        "from ppo_lora.config import PPOConfig",
        "from ppo_lora import PPOConfig",
        "from . import config",
        "import ppo_lora.trainer",
        "if TYPE_CHECKING:\n    from .shared_base import SharedBase",
        "def f():\n    import peft",
    ],
)
def test_outside_maths_refuses(source):
    assert len(outside_maths("losses", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from __future__ import annotations\nimport math, torch.nn.functional as F",
        "from .masking import masked_mean\nfrom ppo_lora.types import Rollout",
        "from . import masking\nimport ppo_lora.types",
    ],
)
def test_outside_maths_accepts(source):
    assert outside_maths("losses", source) == []


def test_ppo_reached_refuses_a_direct_an_indirect_and_a_package_import():
    sources = {"adapters": "from .heads import Head", "heads": "from . import config", "config": "", "masking": ""}
    assert ppo_reached("adapters", sources) == ["adapters -> heads -> config: adapters may know no PPO"]
    assert len(ppo_reached("shared_base", {"shared_base": "import ppo_lora.losses", "losses": ""})) == 1
    assert len(ppo_reached("shared_base", {"shared_base": "from ppo_lora import PPOConfig"})) == 1


def test_ppo_reached_accepts_leaves_logprobs_and_each_other():
    sources = {"shared_base": "from .adapters import Adapter\nfrom .logprobs import token_logprobs", "adapters": ""}
    assert ppo_reached("shared_base", sources | {"logprobs": "from .masking import masked_mean", "masking": ""}) == []


@pytest.mark.parametrize("source", ["from scripts.ppo import main", "import scripts.ppo", "from scripts import ppo"])
def test_scripts_imported_refuses(source):
    assert len(scripts_imported("trainer", source)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "from trl.experimental.ppo import PPOTrainer",
        "from trl import experimental",
        "import trl.experimental",
        "from trl import _private",
        "from trl._compat import thing",
        "from trl.trainer.utils import _pad",
        "import trl\ntrl.experimental.ppo.PPOTrainer",
    ],
)
def test_private_trl_refuses(source):
    assert private_trl("trainer", source)


@pytest.mark.parametrize("source", ["from trl import TrlParser", "import trl\ntrl.__version__\ntrl.ModelConfig"])
def test_private_trl_accepts(source):
    assert private_trl("trainer", source) == []


@pytest.mark.parametrize(
    "source",
    [
        "from ppo_lora.trainer import PPOTrainer",
        "from ppo_lora import trainer",
        "from ppo_lora import *",
        "import ppo_lora",
        "import ppo_lora.losses",
    ],
)
def test_beyond_public_refuses(source):
    assert len(beyond_public("ppo", source, {"PPOTrainer"})) == 1


def test_beyond_public_accepts():
    assert beyond_public("ppo", "import torch\nfrom ppo_lora import PPOTrainer", {"PPOTrainer"}) == []


def test_undeclared_refuses_and_accepts():
    source = "import math\nimport peft\nfrom huggingface_hub import hf_hub_download\nfrom .types import Prompts"
    assert undeclared("data", source, {"peft", "huggingface-hub"}) == []
    assert undeclared("data", source, {"peft"}) == [
        "data, line 3: huggingface_hub.hf_hub_download: not among the dependencies in pyproject.toml"
    ]


def test_public_names():
    assert public_names('from .config import PPOConfig\n__all__ = ["PPOConfig", "Role"]') == {"PPOConfig", "Role"}
    assert public_names("from .config import PPOConfig") == set()


def rooms() -> list[list[str]]:
    """The rooms of docs/how_it_works.md, from the uppermost: modules that stand in one row of its table."""
    page = (ROOT / "docs" / "how_it_works.md").read_text()
    table = page.partition("## The rooms")[2].partition("\n## ")[0]
    rows = [re.findall(r"`(\w+)`", row) for row in table.splitlines() if row.startswith("|")]
    return [row for row in rows if row]


def test_every_module_has_its_room():
    modules = {path.stem for path in (ROOT / PACKAGE).glob("*.py")} - {"__init__"}
    assert sorted(name for row in rooms() for name in row) == sorted(modules)


def test_no_room_imports_from_one_above():
    floor = {module: number for number, row in enumerate(rooms()) for module in row}
    upwards = [
        f"{module}, {imported}"
        for module in floor
        for imported in imports((ROOT / PACKAGE / f"{module}.py").read_text())
        if (target := internal(imported, set(floor))) in floor and floor[target] < floor[module]
    ]
    assert upwards == []
