"""Compare our facts on tournaments with upstream's present files, and say in words what has changed.

Upstream's files of constants are parsed and never run: names, literals and sums of them are enough. A value
that cannot be read so, or is no longer there, is a change too. The daemon runs this as a process of its own.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from core.domain.records import printable
from core.domain.tournament_rules import AS_OF, FACTS, UPSTREAM, Fact
from miner.alerts.upstream_rules import PROTOCOL, RulesFailed
from miner.api.tournament import RulesCheck, UpstreamChange
from miner.support.child_main import serve
from miner.tournament.check.licence import digest_of
from miner.tournament.checkout import few
from miner.tournament.polite_client import PoliteClient, SiteError

#: Upstream's files, whatever their newest commit is.
RAW_UPSTREAM = UPSTREAM.replace("github.com", "raw.githubusercontent.com") + "/HEAD"
#: The largest of their files of constants has 17 kilobytes.
MOST_BYTES = 400_000
#: Between two files.
PAUSE_S = 0.2
_LONG, _MOST_SHOWN = 60, 500
_NOT_THERE = "no longer there"


class Unreadable(Exception):
    """A value that is not written as one can be read without running it."""


class Member(str):
    """A member of an enumeration, by its name in upstream's code."""

    __slots__ = ()


# — Python without running it

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
}
_LARGEST, _MOST_PARTS = 1e18, 20_000


@dataclass
class Constants:
    """The values that a module gives names to, at its top level."""

    found: Mapping[str, ast.expr | ast.ClassDef]
    #: Names whose value is being read: one that needs itself has none.
    open: set[str] = field(default_factory=set)
    #: Parts that may still be read: names of names of lists could stand for billions.
    left: int = _MOST_PARTS

    @classmethod
    def of(cls, text: str) -> Constants:
        try:
            module = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise Unreadable("the file is not Python") from None
        found: dict[str, ast.expr | ast.ClassDef] = {}
        for statement in module.body:
            match statement:
                case ast.Assign(targets=[ast.Name(id=name)], value=value):
                    found[name] = value
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    found[name] = value
                case ast.ClassDef(name=name):
                    found[name] = statement
        return cls(found)

    def __getitem__(self, name: str) -> object:
        if name not in self.found:
            raise Unreadable(f"it needs {name}, which is not in this file" if self.open else _NOT_THERE)
        if name in self.open:
            raise Unreadable(f"{name} needs itself")
        self.open.add(name)
        try:
            return self._value(self.found[name])
        except RecursionError:
            raise Unreadable(f"{name} is nested too deeply") from None
        finally:
            self.open.discard(name)

    def _value(self, node: ast.AST) -> object:
        self.left -= 1
        if self.left < 0:
            raise Unreadable("it has too many parts")
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None as value):
                return value
            case ast.Name(id=name):
                return self[name]
            case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts):
                return tuple(self._value(part) for part in parts)
            case ast.Dict(keys=keys, values=values) if None not in keys:
                return {
                    _key(self._value(key)): self._value(one)
                    for key, one in zip(keys, values, strict=True)
                    if key
                }
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return -_number(self._value(inner))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
                return self._sum(type(op), left, right)
            case ast.Attribute(value=ast.Name(id=owner), attr=name):
                return self._members(owner).get(name, Member(name))
            case ast.Call(func=ast.Name(id="float"), args=[ast.Constant(value="inf")]):
                return math.inf
            case ast.Call(func=ast.Name(id="frozenset" | "set" | "tuple" | "list"), args=[inner]):
                return self._value(inner)
            case ast.ClassDef():
                return tuple(self._members(node.name).values())
        raise Unreadable(f"written as {type(node).__name__}, which is not read")

    def _sum(self, op: type[ast.operator], left: ast.expr, right: ast.expr) -> float:
        try:
            value = _ARITHMETIC[op](_number(self._value(left)), _number(self._value(right)))
        except (ZeroDivisionError, OverflowError):
            raise Unreadable("the sum has no value") from None
        return _number(value)

    def _members(self, owner: str) -> dict[str, object]:
        """An enumeration's members, if it is in this file."""
        node = self.found.get(owner)
        body = node.body if isinstance(node, ast.ClassDef) else []
        return {
            one.targets[0].id: one.value.value
            for one in body
            if isinstance(one, ast.Assign)
            and isinstance(one.targets[0], ast.Name)
            and isinstance(one.value, ast.Constant)
        }


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _LARGEST:
        raise Unreadable("it is not a number")
    return value


def _key(value: object) -> str | float:
    if not isinstance(value, str | int | float):
        raise Unreadable("a key is neither a text nor a number")
    return value


def _json_value(text: str, path: str) -> object:
    """Follow a path of keys, through lists to each of their values; `*` is the whole."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise Unreadable("the file is not JSON") from None
    for key in path.split(".") if path != "*" else ():
        try:
            value = [one[key] for one in value] if isinstance(value, list) else value[key]
        except (KeyError, TypeError, IndexError):
            raise Unreadable(_NOT_THERE) from None
    return tuple(value) if isinstance(value, list) else value


def read_fact(fact: Fact, content: bytes) -> object:
    """Upstream's value of a fact in the present text of its file, in our unit. `Unreadable`."""
    assert fact.constant is not None
    try:
        text = content.decode("utf-8")
        if fact.constant == "digest":
            return digest_of(content)
    except UnicodeDecodeError:
        raise Unreadable("the file is not UTF-8") from None
    if fact.source.path.endswith(".json"):
        return _json_value(text, fact.constant)
    value = Constants.of(text)[fact.constant]
    return _number(value) * fact.unit if fact.unit != 1 else value


# — what differs


def is_same(ours: object, theirs: object) -> bool:
    """Equal as rules: order counts in tuples, and enumerations go by their members' names."""
    if isinstance(ours, str) is not isinstance(theirs, str):
        return False
    if isinstance(ours, str) and isinstance(theirs, str):
        named = isinstance(theirs, Member) and _bare(ours) == _bare(theirs)
        return named or ours.rstrip("/") == theirs.rstrip("/")
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        return is_same(frozenset(ours.items()), tuple(theirs.items()))
    if isinstance(ours, frozenset) and isinstance(theirs, Collection):
        left = [one for one in theirs if not any(is_same(other, one) for other in ours)]
        return len(ours) == len(theirs) and not left
    if isinstance(ours, Sequence) and isinstance(theirs, Sequence):
        return len(ours) == len(theirs) and all(map(is_same, ours, theirs))
    if isinstance(ours, int | float) and isinstance(theirs, int | float) and not isinstance(theirs, bool):
        return math.isclose(ours, theirs, rel_tol=1e-9)
    return type(ours) is type(theirs) and ours == theirs


def _bare(name: str) -> str:
    return name.casefold().replace("_", "").replace("-", "")


def shown(value: object) -> str:
    """A value for people, on one line."""
    match value:
        case str():
            return printable(value, keep="")
        case bool() | None:
            return str(value).lower()
        case float() | int():
            return f"{value:.12g}"
        case Mapping():
            return ", ".join(f"{shown(key)}: {shown(one)}" for key, one in value.items())
        case frozenset():
            return ", ".join(sorted(map(shown, value)))
        case Collection():
            return ", ".join(f"({shown(one)})" if isinstance(one, tuple) else shown(one) for one in value)
    return str(value)


def difference(ours: object, theirs: object) -> tuple[str, str]:
    """Old and new for people; of long lists only what is new and what is gone."""
    old, new = shown(ours), shown(theirs)
    lists = all(isinstance(one, Collection) and not isinstance(one, str) for one in (ours, theirs))
    if not lists or max(len(old), len(new)) <= _LONG:
        return old, new[:_MOST_SHOWN]
    before, after = _parts(ours), _parts(theirs)
    added = [one for one in after if one not in before]
    gone = [one for one in before if one not in after]
    words = [f"new: {few(added)}" if added else "", f"gone: {few(gone)}" if gone else ""]
    changed = "; ".join(filter(None, words)) or "another order"
    return f"{len(before)} of them", f"{len(after)}; {changed}"[:_MOST_SHOWN]


def _parts(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [f"{shown(key)}: {shown(one)}" for key, one in value.items()]
    return [shown(one) for one in value]


def compare_fact(fact: Fact, content: bytes) -> UpstreamChange | None:
    """The change of a fact in the present text of its file."""
    try:
        theirs = read_fact(fact, content)
        if is_same(fact.value, theirs):
            return None
        old, new = difference(fact.value, theirs)
    except (Unreadable, OverflowError, RecursionError) as error:
        old, new = difference(fact.value, fact.value)[0], printable(str(error)[:_MOST_SHOWN], keep="")
    return UpstreamChange(
        name=fact.name,
        file=fact.source.path,
        constant=fact.constant or "",
        old=old,
        new=new,
        uses=fact.uses,
    )


def _gone(path: str, facts: Sequence[Fact]) -> UpstreamChange:
    uses = "; ".join(dict.fromkeys(part for fact in facts for part in fact.uses.split("; ")))
    old = f"{len(facts)} rule{'s' * (len(facts) > 1)} read there"
    return UpstreamChange(name=path, file=path, constant="", old=old, new="the file is gone", uses=uses)


# — reading upstream


def check_rules(
    upstream: str = RAW_UPSTREAM,
    *,
    cache: Path,
    say: Callable[[str], None] = lambda line: None,
    now: Callable[[], float] = time.time,
) -> RulesCheck:
    """Compare with a checkout, or with files below an address. What does not answer is named as a problem."""
    watched = [fact for fact in FACTS if fact.constant is not None]
    paths = list(dict.fromkeys(fact.source.path for fact in watched))
    changes: list[UpstreamChange] = []
    gone: list[str] = []
    compared, problem = 0, None
    folder = Path(upstream) if "://" not in upstream else None
    with PoliteClient(cache, pause_s=PAUSE_S) as client:
        for number, path in enumerate(paths, 1):
            say(f"{number} of {len(paths)}: {path}")
            of_file = [fact for fact in watched if fact.source.path == path]
            try:
                content = _file(folder, path) if folder else _page(client, f"{upstream.rstrip('/')}/{path}")
            except SiteError as error:
                problem = f"{error}; {len(watched) - compared} of {len(watched)} rules are not compared"
                break
            compared += len(of_file)
            if content is None:
                gone.append(path)
                changes.append(_gone(path, of_file))
                continue
            changes += filter(None, (compare_fact(fact, content) for fact in of_file))
    if len(gone) == len(paths):
        changes, compared, problem = [], 0, f"none of upstream's {len(paths)} files is at {upstream}"
    return RulesCheck(
        as_of=AS_OF, checked_at=now(), compared=compared, changes=tuple(changes), problem=problem
    )


def _file(folder: Path, path: str) -> bytes | None:
    try:
        with (folder / path).open("rb") as file:
            return file.read(MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise SiteError(f"{folder / path}: {error.strerror}") from None


def _page(client: PoliteClient, url: str) -> bytes | None:
    try:
        answer = client.get(url, max_bytes=MOST_BYTES)
    except SiteError as error:
        if error.status == httpx.codes.NOT_FOUND:
            return None
        raise
    if answer.stale:
        raise SiteError(answer.stale)
    return answer.body


def main() -> int:
    return serve(
        PROTOCOL,
        lambda order, write: check_rules(order.upstream or RAW_UPSTREAM, cache=order.cache),
        lambda error, order: RulesFailed(error=str(error)),
        niceness=10,
    )


if __name__ == "__main__":
    raise SystemExit(main())
