# SPDX-License-Identifier: LGPL-2.1-or-later
"""The rules of CONTRIBUTING.md, and the layers of docs/architecture.md, checked in the source."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
MOST_LINES_OF_A_FILE = 700
MOST_LINES_OF_A_FUNCTION = 80

ARCHITECTURE = ROOT / "docs" / "architecture.md"
#: Packages of other projects that the table of layers names.
OTHERS = frozenset({"drgn", "rich"})
#: Helpers of drgn that follow no links. What they read has a fixed number, or as many as
#: ``linux/mm/mmzone.py`` has checked: the CPUs in a mask, and the page frames of ``FLATMEM``.
WITH_BOUNDS = {
    *("NODE_DATA", "nr_node_ids", "cpu_online_mask", "cpu_possible_mask", "for_each_possible_cpu"),
    *("compound_head", "follow_page", "in_direct_map", "page_to_virt", "virt_to_page"),
    *("for_each_valid_page_range", "totalram_pages"),
    *("pfn_to_section", "pfn_to_section_nr", "section_nr_to_pfn"),
    *("per_cpu", "per_cpu_ptr", "cpu_curr", "idle_task", "task_cpu", "pid_task"),
    *("bdev_partno", "disk_name", "kernfs_parent"),
    *("load_vmlinux_kallsyms", "takes_program_or_default"),
}
#: Public names that begin with an underscore: those of NamedTuple.
PUBLIC_ALL_THE_SAME = {"_asdict", "_fields", "_make", "_replace"}

Function = ast.FunctionDef | ast.AsyncFunctionDef


def _files(*folders: str) -> list[Path]:
    """Return the files of the project in these folders, without what tools leave there."""
    return sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix != ".pyc"
        and not any(part.startswith(".") for part in path.relative_to(ROOT / folder).parts)
    )


def _is_python(path: Path) -> bool:
    if path.suffix:
        return path.suffix == ".py"
    return path.read_bytes()[:60].startswith(b"#!/usr/bin/env python3")


CODE = _files("memcg_inspect", "scripts", "tests", "fixtures", ".ci")
PYTHON = [path for path in CODE if _is_python(path)]
PACKAGE = [path for path in PYTHON if path.is_relative_to(ROOT / "memcg_inspect")]
TESTS = [path for path in PYTHON if path.is_relative_to(ROOT / "tests")]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def _functions(node: ast.AST) -> Iterator[Function]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
            yield inner


def _imported(tree: ast.Module) -> Iterator[tuple[str, str | None]]:
    """Return every imported (module, name), also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "the package imports by full names"
            for alias in node.names:
                yield node.module or "", alias.name


class Layer(NamedTuple):
    """
    A row of the table under "Layers" in docs/architecture.md.

    :ivar modules: names in ``memcg_inspect``, folders and files alike, without ``.py``
    :ivar imports: names of the layers, and packages of other projects, that it imports
    """

    name: str
    modules: tuple[str, ...]
    imports: frozenset[str]


@cache
def _layers() -> tuple[Layer, ...]:
    """Read the table of layers, the lowest first."""
    section = ARCHITECTURE.read_text().split("\n## Layers\n")[1].split("\n## ")[0]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in section.splitlines()
        if line.startswith("|")
    ]
    head, rule, *body = rows
    assert set("".join(rule)) <= set("- ")
    name, modules, imports = (head.index(column) for column in ("layer", "where", "may import"))
    return tuple(
        Layer(
            row[name],
            tuple(
                m.removesuffix("/").removesuffix(".py")
                for m in re.findall(r"`(.*?)`", row[modules])
            ),
            frozenset() if row[imports] == "nothing" else frozenset(row[imports].split(", ")),
        )
        for row in body
    )


def _layer_of(module: str) -> str | None:
    """Return the layer of a dotted name, or the package of another project that it is of."""
    first, *rest = module.split(".")
    if first != "memcg_inspect":
        return first if first in OTHERS else None
    of = {m: layer.name for layer in _layers() for m in layer.modules}
    return of.get(rest[0] if rest else "__init__", of["__init__"])


def _where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def _module(path: Path) -> str:
    """Return the dotted name of a module of the package."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a module imports: of modules, and of what is in them."""
    return frozenset(
        module if name is None else f"{module}.{name}" for module, name in _imported(_parsed(path))
    )


def test_the_table_of_layers_has_every_module() -> None:
    listed = [module for layer in _layers() for module in layer.modules]
    assert len(listed) == len(set(listed))
    assert set(listed) == {
        path.relative_to(ROOT / "memcg_inspect").parts[0].removesuffix(".py") for path in PACKAGE
    }


def test_layers_import_what_the_table_says() -> None:
    """Each imports all that the last column names, which is always lower, and nothing else."""
    found: dict[str, dict[str, str]] = {}
    for path in PACKAGE:
        layer = _layer_of(_module(path) or "")
        assert layer is not None
        reached = found.setdefault(layer, {})
        for imported in _imports(path):
            below = _layer_of(imported)
            if below not in (None, layer):
                reached[str(below)] = f"{path.relative_to(ROOT)} imports {imported}"
    lower: set[str] = set(OTHERS)
    for layer in _layers():
        assert layer.imports <= lower, layer
        wrong = {why for below, why in found[layer.name].items() if below not in layer.imports}
        assert wrong == set()
        assert layer.imports == set(found[layer.name]), f"{layer.name} imports less"
        lower.add(layer.name)


def test_no_circles_of_imports() -> None:
    """Imports inside functions count, too, because they only hide a circle."""
    modules = {_module(path): path for path in PACKAGE}
    graph: dict[str, set[str]] = {}
    for name, path in modules.items():
        # A submodule, or something in a module.
        named = (i if i in modules else i.rpartition(".")[0] for i in _imports(path))
        graph[name] = {module for module in named if module in modules and module != name}
    # Take away modules that import none that is left, as long as there are such.
    while leaves := {name for name, imported in graph.items() if not imported}:
        graph = {name: imported - leaves for name, imported in graph.items() if name not in leaves}
    assert graph == {}


#: Readers that are named after what they read, since its source file is about much else.
NAMED_OTHERWISE = {
    "linux/arch/fixed_insn.py": "machine code that two architectures have in common",
    "linux/arch/page_tables.py": "the choice between architectures",
    "linux/lib/nodecounter.py": "lib/nodecounter.c, a patch that is not merged",
    "linux/mm/memcg_data.py": "page->memcg_data, enum page_memcg_data_flags",
    "linux/mm/pernode.py": "the patches that count kernel memory by node",
    "linux/mm/rss_stat.py": "mm_struct->rss_stat",
}


def test_readers_are_named_after_kernel_sources() -> None:
    """Return the kernel file or folder that the first sentence names with ``:linux:``."""
    wrong = []
    for path in PACKAGE:
        name = str(path.relative_to(ROOT / "memcg_inspect"))
        if not name.startswith("linux/") or path.name == "__init__.py":
            continue
        sources = re.findall(r":linux:`([^`]+)`", ast.get_docstring(_parsed(path)) or "")
        parts = {
            part.removesuffix(".c").removesuffix(".h").replace("-", "_")
            for source in sources
            for part in source.split("/")
        }
        known = any(
            path.stem == part
            or path.stem.startswith(f"{part}_")
            or part.startswith(f"{path.stem}_")
            for part in parts
        )
        if not sources or known is (name in NAMED_OTHERWISE):
            wrong.append(f"{name}: {sources}")
    assert wrong == []


#: Words for an architecture, and what is called by one elsewhere, in code.
ARCHITECTURES = re.compile(r"x86|amd64|aarch64|arm64|ppc64|s390|riscv|loongarch", re.IGNORECASE)
NAMED_BY_ONE = {"btf/globals.py": {"struct cpuinfo_x86"}}


def test_only_readers_of_architectures_know_them() -> None:
    """What differs between architectures is in ``linux/arch/``."""
    wrong = []
    for path in PACKAGE:
        name = str(path.relative_to(ROOT / "memcg_inspect"))
        if name.startswith("linux/arch/"):
            continue
        told = set()
        explained = {id(node.body[0].value) for node in _explained(_parsed(path))}
        for node in ast.walk(_parsed(path)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                told |= set() if id(node) in explained else {node.value}
            elif isinstance(node, ast.Name):
                told.add(node.id)
            elif isinstance(node, ast.Attribute):
                told.add(node.attr)
            elif isinstance(node, ast.ImportFrom):
                told |= {f"{node.module}", *(alias.name for alias in node.names)}
        found = {text for text in told if ARCHITECTURES.search(text)}
        if found != NAMED_BY_ONE.get(name, set()):
            wrong.append((name, found))
    assert wrong == []


def _explained(tree: ast.Module) -> Iterator[ast.Module | ast.ClassDef | ast.FunctionDef]:
    """Yield what has a docstring."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(
            node
        ):
            yield node


def test_readers_are_handed_their_image() -> None:
    """Only front ends and helpers look up the image of a program."""
    layers = ("linux", "checks", "collect", "views", "render")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in PACKAGE
        if path.relative_to(ROOT / "memcg_inspect").parts[0] in layers
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bimage_of\b|\.prog_\b", line)
    ]
    assert wrong == []


def test_rules_of_accounting_by_node_are_in_one_place_of_each_layer() -> None:
    """Only the per-node modules know the physical and the posted rule."""
    found = {
        path.relative_to(ROOT / "memcg_inspect").as_posix()
        for path in PACKAGE
        if re.search(r"\bposted\b|straddling", path.read_text())
    }
    assert found == {
        "linux/mm/pernode.py",
        "collect/pernode.py",
        "checks/pernode.py",
        "model.py",  # the records that they hand each other
        "render/report.py",  # the name of each rule
    }


def test_nothing_private_of_others() -> None:
    for path in PACKAGE:
        for module, name in _imported(_parsed(path)):
            for part in (*module.split("."), name or ""):
                dunder = part.startswith("__") and part.endswith("__")
                assert dunder or not part.startswith("_"), f"{path}: {module} {name}"
            assert not module.startswith("drgn.internal"), path


def test_no_private_attributes_of_others() -> None:
    wrong = []
    for path in PACKAGE:
        tree = _parsed(path)
        # A class may look into another of its own kind, and a module into its own classes.
        own = {
            target.attr
            for node in ast.walk(tree)
            for target in (node.targets if isinstance(node, ast.Assign) else [])
            if isinstance(target, ast.Attribute)
        } | {function.name for function in _functions(tree)}
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and re.match(r"_(?!_)", node.attr)
                and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
                and node.attr not in PUBLIC_ALL_THE_SAME | own
            ):
                wrong.append(f"{_where(path, node)}: {node.attr}")
    assert wrong == []


def test_every_code_file_says_its_licence() -> None:
    no_comments = {"py.typed", "mixed.list", "figures.json"}
    for path in CODE:
        if path.name in no_comments or not path.read_bytes().strip():
            continue
        head = path.read_bytes()[:400].decode(errors="replace")
        assert "SPDX-License-Identifier: " in head, path
        licence = head.split("SPDX-License-Identifier: ")[1].split()[0]
        assert (ROOT / "LICENSES" / f"{licence}.txt").exists(), f"{path}: {licence}"
        if path in PACKAGE:
            assert licence == "LGPL-2.1-or-later", path
        if any(part in ("modules", "patches") for part in path.relative_to(ROOT).parts):
            assert licence == "GPL-2.0-only", path


def test_files_are_short() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PYTHON}
    assert {p: n for p, n in lengths.items() if n >= MOST_LINES_OF_A_FILE} == {}


def test_functions_are_short() -> None:
    long = [
        f"{_where(path, function)}: {function.name}"
        for path in PYTHON
        for function in _functions(_parsed(path))
        if (function.end_lineno or 0) - function.lineno >= MOST_LINES_OF_A_FUNCTION
    ]
    assert long == []


def _public(tree: ast.Module) -> Iterator[Function | ast.ClassDef]:
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                told = ast.get_docstring(node) or ""
                for inner in node.body:
                    if (
                        isinstance(inner, ast.FunctionDef)
                        and not inner.name.startswith("_")
                        and f":ivar {inner.name}:" not in told  # a property, told of there
                    ):
                        yield inner


def test_what_is_public_is_explained() -> None:
    silent = [str(path) for path in PACKAGE if not ast.get_docstring(_parsed(path))]
    silent += [
        f"{_where(path, node)}: {node.name}"
        for path in PACKAGE
        for node in _public(_parsed(path))
        if not ast.get_docstring(node)
    ]
    assert silent == []


def _is_record(node: ast.ClassDef) -> bool:
    return any(
        isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases
    ) or any("dataclass" in ast.dump(decorator) for decorator in node.decorator_list)


def test_fields_of_records_are_described() -> None:
    """Records of the data model and of the layers that read images: type and unit of each field."""
    # Columns of tables describe themselves (report_tables.py).
    models = tuple(path.stem for path in PACKAGE if path.stem.startswith("model"))
    modules = ("btf", "image", "linux", *models, "report", "tables", "elf")
    silent = []
    for path in PACKAGE:
        if path.relative_to(ROOT / "memcg_inspect").parts[0].removesuffix(".py") not in modules:
            continue
        for node in _parsed(path).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            described = set(re.findall(r":ivar (\w+): \S", ast.get_docstring(node) or ""))
            fields = [
                inner.target.id
                for inner in node.body
                if isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name)
            ]
            if _is_record(node) and not described.issuperset(fields):
                silent.append(f"{_where(path, node)}: {sorted({*fields} - described)}")
    assert silent == []


def _all(tree: ast.Module) -> list[str] | None:
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == "__all__" for t in node.targets
        ):
            names: list[str] = list(ast.literal_eval(node.value))
            return names
    return None


def test_all_names_what_is_there() -> None:
    for path in PACKAGE:
        names = _all(_parsed(path))
        if names is None:
            continue
        assert len(names) == len(set(names)), path
        defined = {
            name.id
            for node in _parsed(path).body
            for name in ast.walk(node)
            if isinstance(name, ast.Name)
        } | {
            node.name
            for node in _parsed(path).body
            if isinstance(node, ast.ClassDef | ast.FunctionDef)
        }
        imported = {name for _, name in _imported(_parsed(path))}
        assert set(names) <= defined | imported, path


def _called(function: Function) -> set[str]:
    return {
        node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name)
    }


def _asserts(function: Function, helpers: dict[str, list[Function]], depth: int = 4) -> bool:
    called = _called(function)
    if any(isinstance(n, ast.Assert) for n in ast.walk(function)) or "raises" in called:
        return True
    return depth > 0 and any(
        _asserts(helper, helpers, depth - 1) for name in called for helper in helpers.get(name, [])
    )


def test_every_test_asserts_something() -> None:
    helpers: dict[str, list[Function]] = {}
    for path in TESTS:
        for function in _functions(_parsed(path)):
            helpers.setdefault(function.name, []).append(function)
    idle = [
        f"{_where(path, function)}: {function.name}"
        for path in TESTS
        for function in _functions(_parsed(path))
        if function.name.startswith("test_") and not _asserts(function, helpers)
    ]
    assert idle == []


def test_no_test_module_imports_another() -> None:
    """Shared parts are in ``tests/support/``, which imports no test module either."""
    names = {path.stem for path in TESTS if path.name.startswith("test_")}
    wrong = [
        f"{path.relative_to(ROOT)}: {module}"
        for path in TESTS
        for module, name in _imported(_parsed(path))
        if names & {*module.split("."), name}
    ]
    assert wrong == []


def test_no_test_is_skipped() -> None:
    forbidden = {"skip", "skipif", "xfail", "importorskip", "skipTest", "skipUnless"}
    for path in TESTS:
        tree = _parsed(path)
        for node in ast.walk(tree):
            name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
            assert name not in forbidden, f"{_where(path, node)}: {name}"


def test_readers_look_names_up_in_their_image() -> None:
    """Image raises UnknownKernelError for a name that drgn does not find."""
    methods = {"type", "object", "variable", "constant", "function", "symbol", "symbols"}
    wrong = [
        _where(path, node)
        for path in PACKAGE
        if path.relative_to(ROOT / "memcg_inspect").parts[0] in ("linux", "collect", "views")
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Attribute | ast.Subscript)
        and isinstance(node.value, ast.Attribute | ast.Name)
        and getattr(node.value, "attr", getattr(node.value, "id", "")) in ("prog", "prog_")
        and (isinstance(node, ast.Subscript) or node.attr in methods)
    ]
    assert wrong == []


def test_walks_of_images_have_bounds() -> None:
    """Most helpers of drgn that follow links, or count, do not end on a damaged image."""
    used = {
        alias.name
        for path in PACKAGE
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("drgn.helpers")
        for alias in node.names
    }
    assert used <= WITH_BOUNDS, "drgn's helper may follow links for ever: see linux/lib"
    assert used == WITH_BOUNDS


def test_lookup_errors_are_drgns_own() -> None:
    """
    memcg_inspect/image/lookup.py takes a plain LookupError for one of drgn's.

    BTF is different: drgn calls it to look names up.
    """
    wrong = [
        _where(path, node)
        for path in PACKAGE
        if not path.is_relative_to(ROOT / "memcg_inspect" / "btf")
        for node in ast.walk(_parsed(path))
        if isinstance(node, ast.Raise)
        and node.exc is not None
        and any(
            isinstance(name, ast.Name) and name.id in ("LookupError", "ObjectNotFoundError")
            for name in ast.walk(node.exc)
        )
    ]
    assert wrong == []


#: What belongs to one machine and not to the project. Put together here, so that this file
#: does not hold what it looks for.
ELSEWHERE = re.compile(
    "|".join(
        (
            "/" + r"work/",
            "/" + r"home/\w",
            "/" + r"root/\w",
            "/" + r"Users/\w",
            r"bash" + r"_jobs",
            r"pypi" + r"\.org",
            r"python" + r"hosted\.org",
        )
    )
)


def test_no_path_of_one_machine() -> None:
    top = [path for path in ROOT.iterdir() if path.is_file() and path.name != ".git"]
    for path in [*CODE, *_files("docs"), *top]:
        text = path.read_bytes().decode(errors="replace")
        assert not (found := ELSEWHERE.search(text)), f"{path}: {found}"


def test_no_tracked_link_leads_out_of_the_project() -> None:
    """A link to an environment elsewhere stops scripts/setup in every clone (f3df514512)."""
    listed = subprocess.run(
        ["git", "ls-files", "--stage"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    links = [line.split("\t")[1] for line in listed.stdout.splitlines() if line[:6] == "120000"]
    assert all((ROOT / link).resolve().is_relative_to(ROOT) for link in links), links


def test_nothing_is_left_to_do() -> None:
    words = re.compile(r"\b(" + "|".join(("TO" + "DO", "FIX" + "ME", "X" + "XX")) + r")\b")
    for path in [*CODE, *_files("docs")]:
        assert not words.search(path.read_bytes().decode(errors="replace")), path


#: Runs a few cases of the pure tests where neither drgn nor the readers can be imported.
WITHOUT_DRGN = """
import sys
for name in ("drgn", "_drgn", *(f"memcg_inspect.{n}" for n in ("linux", "image", "collect"))):
    sys.modules[name] = None
from hypothesis import settings
settings.register_profile("few", max_examples=3, deadline=None, derandomize=True)
settings.load_profile("few")
import pytest
sys.exit(pytest.main(["--noconftest", "-q", "-p", "no:cacheprovider", *sys.argv[1:]]))
"""


def test_judging_and_rendering_need_no_drgn() -> None:
    # Most of the time is that of two files, and others call the same functions.
    files = ("checks/diagnosis/test_made_faults.py", "render/test_first_screen.py")
    slow = [f"--ignore=tests/{file}" for file in files]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_DRGN, "tests/checks", "tests/render", *slow],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d{2,} passed", done.stdout)


def test_judging_needs_no_terminal_library() -> None:
    script = (
        "import sys; sys.modules['rich'] = sys.modules['drgn'] = None; "
        "import memcg_inspect.checks.judge, memcg_inspect.render.documents; "
        "import memcg_inspect.render.schema"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
