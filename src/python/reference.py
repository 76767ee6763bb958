"""Writes the reference of the Python package from its docstrings: docs/reference/python.md.

    python3 src/python/reference.py [--check]

--check: exit code 1 if the document is not what this would write. It imports nothing of the package.
"""

import ast
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PACKAGE = ROOT / "src" / "python" / "package" / "convoke_dist"
DOCUMENT = ROOT / "docs" / "reference" / "python.md"
HEAD = """# The Python package

The public names of `convoke_dist`, from its docstrings (`src/python/reference.py` writes this page).
[PyTorch on convoke](../guides/pytorch.md) is the guide.
"""
# Each part of the reference: its heading, its file, and the names in it; all public ones if none are given.
PARTS = [
    ("convoke_dist: groups", "group.py", ["init", "Group", "Work", "Message"]),
    ("convoke_dist: starting ranks", "launch.py", ["launch", "LaunchError"]),
    ("convoke_dist: the store", "_core.pyi", ["Store", "StoreServer"]),
    ("convoke_dist: exceptions", "errors.py", None),
    ("convoke_dist.torch", "torch/__init__.py", None),
]


def names(tree):
    """Returns `__all__`."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return ast.literal_eval(node.value)
    raise SystemExit("reference: a module has no __all__")


def signature(node):
    """Returns the parameters, without `self`, and the type of the result."""
    arguments = ast.unparse(node.args)
    first, _, rest = arguments.partition(", ")
    arguments = rest if first in ("self", "cls") else arguments
    result = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    return f"({arguments}){result}"


def is_property(node):
    return any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)


def text(node):
    return ast.get_docstring(node) or ""


def function(node, prefix=""):
    kind = "" if not is_property(node) else ": property"
    shown = f"{prefix}{node.name}" + (signature(node) if not kind else f"{signature(node)[2:]}")
    return f"`{shown}`{kind}\n\n{text(node)}\n"


def members(node):
    """Returns the public methods and properties."""
    functions = [one for one in node.body if isinstance(one, ast.FunctionDef)]
    return [one for one in functions if not one.name.startswith("_")]


def describe(node):
    if isinstance(node, ast.FunctionDef):
        return f"### {node.name}\n\n{function(node)}"
    bases = ", ".join(ast.unparse(base) for base in node.bases)
    start = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    made = f"`{node.name}{signature(start).partition(' -> ')[0]}`\n\n" if start and "_core" not in ast.unparse(start.args) else ""
    head = f"### {node.name}{f' ({bases})' if bases else ''}\n\n{made}{text(node)}\n"
    return "\n".join([head] + [function(member, f"{node.name}.") for member in members(node)])


def write():
    parts = [HEAD]
    for heading, file, chosen in PARTS:
        tree = ast.parse((PACKAGE / file).read_text())
        nodes = {node.name: node for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        parts.append(f"## {heading}\n")
        parts += [describe(nodes[name]) for name in chosen or names(tree)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).rstrip() + "\n"


def main():
    if sys.argv[1:] == ["--check"]:
        if DOCUMENT.read_text() != write():
            raise SystemExit(f"reference: {DOCUMENT} is not up to date: run python3 src/python/reference.py")
    elif sys.argv[1:]:
        raise SystemExit(__doc__)
    else:
        DOCUMENT.write_text(write())


if __name__ == "__main__":
    main()
