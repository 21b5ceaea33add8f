"""Names and texts in a syntax tree: resolved through imports, folded from their pieces."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

#: Of a docstring, for those who look for an explanation.
_LONGEST_DOC = 4000


class Above(NamedTuple):
    """The statement around a node, and those around that."""

    statement: ast.stmt
    outer: Above | None


@dataclass
class ReadModule:
    requested: frozenset[str]
    #: Full names by those that imports give.
    imported: dict[str, str] = field(default_factory=dict)
    #: Values of names that are assigned once, at the top.
    constants: dict[str, ast.expr] = field(default_factory=dict)
    #: Parts and letters that may still be put together: names of names of texts could stand for gigabytes.
    left: int = 3_000_000

    def spend(self, count: int) -> bool:
        self.left -= count
        return self.left >= 0


def walk(tree: ast.Module) -> Iterator[tuple[ast.AST, Above | None]]:
    left: list[tuple[ast.AST, Above | None]] = [(tree, None)]
    while left:
        node, above = left.pop()
        if isinstance(node, ast.stmt):
            above = Above(node, above)
        yield node, above
        children = list(ast.iter_child_nodes(node))
        left.extend((child, above) for child in reversed(children))


def docstring(node: ast.AST) -> ast.Constant | None:
    if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return None
    first = node.body[0] if node.body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
        return first.value if isinstance(first.value.value, str) else None
    return None


def around(above: Above | None, tree: ast.Module) -> tuple[tuple[int, ...], str]:
    """First lines of the statements around a place, and the docstrings of the functions around it."""
    starts: list[int] = []
    documents: list[ast.Constant | None] = []
    while above is not None and len(starts) < 50:
        statement, above = above
        decorators = getattr(statement, "decorator_list", [])
        starts.append(min([statement.lineno, *(one.lineno for one in decorators)]))
        documents.append(docstring(statement))
    documents.append(docstring(tree))
    texts = (str(one.value)[:_LONGEST_DOC] for one in documents if one is not None)
    return tuple(starts), "\n".join(texts)


def collect_names(tree: ast.Module, module: ReadModule) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                module.imported[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                module.imported[alias.asname or alias.name] = f"{node.module or ''}.{alias.name}"
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
            if isinstance(target, ast.Name):
                module.constants.setdefault(target.id, node.value)


def full_name(node: ast.AST, module: ReadModule) -> str:
    """The dotted name of an expression, through imports and getattr; empty for others."""
    names: list[str] = []
    while module.spend(1):
        if isinstance(node, ast.Attribute):
            names.append(node.attr)
            node = node.value
        elif isinstance(node, ast.Call) and is_call(node, "getattr") and len(node.args) > 1:
            names.append(text_of(node.args[1], module) or "")
            node = node.args[0]
        else:
            break
    if isinstance(node, ast.Name):
        names.append(module.imported.get(node.id, node.id))
    elif isinstance(node, ast.Call):  # `__import__("base64").b64decode`, `Path(x).glob`
        inner = node.func
        is_import = isinstance(inner, ast.Name) and inner.id == "__import__"
        is_import = is_import or (isinstance(inner, ast.Attribute) and inner.attr == "import_module")
        names.append(text_of(node.args[0], module) or "" if is_import and node.args else "()")
    return ".".join(reversed(names))


def is_call(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == name


def text_of(node: ast.AST | None, module: ReadModule, depth: int = 0) -> str | None:
    """The text that an expression of constants spells; a placeholder for what is not known in an f-string."""
    if node is None or depth > 50 or not module.spend(1):
        return None
    if isinstance(node, ast.Constant):
        value = node.value
        return value if isinstance(value, str) else None
    if isinstance(node, ast.Name):
        found = module.constants.get(node.id)
        return text_of(found, module, depth + 25) if found is not None else None
    if isinstance(node, ast.JoinedStr):
        return _joined("", [text_of(part, module, depth + 1) or "{}" for part in node.values], module)
    if isinstance(node, ast.FormattedValue):
        return text_of(node.value, module, depth + 1)
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Div)):
        left, right = (text_of(side, module, depth + 1) for side in (node.left, node.right))
        joint = "/" if isinstance(node.op, ast.Div) else ""
        return _joined(joint, [left, right], module)
    if isinstance(node, ast.Call):
        return _called_text(node, module, depth)
    if isinstance(node, ast.Subscript) and _is_reversed(node.slice):
        found_text = text_of(node.value, module, depth + 1)
        return _joined("", [found_text[::-1]], module) if found_text is not None else None
    return None


def _joined(between: str, texts: Sequence[str | None], module: ReadModule) -> str | None:
    """The texts together; None if one is not known, or if there is too much of them."""
    known = [text for text in texts if text is not None]
    length = sum(map(len, known)) + len(between) * len(known)
    return between.join(known) if len(known) == len(texts) and module.spend(length) else None


def _is_reversed(node: ast.expr) -> bool:
    """`[::-1]`"""
    step = node.step if isinstance(node, ast.Slice) else None
    minus = isinstance(step, ast.UnaryOp) and isinstance(step.op, ast.USub)
    return minus and isinstance(node, ast.Slice) and node.lower is None and node.upper is None


def _called_text(node: ast.Call, module: ReadModule, depth: int) -> str | None:
    """`"".join([...])`, `chr(98)`, `Path("…")`, `bytes([...]).decode()`."""
    function = node.func
    if isinstance(function, ast.Name) and node.args:
        first = node.args[0]
        if function.id == "chr" and isinstance(first, ast.Constant) and isinstance(first.value, int):
            return chr(first.value) if 0 <= first.value < 0x110000 else None
        if function.id in ("Path", "str"):
            return text_of(first, module, depth + 1)
    if isinstance(function, ast.Attribute) and function.attr == "join" and len(node.args) == 1:
        between, parts = text_of(function.value, module, depth + 1), node.args[0]
        if isinstance(parts, (ast.List, ast.Tuple)) and between is not None:
            return _joined(between, [text_of(part, module, depth + 1) for part in parts.elts], module)
        if (isinstance(parts, ast.Call) and is_call(parts, "map")) or isinstance(parts, ast.GeneratorExp):
            return _spelled_by_numbers(parts)
    if isinstance(function, ast.Attribute) and function.attr == "decode":
        return _spelled_by_numbers(function.value)
    return None


def _spelled_by_numbers(node: ast.AST) -> str | None:
    """Texts from lists of numbers: `bytes([98, 54])`, `map(chr, [98, 54])`."""
    numbers = next((one for one in ast.walk(node) if isinstance(one, (ast.List, ast.Tuple))), None)
    found = [getattr(one, "value", None) for one in numbers.elts] if numbers is not None else []
    values = [one for one in found if isinstance(one, int) and 0 <= one < 256]
    return "".join(map(chr, values)) if values and len(values) == len(found) else None
