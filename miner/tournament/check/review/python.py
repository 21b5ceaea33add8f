"""Python as the cheat review reads it: by its syntax tree, with names resolved through imports.

Texts that are put together from constants are folded first: `"b64" + "decode"` is what it spells.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from miner.tournament.check.review.concerns import (
    CODE,
    DATA,
    DYNAMIC,
    EMBEDDED,
    EVALUATOR,
    HIDDEN,
    NETWORK,
    SPECIAL,
    SURROUNDINGS,
    WEIGHTS,
    Concern,
    Gravity,
    Place,
)
from miner.tournament.check.review.lines import ADDRESS, address_concern, command_places, text_places
from miner.tournament.check.review.syntax import (
    ReadModule,
    around,
    collect_names,
    docstring,
    full_name,
    text_of,
    walk,
)
from miner.tournament.check.sources import MOST_PARSED_BYTES

#: By the last part of a name, whichever package it is of.
_WEIGHT_FETCHES = frozenset(
    {
        *(
            "snapshot_download",
            "hf_hub_download",
            "hf_hub_url",
            "cached_download",
            "load_state_dict_from_url",
        ),
        *("download_url_to_file", "urlretrieve", "dataset_snapshot_download"),
        *("model_file_download", "gdown.download", "wget.download", "hub.load", "spacy.cli.download"),
        *("git_clone", "Repo.clone_from", "Repository.clone_from"),
    }
)
_DATA_FETCHES = frozenset(
    {
        *("nltk.download", "tfds.load", "fetch_openml", "fetch_20newsgroups", "kagglehub.dataset_download"),
        *("kagglehub.model_download", "MsDataset.load", "get_dataset_config_names"),
    }
)
#: Readers of local files, which `load_dataset` is named for.
_FORMATS = frozenset(
    {*("json", "csv", "parquet", "text", "arrow", "pandas", "imagefolder", "audiofolder", "webdataset")}
)
_NETWORK = re.compile(
    r"(?:^|\.)(?:requests\.(?:get|post|put|request|head|Session|session)|urllib\.request\.\w+|urlopen"
    r"|urllib3\.\w+|httpx\.(?:get|post|put|stream|request|Client|AsyncClient)|aiohttp\.ClientSession"
    r"|socket\.create_connection|websockets?\.\w*connect\w*|ftplib\.\w+|smtplib\.\w+|paramiko\.\w+"
    r"|http\.client\.HTTPS?Connection|upload_file|upload_folder|upload_large_folder|push_to_hub|create_repo"
    r"|boto3\.\w+|Minio)$"
)
_NAMES_OF_HOST = re.compile(
    r"(?:^|\.)(?:socket\.(?:gethostname|getfqdn|gethostbyname)|platform\.node|uuid\.getnode"
    r"|getpass\.getuser|psutil\.(?:process_iter|users|net_if_addrs)"
    r"|nodename)$"
)
_COMMANDS = re.compile(
    r"(?:^|\.)(?:os\.(?:system|popen|exec\w+|spawn\w+)|subprocess\.\w+|Popen|check_call|check_output"
    r"|create_subprocess_\w+)$"
)
#: A constant of another module that is not known here.
_CACHE_NAME = re.compile(r"[\w.]*CACHE\w*$|[\w.]*(?:cache\w*data|data\w*cache)\w*$")
_LISTS = frozenset({"glob", "rglob", "iglob", "listdir", "scandir", "walk", "iterdir"})
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(?:/[\w.-]+)?")
_LOADS_MODEL = frozenset({"from_pretrained", "SentenceTransformer", "from_single_file"})
#: Names of one task, one miner, one validator: whoever compares them treats one unlike others.
_IDENTITY = re.compile(r"(?i)^(?:\w*_)?(?:task_?id|hotkey|coldkey|repo_name|tournament_?id|validator)$")
_DATASET_NAME = re.compile(r"(?i)^(?:\w+_)?dataset_(?:name|id|url|repo|zip)$|^data_url$")
_NOW = re.compile(
    r"(?:^|\.)(?:time\.(?:time|localtime|gmtime|strftime)|datetime\.(?:now|utcnow|today)|date\.today)$"
)
_PARTS_OF_DATE = frozenset({"weekday", "isoweekday", "isocalendar", "isoformat", "strftime"})
_DATE_ATTRIBUTES = frozenset({"hour", "day", "month", "year", "tm_wday", "tm_hour", "tm_mday", "tm_yday"})
#: What nobody spells in pieces who has nothing to hide.
_SPELLED = re.compile(
    r"b(?:16|32|64|85)decode|^(?:exec|eval|compile|__import__|marshal|base64|subprocess|urlopen|system|popen)$"
    r"|snapshot_download|hf_hub_download|huggingface|load_dataset|https?://|docker\.sock|urlretrieve|requests"
    r"|task_?id|hotkey"
)
_UNPICKLES = re.compile(r"(?:^|\.)(?:pickle|cPickle|dill|cloudpickle|joblib|_pickle)\.(?:loads?|Unpickler)$")
_DECODES = re.compile(
    r"(?:^|\.)(?:b(?:16|32|64|85)decode|a85decode|urlsafe_b64decode|standard_b64decode|decodebytes|unhexlify"
    r"|a2b_\w+|bytes\.fromhex|bytearray\.fromhex|decompress)$"
)
_HEX = re.compile(r"[0-9a-f]{16,64}")
#: Of a literal, beyond which it is data and no code.
_MOST_ITEMS, _MOST_TEXT, _MOST_BYTES_LITERAL = 1000, 20_000, 2000
#: Of a directory's name.
_LONGEST_PLACE = 200
#: Seconds since 1970 of 2020: a larger number beside a clock is a date.
_DATE_SECONDS = 1_577_836_800


def read_python(text: str, requested: frozenset[str]) -> Iterator[Place]:
    """Find all that a reviewer would look at; a file that cannot be parsed is a place itself."""
    if len(text) > MOST_PARSED_BYTES:
        yield Place(0, HIDDEN, "a file too large to be read")
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its escapes
            tree = ast.parse(text)
    except (SyntaxError, ValueError):
        yield Place(0, DYNAMIC, "it cannot be parsed, so it was not read")
        return
    except (RecursionError, MemoryError):
        yield Place(0, HIDDEN, "code too deep to be parsed")
        return
    module = ReadModule(requested)
    documents = {id(found) for found in map(docstring, ast.walk(tree)) if found is not None}
    collect_names(tree, module)
    seen: set[tuple[int, str]] = set()
    for node, above in walk(tree):
        for concern, what, severity in _of_node(node, module, documents):
            line = getattr(node, "lineno", 0)
            if (line, concern.name) not in seen:
                seen.add((line, concern.name))
                yield Place(line, concern, what, severity, *around(above, tree))
    if module.left < 0:
        yield Place(0, HIDDEN, "so much is put together from pieces that not all was read")


Found = Iterator[tuple[Concern, str, Gravity | None]]


def _of_node(node: ast.AST, module: ReadModule, documents: set[int]) -> Found:
    reader = _READERS.get(type(node))
    if reader is None or (id(node) in documents and len(getattr(node, "value", "")) <= _MOST_TEXT):
        return
    yield from reader(node, module)


def _of_constant(node: ast.Constant, module: ReadModule) -> Found:
    value = node.value
    if isinstance(value, bytes) and len(value) > _MOST_BYTES_LITERAL:
        yield EMBEDDED, f"{len(value):,} bytes in the code", None
    if not isinstance(value, str):
        return
    if len(value) > _MOST_TEXT:
        yield EMBEDDED, f"a text of {len(value):,} characters in the code", None
    if len(value) > 4000 or (" " in value and len(value) > 300):
        return  # prose
    for _, concern, what in text_places(value):
        yield concern, what, None
    if (url := ADDRESS.match(value)) and (behind := address_concern(url[0])):
        yield behind, f"names {value[:70]}", Gravity.SAID if behind is CODE else Gravity.ASKS


def _of_joined(node: ast.AST, module: ReadModule) -> Found:
    """Texts in pieces. Their constants are read by themselves: only what they spell together is new."""
    text = text_of(node, module)
    if text is None:
        return
    pieces = [text_of(one, module) for one in ast.walk(node) if isinstance(one, (ast.Constant, ast.Name))]
    alone = "\n".join(one for one in pieces if one is not None and one != text)
    if not isinstance(node, ast.JoinedStr) and (found := _SPELLED.search(text)) and found[0] not in alone:
        yield HIDDEN, f"{text[:50]!r} is put together from pieces", None
    seen = {what for _, _, what in text_places(alone)}
    for _, concern, what in text_places(text):
        if concern is not EVALUATOR and what not in seen:
            yield concern, what, None


def _of_call(node: ast.Call, module: ReadModule) -> Found:
    name = full_name(node.func, module)
    last = name.rpartition(".")[2]
    yield from _fetches(node, name, last, module)
    yield from _runs(node, name, last, module)
    yield from _looks_around(node, name, last, module)
    if last == "join" or last in ("chr", "decode"):
        yield from _of_joined(node, module)


def _fetches(node: ast.Call, name: str, last: str, module: ReadModule) -> Found:
    first = text_of(node.args[0] if node.args else _keyword(node, "path"), module)
    is_local = isinstance(local := _keyword(node, "local_files_only"), ast.Constant) and local.value is True
    if last == "load_dataset" or any(name.endswith(one) for one in _DATA_FETCHES):
        files = text_of(_keyword(node, "data_files"), module) or ""
        if first in module.requested:
            yield DATA, f"loads {first}, which is requested", Gravity.SAID
        elif last != "load_dataset" or (first and first not in _FORMATS and not first.startswith(("/", "."))):
            yield DATA, f"{last} fetches {first or 'data'}", None
        elif "://" in files:
            yield DATA, f"{last} fetches {files[:70]}", None
    elif is_local:
        return
    elif last in _LOADS_MODEL and first and _HUB_ID.fullmatch(first) and "." not in first.partition("/")[0]:
        yield WEIGHTS, f"{last} of {first}", Gravity.ASKS
    elif last == "pipeline" and (model := text_of(_keyword(node, "model"), module)):
        yield WEIGHTS, f"{last} of {model[:70]}", Gravity.ASKS


def _of_name(node: ast.Name | ast.Attribute, module: ReadModule) -> Found:
    """Any use of a function that fetches or asks around, called or handed on."""
    if not isinstance(node.ctx, ast.Load):
        return
    name = full_name(node, module)
    last = name.rpartition(".")[2]
    if last in _WEIGHT_FETCHES or ".".join(name.split(".")[-2:]) in _WEIGHT_FETCHES:
        yield WEIGHTS, f"uses {last}", None
    elif _NETWORK.search(name) and last not in ("Request", "quote", "parse"):
        yield NETWORK, f"uses {name}", None
    elif _NAMES_OF_HOST.search(name):
        yield SURROUNDINGS, f"uses {name}", None


def _runs(node: ast.Call, name: str, last: str, module: ReadModule) -> Found:
    first = node.args[0] if node.args else None
    if name.removeprefix("builtins.") in ("exec", "eval") and not isinstance(first, ast.Constant):
        yield DYNAMIC, f"runs a text by {last}", None
    elif name.removeprefix("builtins.") == "compile" and first is not None:
        yield DYNAMIC, "compiles a text", None
    elif name.endswith(("marshal.loads", "types.CodeType", "types.FunctionType")):
        yield HIDDEN, f"runs compiled code by {last}", None
    elif _UNPICKLES.search(name):
        literal = isinstance(first, ast.Constant)
        yield (HIDDEN if literal else DYNAMIC), f"{name} runs what the pickle says", None
    elif name == "codecs.decode" and "rot" in (text_of(node.args[-1], module) or "" if node.args else ""):
        yield HIDDEN, "a text in rot13", None
    elif _DECODES.search(name) and len(_literal(first, module)) > 40:
        yield EMBEDDED, f"a text that {last} decodes", None
    elif _COMMANDS.search(name):
        for concern, what in _command(node, module):
            yield concern, what, None


def _literal(node: ast.AST | None, module: ReadModule) -> str | bytes:
    if isinstance(node, ast.Name):
        node = module.constants.get(node.id, node)
    if isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)):
        return node.value
    return text_of(node, module) or ""


def _command(node: ast.Call, module: ReadModule) -> Iterator[tuple[Concern, str]]:
    first: ast.AST | None = node.args[0] if node.args else _keyword(node, "args")
    if isinstance(first, ast.Name):
        first = module.constants.get(first.id, first)
    parts = first.elts if isinstance(first, (ast.List, ast.Tuple)) else [first, *node.args[1:]]
    words = [text_of(part, module) or "$UNKNOWN" for part in parts]
    for _, concern, what in command_places(" ".join(words), {}):
        yield concern, what


def _looks_around(node: ast.Call, name: str, last: str, module: ReadModule) -> Found:
    if last in _LISTS:
        place = node.args[0] if node.args and not name.startswith("()") else None
        start = node.func.value if isinstance(node.func, ast.Attribute) else None
        for one in (place, start):
            text = text_of(one, module) or (full_name(one, module) if one is not None else "")
            text = text[:_LONGEST_PLACE]
            if re.match(r"/cache(?:/datasets|/miner_datasets)?/?(?:[*{].*)?$", text) or _CACHE_NAME.match(
                text
            ):
                yield EVALUATOR, f"{last} lists {text}, which all tasks of a host share", None
    if last in ("startswith", "endswith", "get", "search", "match", "fullmatch", "hexdigest"):
        parts: list[ast.AST] = [*node.args]
        if isinstance(node.func, ast.Attribute):
            parts.append(node.func.value)
        yield from _special(parts, module, is_lookup=last == "get")


def _of_comparison(node: ast.Compare, module: ReadModule) -> Found:
    sides = [node.left, *node.comparators]
    yield from _special(sides, module, is_lookup=False)
    if all(isinstance(one, (ast.Is, ast.IsNot)) for one in node.ops):
        return
    if any(_is_fixed_date(side, module) for side in sides) or _is_date_compared(sides, module):
        yield SPECIAL, f"compares the date: {_written(node)}", None
    if any(isinstance(side, ast.Constant) and _HEX.fullmatch(str(side.value)) for side in sides):
        yield SURROUNDINGS, "something is compared with a known digest or an anonymous name", None
    for side in sides:
        if _named_host(side, module) and any(map(_constant_texts, sides)):
            yield SPECIAL, f"compares the host's name: {_written(node)}", None


def _written(node: ast.Compare) -> str:
    try:
        return ast.unparse(node)[:70]
    except RecursionError:
        return "a comparison too deep to be shown"


def _of_match(node: ast.Match, module: ReadModule) -> Found:
    patterns = [
        one.value for case in node.cases for one in ast.walk(case.pattern) if isinstance(one, ast.MatchValue)
    ]
    yield from _special([node.subject, *patterns], module, is_lookup=False)


def _of_subscript(node: ast.Subscript, module: ReadModule) -> Found:
    if isinstance(node.value, ast.Call) and full_name(node.value.func, module).endswith("uname"):
        yield SURROUNDINGS, "reads a part of uname", None
    if isinstance(node.slice, ast.Slice):
        yield from _of_joined(node, module)
    if isinstance(node.ctx, ast.Load):
        yield from _special([node.value, node.slice], module, is_lookup=True)


def _special(sides: list[ast.AST] | list[ast.expr], module: ReadModule, *, is_lookup: bool) -> Found:
    """The task's, miner's or data set's name against something that is known beforehand."""
    for number, side in enumerate(sides):
        name = _last_name(side, module)
        if not name:
            continue
        others = [one for place, one in enumerate(sides) if place != number]
        known = any(_known(one, module, is_lookup=is_lookup) for one in others)
        if known and _IDENTITY.match(name):
            yield SPECIAL, f"{name} is compared with known names", None
        elif known and _DATASET_NAME.match(name):
            yield SURROUNDINGS, f"{name} is compared with known names", None
        elif known and name in ("hexdigest", "md5", "sha256", "sha1") and not is_lookup:
            yield SURROUNDINGS, "a digest is compared with known ones", None


def _known(node: ast.AST, module: ReadModule, *, is_lookup: bool) -> bool:
    """True for constants that name something: in a lookup, a table of them."""
    if isinstance(node, ast.Name) and node.id in module.constants:
        node = module.constants[node.id]
    if isinstance(node, ast.Dict):
        return any(map(_constant_texts, (key for key in node.keys if key is not None)))
    if is_lookup:
        return False
    if isinstance(node, ast.Call) and node.args:  # frozenset({...})
        node = node.args[0]
    return bool(_constant_texts(node))


def _constant_texts(node: ast.AST) -> list[str]:
    """Texts that could be names: no separators, endings or empty ones."""
    nodes = node.elts if isinstance(node, (ast.List, ast.Tuple, ast.Set)) else [node]
    values = [one.value for one in nodes if isinstance(one, ast.Constant)]
    return [one for one in values if isinstance(one, str) and re.search(r"\w{3,}", one) and one[0] != "."]


def _last_name(node: ast.AST, module: ReadModule) -> str:
    """`args.task_id`, `os.environ["TASK_ID"]`, `os.getenv("TASK_ID")`, `task_id.lower()`, `f(task_id)`."""
    for _ in range(10):
        if isinstance(node, ast.Subscript):
            text = text_of(node.slice, module)
            if text is None or not _interesting(text):
                node = node.value
                continue
            return text
        if isinstance(node, ast.Call):
            texts = [
                text for text in (text_of(one, module) for one in node.args) if text and _interesting(text)
            ]
            if texts:
                return texts[0]
            name = full_name(node.func, module).rpartition(".")[2]
            if name in ("hexdigest",):
                return name
            if node.args and not isinstance(node.func, ast.Attribute):
                node = node.args[0]
            elif isinstance(node.func, ast.Attribute):
                node = node.func.value
            else:
                return ""
            continue
        break
    return full_name(node, module).rpartition(".")[2] if isinstance(node, (ast.Name, ast.Attribute)) else ""


def _interesting(text: str) -> bool:
    return bool(_IDENTITY.match(text) or _DATASET_NAME.match(text))


def _is_date_compared(sides: list[ast.expr], module: ReadModule) -> bool:
    """A clock against an instant, or a part of a date against a day or an hour, known when it was written."""
    found = [one for side in sides for one in ast.walk(side)]
    calls = [full_name(one.func, module) for one in found if isinstance(one, ast.Call)]
    parts = any(isinstance(one, ast.Attribute) and one.attr in _DATE_ATTRIBUTES for one in found)
    if parts or any(name.rpartition(".")[2] in _PARTS_OF_DATE for name in calls):
        return any(_is_known_moment(side, module, least=0) for side in sides)
    has_clock = any(_NOW.search(name) for name in calls) or any(
        isinstance(side, ast.Name) and _reads_clock(side, module) for side in sides
    )
    return has_clock and any(_is_known_moment(side, module, least=_DATE_SECONDS) for side in sides)


def _reads_clock(node: ast.Name, module: ReadModule) -> bool:
    value = module.constants.get(node.id)
    return isinstance(value, ast.Call) and bool(_NOW.search(full_name(value.func, module)))


def _is_known_moment(node: ast.AST, module: ReadModule, *, least: float) -> bool:
    if isinstance(node, ast.Name) and node.id in module.constants:
        node = module.constants[node.id]
    if isinstance(node, (ast.List, ast.Tuple, ast.Set)):
        return any(_is_known_moment(one, module, least=least) for one in node.elts)
    if not isinstance(node, ast.Constant):
        return False
    if isinstance(node.value, str):
        return bool(re.match(r"20\d\d|Mon|Tue|Wed|Thu|Fri|Sat|Sun", node.value))
    return isinstance(node.value, (int, float)) and node.value >= least


def _is_fixed_date(node: ast.AST, module: ReadModule) -> bool:
    if isinstance(node, ast.Name):
        node = module.constants.get(node.id, node)
    if not isinstance(node, ast.Call) or not node.args:
        return False
    name = full_name(node.func, module).rpartition(".")[2]
    first = node.args[0]
    if not isinstance(first, ast.Constant):
        return False
    if name in ("datetime", "date"):
        return isinstance(first.value, int)
    return name in ("fromisoformat", "strptime") and isinstance(first.value, str)


def _named_host(node: ast.AST, module: ReadModule) -> bool:
    names = (full_name(one, module) for one in ast.walk(node) if isinstance(one, (ast.Name, ast.Attribute)))
    return any(_NAMES_OF_HOST.search(name) for name in names)


def _of_import(node: ast.Import | ast.ImportFrom, module: ReadModule) -> Found:
    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    for name in names:
        root = name.partition(".")[0]
        if root in ("validator", "affinetes", "evaluators") and not getattr(node, "level", 0):
            yield EVALUATOR, f"imports {name}", None
        elif root in ("docker", "kubernetes"):
            yield NETWORK, f"imports {name}", None


def _of_collection(node: ast.expr, module: ReadModule) -> Found:
    count = len(node.keys) if isinstance(node, ast.Dict) else len(getattr(node, "elts", ()))
    if count > _MOST_ITEMS:
        yield EMBEDDED, f"a literal of {count:,} items in the code", None
    if isinstance(node, ast.Dict):
        keys = [one.value for one in node.keys if isinstance(one, ast.Constant)]
        if sum(isinstance(one, str) and bool(_HEX.fullmatch(one)) for one in keys) >= 3:
            yield SURROUNDINGS, "a table whose keys are digests, of known models or data perhaps", None


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((one.value for one in node.keywords if one.arg == name), None)


_READERS: dict[type[ast.AST], Callable[[Any, ReadModule], Found]] = {
    ast.Constant: _of_constant,
    ast.JoinedStr: _of_joined,
    ast.BinOp: _of_joined,
    ast.Call: _of_call,
    ast.Name: _of_name,
    ast.Attribute: _of_name,
    ast.Compare: _of_comparison,
    ast.Match: _of_match,
    ast.Subscript: _of_subscript,
    ast.Import: _of_import,
    ast.ImportFrom: _of_import,
    ast.List: _of_collection,
    ast.Tuple: _of_collection,
    ast.Set: _of_collection,
    ast.Dict: _of_collection,
}
