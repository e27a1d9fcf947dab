"""Count the tree: lines by kind, long functions, wide classes, imports upward and circles.

`python tools/tree_size.py [--root TREE]` counts the files that git tracks or would
track. Tile search is counted with the package.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

AREAS = {"backend_src/": "package", "tools/tile_search/": "package"}
AREAS |= {f"{name}/": name for name in ("csrc", "benchmarks", "tools", "clients", "tests")}
AREAS[""] = "other"
LINES = ["files", "lines", "code", "docstrings", "comments", "blanks"]
COLUMNS = [*LINES, "functions", "over 25", "over 50"]
SUFFIXES = (".py", ".cpp", ".h", ".cu", ".cuh")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
MAX_METHODS = 15
LAYERS_FILE = "tests/unit/test_architecture.py"
WINGS = ["clients", "benchmarks", "tools", "tests"]  # above the package's layers, lowest first


def tracked_files(root: Path) -> list[str]:
    """Return the paths of the files that git tracks or would track, relative to the tree."""
    command = ["git", "-C", str(root), "ls-files", "-co", "--exclude-standard"]
    names = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted({name for name in names if (root / name).is_file()})


def line_kinds(text: str, docstrings: set[int], mark: str) -> Counter[str]:
    """Return the number of lines of each kind. A comment behind code is code."""
    kinds: Counter[str] = Counter(files=1)
    for number, line in enumerate(text.splitlines(), 1):
        bare = line.strip()
        kind = "comments" if bare.startswith(mark) else "code" if bare else "blanks"
        kinds.update(["lines", "docstrings" if number in docstrings else kind])
    return kinds


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines of docstrings. A string below a constant is code."""
    kinds = (ast.Module, ast.ClassDef, *FUNCTIONS)
    nodes = [n for n in ast.walk(tree) if isinstance(n, kinds) and ast.get_docstring(n)]
    return {n for d in nodes for n in range(d.body[0].lineno, (d.body[0].end_lineno or 0) + 1)}


def function_counts(tree: ast.AST) -> Counter[str]:
    """Return the number of functions, and of those with over 25 and 50 lines from `def` on."""
    functions = [node for node in ast.walk(tree) if isinstance(node, FUNCTIONS)]
    lengths = [(node.end_lineno or 0) - node.lineno + 1 for node in functions]
    over = {f"over {limit}": sum(n > limit for n in lengths) for limit in (25, 50)}
    return Counter(functions=len(lengths), **over)


def wide_classes(trees: dict[str, ast.AST]) -> list[str]:
    """Return the classes with many public methods and properties, and how many they have."""
    nodes = [(name, node) for name, tree in trees.items() for node in ast.walk(tree)]
    classes = [(f"{name}: {c.name}", c.body) for name, c in nodes if isinstance(c, ast.ClassDef)]
    methods = [(name, {m.name for m in body if isinstance(m, FUNCTIONS)}) for name, body in classes]
    counts = [(name, sum(m[0] != "_" for m in found)) for name, found in methods]
    return [f"{name} {count}" for name, count in counts if count > MAX_METHODS]


def imports_of(tree: ast.AST, modules: set[str]) -> set[str]:
    """Return the modules of the tree that a module imports, also in a function or for types."""
    names: set[Any] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            members = {f"{node.module}.{alias.name}" for alias in node.names}
            names |= (members & modules) or {node.module}
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= {text.value for text in node.args if isinstance(text, ast.Constant)}
    return names & modules


def module_graph(trees: dict[str, ast.AST]) -> dict[str, set[str]]:
    """Return the modules that each module of the package and its wings imports."""
    dotted = {n: n.removeprefix("backend_src/")[:-3].replace("/", ".") for n in trees}
    modules = {d.removesuffix(".__init__"): trees[n] for n, d in dotted.items()}
    inside = {n: tree for n, tree in modules.items() if n.split(".")[0] in {"vlora", *WINGS}}
    return {name: imports_of(tree, {*inside} - {name}) for name, tree in inside.items()}


def upward_imports(graph: dict[str, set[str]], root: Path) -> list[str]:
    """Return the imports from a lower layer or wing to a higher one."""
    text = (root / LAYERS_FILE).read_text().split("\nLAYERS = ")[1]
    layers = ast.literal_eval(text[: text.index("\n]") + 2])
    ranks = [*({f"vlora.{name}" for name in layer} for layer in layers), *({w} for w in WINGS)]
    level = {name: number for number, names in enumerate(ranks) for name in names}
    part = {n: ".".join(n.split(".")[: 2 if n.startswith("vlora.") else 1]) for n in graph}
    # vlora/__init__ has no layer: it prepares the process, and every module imports it.
    edges = [(a, b) for a, others in graph.items() for b in others if "vlora" not in (a, b)]
    return sorted(f"{a} imports {b}" for a, b in edges if level[part[a]] < level[part[b]])


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the groups of modules that import each other, directly or indirectly."""
    reach = {module: set(others) for module, others in graph.items()}
    for middle in graph:
        for others in reach.values():
            others |= reach[middle] if middle in others else set()
    groups = {tuple(sorted(n for n in reach[m] if m in reach[n])) for m in graph if m in reach[m]}
    return sorted(" - ".join(group) for group in groups)


def count_tree(root: Path) -> dict[str, Any]:
    """Return all counts of the tree."""
    names = tracked_files(root)
    texts = {n: (root / n).read_text() for n in names if n.endswith(SUFFIXES)}
    trees: dict[str, ast.AST] = {n: ast.parse(t) for n, t in texts.items() if n[-3:] == ".py"}
    areas: dict[str, Counter[str]] = {area: Counter() for area in AREAS.values()}
    for name, text in texts.items():
        counts = areas[next(area for prefix, area in AREAS.items() if name.startswith(prefix))]
        tree = trees.get(name, ast.Module([], []))
        counts.update(line_kinds(text, docstring_lines(tree), "#" if name in trees else "//"))
        counts.update(function_counts(tree))
    graph = module_graph(trees)
    pages = [(root / name).read_text() for name in names if name.endswith(".md")]
    return {
        "areas": areas,
        "words of documents": sum(len(page.split()) for page in pages),
        "imports in the tree": sum(map(len, graph.values())),
        f"classes with over {MAX_METHODS} public methods": wide_classes(trees),
        "imports upward": upward_imports(graph, root),
        "circles of imports": circles(graph),
    }


def main() -> None:
    """Count the tree and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    counts = count_tree(parser.parse_args().root)
    print(" " * 10, *(f"{column:>10}" for column in COLUMNS))
    for area, row in counts.pop("areas").items():
        print(f"{area:10}", *(f"{row[column]:10,}" for column in COLUMNS))
    for title, found in counts.items():
        items = [len(found), *found] if isinstance(found, list) else [found]
        print(f"{title}:", *items, sep="\n  ")


if __name__ == "__main__":
    main()
