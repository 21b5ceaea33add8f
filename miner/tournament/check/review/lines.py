"""Commands, Dockerfiles and configuration as the cheat review reads them: line by line, by patterns.

Every pattern is linear: none has a repetition within a repetition of the same letters.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from urllib.parse import urlsplit

from miner.tournament.check.dockerfiles import Instruction, declared_values, expanded, read_instructions
from miner.tournament.check.review.concerns import (
    BENCHMARK,
    CODE,
    DATA,
    DYNAMIC,
    EMBEDDED,
    EVALUATOR,
    HIDDEN,
    HOST,
    NETWORK,
    PACKAGES,
    SPECIAL,
    SURROUNDINGS,
    WEIGHTS,
    Concern,
    Gravity,
    Place,
)
from miner.tournament.check.sources import DATA_SETS, TABLES, looks_like_base64
from miner.tournament.check.sources import WEIGHTS as WEIGHT_SUFFIXES

# — addresses

ADDRESS = re.compile(
    r"(?:(?:https?|ftp)://[\w.$@{-][^\s\"'<>)\]};,`|]*|(?:s3|gs)://[\w$][^\s\"'<>)\]};,`|]*)"
)
#: Hosts of models and data sets.
_HUBS = ("huggingface.co", "hf.co", "hf-mirror.com", "civitai.com", "modelscope.cn", "modelscope.ai")
#: Stores that anybody fills with anything.
_STORES = (
    *("drive.google.com", "dropbox.com", "mega.nz", "amazonaws.com", "storage.googleapis.com", "r2.dev"),
    *("blob.core.windows.net", "backblazeb2.com", "digitaloceanspaces.com", "transfer.sh", "ipfs.io"),
    *("r2.cloudflarestorage.com", "zenodo.org", "kaggle.com", "archive.org", "gofile.io", "pixeldrain.com"),
)
#: Hosts of packages: what an image is built of.
_PACKAGES = (
    *(f"{name}.org" for name in ("pypi", "pythonhosted", "download.pytorch", "debian", "anaconda")),
    *(f"{name}.com" for name in ("ubuntu", "download.nvidia", "pypi.nvidia", "example")),
    *("w3.org", "json-schema.org"),
)
_LOCAL = re.compile(r"(?:localhost|127\.|0\.0\.0\.0|\[?::1)")
_COMMIT = re.compile(r"(?<![0-9a-f])[0-9a-f]{40}(?![0-9a-f])")


def address_concern(url: str) -> Concern | None:
    """Return the concern about an address; None if it is known to be harmless."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return CODE
    host, suffix = parts.netloc.rpartition("@")[2].lower(), PurePosixPath(parts.path).suffix.lower()
    if parts.scheme in ("s3", "gs"):
        return WEIGHTS
    if _LOCAL.match(host) or not host:
        return None
    if _is_of(host, _HUBS):
        return DATA if "/datasets/" in f"{parts.path}/" else WEIGHTS
    if suffix in WEIGHT_SUFFIXES or suffix == ".bin" or _is_of(host, _STORES):
        return WEIGHTS
    if suffix in DATA_SETS or suffix in TABLES - {".json"}:
        return DATA
    return None if _is_of(host, _PACKAGES) or _COMMIT.search(parts.path) else CODE


def _is_of(host: str, names: Sequence[str]) -> bool:
    name = host.partition(":")[0]
    return any(name == known or name.endswith(f".{known}") for known in names)


# — commands

#: To the end of a command.
_REST = r"[^\n;&|]*"
_FETCHES = re.compile(
    rf"(?<![\w./-])(curl|wget|aria2c|axel|lftp|rsync|scp|sftp|rclone|gsutil|azcopy|gdown|aws\s+s3|http)(?=\s){_REST}"
)
_GIT = re.compile(
    r"(?<![\w./-])git\s+(?:-\S+\s+(?:[^-\s]\S*\s+)?){0,8}(clone|fetch|pull|submodule\s+update|lfs)(?=\s|$)"
    rf"{_REST}"
)
_PIPED = re.compile(
    r"(?:curl|wget)\s[^\n;&|]{0,500}\|\s*(?:sudo\s+)?(?:\S*/)?(?:ba|da|z|k)?(?:sh|python[0-9.]*)\b"
)
_INSTALLS = re.compile(
    rf"(?<![\w./-])(?:(?:uv\s+)?pip[0-9.]*\s+install|apt(?:-get)?\s+(?:-\S+\s+)*install|conda\s+install|uv\s+venv"
    rf"|npm\s+(?:i|ci|install)|uv\s+sync)(?=\s){_REST}"
)
_VCS = re.compile(r"git\+\w+://[^\s\"']+")
#: By pattern: the concern, and what it is called. Names of Python functions stand here for `python -c`.
_COMMANDS: Sequence[tuple[re.Pattern[str], Concern, str]] = [
    (re.compile(rf"\b(?:hf|huggingface-cli)\s+download\b{_REST}"), WEIGHTS, "fetches from the hub"),
    (re.compile(rf"\b(?:modelscope\s+download|ollama\s+pull){_REST}"), WEIGHTS, "fetches a model"),
    (re.compile(rf"\bspacy\s+download\b{_REST}"), WEIGHTS, "fetches a model"),
    (re.compile(rf"\bkaggle\s+\w+\s+download{_REST}"), DATA, "fetches from Kaggle"),
    (
        re.compile(
            r"\b(?:snapshot_download|hf_hub_download|load_state_dict_from_url|urlretrieve"
            r"|download_url_to_file)\b|\btorch\.hub\.load|\.from_pretrained\(\s*\\?[\"'][\w.-]+"
        ),
        WEIGHTS,
        "fetches a model",
    ),
    (
        re.compile(r"(?<=\s)[\w./-]*\w\.(?:safetensors|gguf|ckpt|pth|onnx)(?=[\s\"']|$)"),
        WEIGHTS,
        "names a file of weights",
    ),
    (re.compile(r"\bload_dataset\(|\bnltk\.download"), DATA, "fetches a data set"),
    (re.compile(r"\b(?:requests\.(?:get|post)|urlopen|httpx\.\w+)\("), CODE, "fetches an address"),
    (
        re.compile(
            r"\bbase64\s+(?:-d|-D|--decode|-di)\b|\bopenssl\s+(?:enc|base64|aes\S*)|\bxxd\s+-\w*r|\buudecode\b"
            r"|\bgpg\s+(?:-d|--decrypt)|b(?:16|32|64|85)decode|\bmarshal\b|\bfromhex\b|\bunhexlify\b|exec\(\s*\w"
            r"|__import__\s*\(|\bcodecs\b|\bzlib\b"
        ),
        HIDDEN,
        "decodes what it runs or writes",
    ),
    (
        re.compile(r"(?:^|[;&|(\n])[ \t]*\$\{?\w+\}?\$\{?\w+\}?"),
        HIDDEN,
        "a command whose name is put together",
    ),
    (re.compile(r"(?:^|[;&|(\n])[ \t]*eval\s"), DYNAMIC, "runs a text by eval"),
    (
        re.compile(
            r"\bpython[0-9.]*\s+(?:-[uBEIOsSqv]+\s+){0,5}[\w/][\w./-]*\.(?!py\b)[A-Za-z]\w*(?=[\s\"']|$)"
            r"|\b(?:ba|da|z)?sh\s+[\w/][\w./-]*\.(?!sh\b|bash\b)\w+(?=[\s\"']|$)"
        ),
        DYNAMIC,
        "runs a file whose name hides that it is code",
    ),
    (
        re.compile(
            r"(?<![\w.-])(?:hostname(?!=)|uname\s+-n|ifconfig|ip\s+a(?:ddr)?\b|nvidia-smi\s+-L)(?=\s|$|\))"
        ),
        SURROUNDINGS,
        "asks for the host's name or address",
    ),
    (
        re.compile(
            r"(?<![\w.-])(?:ls|find|cat|cp|tar|grep)\s[^\n;&|]{0,200}/cache(?:/datasets)?/?(?=[\s*\"']|$)"
        ),
        EVALUATOR,
        "reads what all tasks of a host share",
    ),
    (
        re.compile(r"(?<![\w.-])(?:nmap|nc|ncat|netcat|telnet|ssh)\s+\S"),
        NETWORK,
        "connects to another machine",
    ),
    (
        re.compile(
            r"\$\{?(?=\w*(?i:task_?id|hotkey|repo_?name|tournament))\w++[^\n\"']{0,40}[\"']?\s*(?:==?|=~|!=)\s*"
            r"[\"']?[\w*^]|\bcase\s+[\"']?\$\{?\w*(?i:task_?id|hotkey|repo_?name)"
        ),
        SPECIAL,
        "compares the task's or miner's name",
    ),
    (
        re.compile(r"\$\(date\b[^)\n]{0,100}\)[\"']?\s*(?:-[gln][te]|-eq|==?|!=|>|<)\s*[\"']?\d"),
        SPECIAL,
        "compares the date",
    ),
]
_HOST = re.compile(
    r"docker\.sock|169\.254\.169\.254|metadata\.google|/proc/(?:1|\*|\[0-9\]\+?\*?)/\w+|/etc/machine-id"
    r"|/sys/class/dmi|/var/lib/docker|\bnsenter\b|/run/containerd"
)
_OTHER_PROCESS = re.compile(r"/proc/[{$][^/\s\"']{0,40}/(?:environ|root|cmdline|mem|maps|fd)\b")
_TEST_DATA = re.compile(r"test_data\b|\bhidden_test|eval_seeds?\b|/cache/datasets/?\*")
_BENCHMARKS = re.compile(
    r"(?i)(?<![a-z0-9])(?:gsm8k|mmlu|human_?eval|mbpp|hellaswag|truthful_?qa|winogrande|arc[_-]challenge|ifeval|gpqa"
    r"|swe[_-]bench|nl2bash|livecodebench|math[_-]?500|alpaca_?eval|mt[_-]bench)(?![a-z0-9])"
)


def text_places(text: str) -> Iterator[tuple[int, Concern, str]]:
    """Find names in any text that a reviewer searches for; with the offset of each."""
    for pattern, concern, what in (
        (_HOST, HOST, "names"),
        (_OTHER_PROCESS, SURROUNDINGS, "looks into another process,"),
        (_TEST_DATA, EVALUATOR, "names"),
        (_BENCHMARKS, BENCHMARK, "names"),
    ):
        for found in pattern.finditer(text):
            yield found.start(), concern, f"{what} {_short(found[0])}"


def command_places(text: str, values: Mapping[str, str | None]) -> Iterator[tuple[int, Concern, str]]:
    """Find what commands do that a reviewer asks about; with the offset of each."""
    plain = _without_tricks(text)
    for found in _FETCHES.finditer(plain):
        if not re.match(r"\s+(?:-y|install)\b", found[0][len(found[1]) :]):
            yield from _fetch(found, values)
    for found in _GIT.finditer(plain):
        yield from _git(found, plain, values)
    for found in _INSTALLS.finditer(plain):
        yield found.start(), PACKAGES, _installed(found[0])
    for found in _PIPED.finditer(plain):
        yield found.start(), CODE, f"runs what it fetches: {_short(found[0])}"
    for found in _VCS.finditer(plain):
        if not _COMMIT.search(found[0]):
            yield found.start(), CODE, f"installs {_short(found[0])}, a name that may move, not a commit"
    for pattern, concern, what in _COMMANDS:
        for found in pattern.finditer(plain):
            yield found.start(), concern, f"{what}: {_short(found[0])}"
    fetched = [(found.start(), found.end()) for found in _fetching(plain)]
    for found in ADDRESS.finditer(plain):
        inside = any(start <= found.start() < end for start, end in fetched)
        behind = None if inside or _is_vcs(plain, found.start()) else address_concern(found[0])
        if behind:
            yield found.start(), behind, f"names {_short(found[0])}"
    yield from text_places(plain)


#: Options of installers whose value is no package.
_WITH_VALUE = frozenset(
    {
        *(
            "--only-binary",
            "--no-binary",
            "-c",
            "--constraint",
            "--python",
            "-p",
            "-i",
            "-f",
            "-t",
            "--target",
        ),
        *("--index-url", "--extra-index-url", "--find-links", "--retries", "--timeout", "--prefix"),
    }
)


def _installed(command: str) -> str:
    """The packages of an installer's command, or the files that list them."""
    named, before = [], ""
    for word in command.partition("install")[2].split():
        if before in ("-r", "--requirement"):
            named.append(f"what {word} lists")
        elif not word.startswith("-") and before not in _WITH_VALUE:
            named.append(word.strip("\"'"))
        before = word
    return f"installs {_short(' '.join(named))}" if named else _short(command)


def _is_vcs(text: str, start: int) -> bool:
    return text.startswith("git+", max(0, start - 4))


def _fetching(text: str) -> Iterator[re.Match[str]]:
    yield from _FETCHES.finditer(text)
    yield from _GIT.finditer(text)


def _fetch(found: re.Match[str], values: Mapping[str, str | None]) -> Iterator[tuple[int, Concern, str]]:
    urls = ADDRESS.findall(expanded(found[0], values))
    concerns = [address_concern(url) for url in urls]
    if not urls and re.match(r"(?:rclone|gsutil|azcopy|gdown|aws)", found[1]):
        concerns = [WEIGHTS]
    if not concerns:
        # `--version`, and what an apt-get names, are no fetch.
        if re.search(r"\$|@|\w:\S", found[0]):
            yield found.start(), CODE, f"fetches an address that is not there: {_short(found[0])}"
        return
    worst = next((one for one in (WEIGHTS, DATA, CODE) if one in concerns), None)
    if worst:
        yield found.start(), worst, f"fetches: {_short(found[0])}"


def _git(
    found: re.Match[str], text: str, values: Mapping[str, str | None]
) -> Iterator[tuple[int, Concern, str]]:
    if found[1] == "lfs":
        if re.search(r"lfs\s+(?:pull|fetch|clone|checkout|smudge)", found[0]):
            yield found.start(), WEIGHTS, f"fetches the large files of Git LFS: {_short(found[0])}"
        return
    whole = expanded(found[0], values)
    concern = next((address_concern(url) for url in ADDRESS.findall(whole)), CODE) or CODE
    if concern is CODE and _COMMIT.search(expanded(text, values)):
        yield found.start(), PACKAGES, f"fetches a repository at a commit: {_short(found[0])}"
        return
    yield found.start(), concern, f"fetches a repository: {_short(found[0])}"


def _without_tricks(text: str) -> str:
    """Without quotes and backslashes that only break up words; offsets shift by a few letters at most."""
    return re.sub(r"(?<=\w)(?:''|\"\"|\\(?=\w))(?=\w)", "", text)


def _short(text: str, most: int = 70) -> str:
    one_line = " ".join(text.split())
    return one_line if len(one_line) <= most else f"{one_line[: most - 1]}…"


# — files


def read_shell(text: str) -> Iterator[Place]:
    code = "\n".join("" if line.lstrip().startswith("#") else line for line in text.splitlines())
    ends = [found.start() for found in re.finditer("\n", code)]
    for offset, concern, what in command_places(code.replace("\\\n", "  "), {}):
        yield Place(bisect_left(ends, offset) + 1, concern, what)


#: Publishers of bases that trainers are usually built on. What others have baked in, a reviewer cannot see.
_PUBLISHERS = (
    *("python", "debian", "ubuntu", "scratch", "alpine", "nvidia/", "nvcr.io/nvidia/", "pytorch/", "runpod/"),
    *("axolotlai/", "winglian/axolotl", "diagonalge/", "gradientsio/", "huggingface/", "ghcr.io/astral-sh/"),
    *("ghcr.io/huggingface/", "continuumio/", "vllm/", "mambaorg/", "rocm/", "lmsysorg/"),
)
_RUNS = frozenset({"RUN", "CMD", "ENTRYPOINT", "HEALTHCHECK", "ONBUILD", "SHELL"})
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


def read_dockerfile_places(text: str) -> Iterator[Place]:
    """Read each instruction with the values of the arguments and variables before it."""
    lines = text.splitlines()
    values: dict[str, str | None] = {}
    stages: set[str] = set()
    declared: dict[str, int] = {}
    for one in read_instructions(text):
        starts = [one.line, *(declared[name] for name in re.findall(r"\w+", one.text) if name in declared)]
        for concern, what, severity in _of_instruction(one, values, stages):
            yield Place(_line_of(lines, one.line, what), concern, what, severity, tuple(starts[:5]))
        for name, value in declared_values(one):
            values[name] = expanded(value, values) if value is not None else values.get(name)
            declared[name] = one.line


def _of_instruction(
    one: Instruction, values: Mapping[str, str | None], stages: set[str]
) -> Iterator[tuple[Concern, str, Gravity | None]]:
    if one.name == "FROM":
        words = one.text.split()
        base = expanded(words[0], values) if words else ""
        if base and base.lower() not in stages:
            known = _is_known_base(base)
            more = "" if known else ": what is baked into it cannot be seen"
            yield PACKAGES if known else CODE, f"is built on {base}{more}", None
        if len(words) == 3:
            stages.add(words[2].lower())
    elif one.name in _RUNS:
        found = [(concern, what) for _, concern, what in command_places(one.text.replace("\n", " "), values)]
        if installed := [what for concern, what in found if concern is PACKAGES]:
            yield PACKAGES, "; ".join(installed), None
        yield from ((concern, what, None) for concern, what in found if concern is not PACKAGES)
    elif one.name in ("ADD", "COPY"):
        source = one.flags.get("from", "")
        if re.search(r"[/:@]", source) and not _DIGEST.search(source):
            yield CODE, f"copies files from the image {source}", None
        for word in one.words()[:-1]:
            path = expanded(word, values)
            if "://" in path or path.startswith("git@"):
                yield address_concern(path) or CODE, f"{one.name} fetches {_short(path)}", None
    elif one.name in ("ENV", "ARG", "LABEL"):
        for url in ADDRESS.findall(one.text):
            if behind := address_concern(url):
                yield behind, f"names {_short(url)}", Gravity.ASKS


def _is_known_base(base: str) -> bool:
    name = base.removeprefix("docker.io/").removeprefix("library/")
    return any(
        name.startswith(known) if known.endswith("/") else re.match(rf"{re.escape(known)}(?:[:@]|$)", name)
        for known in _PUBLISHERS
    )


def _line_of(lines: Sequence[str], first: int, what: str) -> int:
    """The line of an instruction that has the words found; its first where none does."""
    word = what.partition(": ")[2].split(" ")[0].rstrip("…") or what.rpartition(" ")[2].rstrip("…")
    for number in range(first, min(len(lines), first + 200) + 1):
        text = lines[number - 1]
        if number > first and not lines[number - 2].rstrip().endswith("\\") and text.lstrip()[:1] != "#":
            break
        if word and word in text and text.lstrip()[:1] != "#":
            return number
    return first


_KEY = re.compile(
    r"^[\s\-\"'{]*(?P<key>[\w.-]+)[\"']?\s*[:=]\s*[\"']?(?P<value>[A-Za-z0-9][\w.-]*/[\w.-]+)[\"']?\s*,?\s*\}?$"
)
_DATA_KEY = re.compile(r"(?i)data|corpus|^path$")
_WEIGHT_KEY = re.compile(r"(?i)model|repo|checkpoint|lora|adapter|vae|encoder|weights|pretrained")
_HEX_KEY = re.compile(r"^[ \t\-\"'{]*[0-9a-f]{16,64}[\"']?\s*:", re.MULTILINE)
#: So many hexadecimal keys are a table by digest.
_FEWEST_KEYS = 3
#: A table with more rows, or more bytes, is no configuration.
_MOST_ROWS, _MOST_TABLE_BYTES = 200, 100_000


def read_config(text: str, suffix: str, requested: frozenset[str]) -> Iterator[Place]:
    """Read YAML, TOML, JSON, requirements and the like by their lines."""
    has_rows = suffix in TABLES - {".json"} or (suffix == ".json" and text.lstrip()[:1] == "[")
    if len(text) > _MOST_TABLE_BYTES or (has_rows and text.count("\n") > _MOST_ROWS):
        yield Place(0, EMBEDDED, f"{text.count(chr(10)) + 1:,} lines, {len(text) / 1000:.0f} kB of text")
    if len(_HEX_KEY.findall(text)) >= _FEWEST_KEYS:
        first = text.count("\n", 0, next(_HEX_KEY.finditer(text)).start()) + 1
        yield Place(first, SURROUNDINGS, "a table whose keys are digests, of known models or data perhaps")
    if looks_like_base64(text):
        yield Place(0, EMBEDDED, "a block of base64")
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.lstrip().startswith(("#", "//")):
            yield from _of_line(number, line, requested)


def _of_line(number: int, line: str, requested: frozenset[str]) -> Iterator[Place]:
    for url in _VCS.findall(line):
        if not _COMMIT.search(url):
            yield Place(number, CODE, f"installs {_short(url)}, a name that may move, not a commit")
    for url in () if "git+" in line else ADDRESS.findall(line):
        if concern := address_concern(url):
            yield Place(number, concern, f"names {_short(url)}", Gravity.ASKS)
    if found := _KEY.match(line[:400]):
        key, value = found["key"], found["value"]
        if value in requested:
            yield Place(number, DATA, f"{key}: {value}, which is requested", Gravity.SAID)
        elif _DATA_KEY.search(key):
            yield Place(number, DATA, f"{key}: {value}", Gravity.ASKS)
        elif _WEIGHT_KEY.search(key):
            yield Place(number, WEIGHTS, f"{key}: {value}", Gravity.ASKS)
    for _, concern, what in text_places(line):
        yield Place(number, concern, what)
