"""Public things say what they are; nothing in the tree knows the machine it was written on."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from fnmatch import fnmatch
from pathlib import Path

from tests.architecture.source import REPO, base_names, modules

TEXT = {".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".cfg", ".html", ".js", ".css", ".json", ""}


def files(root: Path = REPO) -> list[Path]:
    """Tracked files, and new ones that git does not ignore. Outside a repository (an unpacked archive): all that are
    neither hidden nor in a folder that .gitignore names."""
    try:
        listing = subprocess.run(
            ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
            cwd=root, capture_output=True, text=True, check=False,
        )  # fmt: skip
        names = listing.stdout.splitlines() if listing.returncode == 0 else []
    except FileNotFoundError:
        names = []
    paths = [root / name for name in names] or [path for path in root.rglob("*") if not _left_out(path, root)]
    return [path for path in paths if path.is_file() and path.suffix in TEXT]


def _left_out(path: Path, root: Path) -> bool:
    """Hidden (but for the folder of the CI), or in a folder that .gitignore names."""
    ignored = [line.rstrip("/") for line in (root / ".gitignore").read_text(encoding="utf-8").split()]
    folders = path.relative_to(root).parts[:-1]
    return any(
        (part.startswith(".") and part != ".github") or any(fnmatch(part, pattern) for pattern in ignored)
        for part in folders
    )


def test_without_git_what_tools_leave_behind_is_not_read(tmp_path: Path) -> None:
    shutil.copy(REPO / ".gitignore", tmp_path)
    for name in ("m2flow/a.py", ".github/ci.yml", ".hypothesis/constants/x", "runs/one/env.json", "a.egg-info/b.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    found = {str(path.relative_to(tmp_path)) for path in files(tmp_path)}
    assert found == {".gitignore", "m2flow/a.py", ".github/ci.yml"}


def test_every_public_name_has_a_docstring() -> None:
    """Modules, classes, functions, methods. A method that a protocol names is explained there, once."""
    protocol_methods = {
        item.name
        for module in modules()
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef) and "Protocol" in base_names(node)
        for item in node.body
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    bare = []
    for module in modules():
        if not ast.get_docstring(module.tree):
            bare.append(f"{module.where}: the module")
        for owner in [module.tree, *(n for n in module.tree.body if isinstance(n, ast.ClassDef) and n.name[0] != "_")]:
            for node in owner.body:
                if not isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or node.name[0] == "_":
                    continue
                explained = isinstance(owner, ast.ClassDef) and node.name in protocol_methods
                setter = any(isinstance(d, ast.Attribute) and d.attr == "setter" for d in node.decorator_list)
                if not ast.get_docstring(node) and not explained and not setter:
                    bare.append(f"{module.where}:{node.lineno}: {node.name}")
    assert not bare, "no docstring:\n" + "\n".join(bare)


def test_nothing_swallows_every_error() -> None:
    swallowed = []
    for module in modules():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                swallowed.append(f"{module.where}:{node.lineno}: bare except")
            if isinstance(node, ast.ExceptHandler) and len(node.body) == 1 and isinstance(node.body[0], ast.Pass):
                names = ast.unparse(node.type) if node.type else ""
                if re.search(r"\b(Exception|BaseException)\b", names):
                    swallowed.append(f"{module.where}:{node.lineno}: except {names}: pass")
    assert not swallowed, "\n".join(swallowed)


def test_no_file_names_a_folder_of_one_machine_or_a_package_host() -> None:
    folders = ("work", "root", "home/[a-z]", "Users", "fa" + "rm")
    hosts = (r"pypi\.", r"pythonhosted\.", r"registry\.npm", r"deb\.debian", r"download\.pytorch", r"anaconda\.")
    pattern = re.compile(rf"(?<![\w.~-])/({'|'.join(folders)})(/|\b)|{'|'.join(hosts)}")
    found = []
    for path in files():
        if path.name == "LICENSE" or path == REPO / "tests/architecture/test_text.py":
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(REPO)}:{number}: {line.strip()[:120]}")
    assert not found, "\n".join(found)
