"""Rule 7: Dockerfiles as the classic builder reads them, without BuildKit.

Validators build with Docker's classic API: no cache, no build arguments, no secrets, no target, and the
repository's root as the context. This reads the text; only a real build shows the rest.
"""

from __future__ import annotations

import fnmatch
import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from core.domain.tournament_rules import DOCKERFILE_DIRECTORIES
from miner.tournament.check.entry import CheckedEntry, FindingState, RuleFinding
from miner.tournament.checkout import read_inside
from miner.tournament.rules import TASKS

INSTRUCTIONS = frozenset(
    {
        *("ADD", "ARG", "CMD", "COPY", "ENTRYPOINT", "ENV", "EXPOSE", "FROM", "HEALTHCHECK", "LABEL"),
        *("MAINTAINER", "ONBUILD", "RUN", "SHELL", "STOPSIGNAL", "USER", "VOLUME", "WORKDIR"),
    }
)
#: Options of instructions that the classic builder refuses.
BUILDKIT_FLAGS: Mapping[str, tuple[str, ...]] = {
    "RUN": ("mount", "network", "security", "device"),
    "COPY": ("link", "chmod", "parents", "exclude"),
    "ADD": ("link", "chmod", "checksum", "keep-git-dir", "exclude", "unpack"),
}
#: Arguments that BuildKit sets by itself; in a classic build they are empty.
BUILDKIT_ARGUMENTS = frozenset(
    f"{kind}{what}" for kind in ("BUILD", "TARGET") for what in ("PLATFORM", "OS", "ARCH", "VARIANT")
)
#: Arguments that need no ARG: a builder may have a proxy.
GIVEN_ARGUMENTS = frozenset(
    f(name) for f in (str.upper, str.lower) for name in ("http_proxy", "https_proxy", "ftp_proxy", "no_proxy")
)
_DIRECTIVE = re.compile(r"#\s*(?P<name>syntax|escape|check)\s*=\s*(?P<value>\S+)", re.IGNORECASE)
_HEREDOC = re.compile(r"(?<![<\d])<<-?\s*[\"']?[A-Za-z_]\w*[\"']?")
#: A quoted text, except the name of a here-document. An unclosed one goes to the end.
_QUOTED = re.compile(r"(?<![<-])(?:\"(?s:\\.|[^\"\\])*+(?:\"|\\?\Z)|'[^']*+(?:'|\Z))")
_VARIABLE = re.compile(
    r"\$(?:(?P<plain>[A-Za-z_]\w*)|\{(?P<braced>[A-Za-z_]\w{0,200})(?P<rest>[^}]{0,500})\})"
)
#: No Dockerfile written by hand is larger.
MOST_BYTES = 1 << 18
#: Of values in one text. `ENV A=$A$A` doubles its value: some lines more would fill the memory.
_MOST_FILLED = 1 << 16
_SECRET_NAME = re.compile(
    r"(?:^|_)(TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|PRIVATE_KEY)(?:_|$)", re.I
)
_SECRET_VALUE = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[opsru]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|sk-[\w-]{20,}|AKIA[A-Z0-9]{16})"
)
_FETCHES_MODEL = re.compile(
    r"snapshot_download|hf_hub_download|huggingface-cli\s+download|\bhf\s+download|from_pretrained\("
    r"|\.(?:safetensors|gguf|ckpt)\b"
)
_DIGEST = re.compile(r"@sha256:[0-9a-f]{64}$")


@dataclass(frozen=True)
class Instruction:
    line: int
    name: str
    #: Options in front, without their dashes.
    flags: Mapping[str, str]
    text: str

    def words(self) -> list[str]:
        """Its arguments, in either form."""
        listed = json_list(self.text)
        return listed if listed is not None else _split(self.text)


@dataclass
class BuildStage:
    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)


@dataclass
class DockerfileFindings:
    """Problems that would fail a validator's build, and the rest that is worth a look."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def check_dockerfiles(entry: CheckedEntry) -> RuleFinding:
    wanted = dict.fromkeys(task.dockerfile for task in TASKS.values() if task.tournament in entry.kinds)
    context = context_files(entry.tree, entry.files())
    problems, notes, found = [], [], []
    for wanted_name in wanted:
        name = first_dockerfile(entry.tree, wanted_name)
        if name is None:
            places = " or ".join(f"{place}/{wanted_name}" for place in DOCKERFILE_DIRECTORIES)
            problems.append(f"there is no {places}")
            continue
        found.append(name)
        if (entry.tree / name).stat().st_size > MOST_BYTES:
            problems.append(f"{name} is larger than {MOST_BYTES // 1024} kB: what follows is not read")
        text = dockerfile_text(entry.tree, name)
        read = read_dockerfile(text, context)
        problems += [f"{name}: {what}" for what in read.problems]
        notes += [f"{name}: {what}" for what in read.notes]
        if (entry.tree / f"{name}.dockerignore").exists():
            notes.append(f"{name}.dockerignore: only BuildKit reads it")
    rule = "Dockerfiles"
    if problems:
        to_do = (
            "correct them, or name the kinds that it enters by --kind; then build as validators do: "
            "god-miner tournament rehearse"
        )
        return RuleFinding(7, rule, FindingState.FAILED, problems[0], (*problems[1:], *notes), to_do)
    notes.append(
        "who runs: the image's own user. Validators mount a volume of root's on /app/checkpoints and give no "
        "capabilities, so only root can save there"
    )
    text = f"{len(found)} can be read by the classic builder; only a real build shows the rest"
    to_do = "build each as validators do: god-miner tournament rehearse"
    return RuleFinding(7, rule, FindingState.PASSED, text, tuple(notes), to_do)


def first_dockerfile(tree: Path, name: str) -> str | None:
    """The path that validators build: the first directory that has it counts."""
    candidates = (f"{place}/{name}" for place in DOCKERFILE_DIRECTORIES)
    return next((path for path in candidates if (tree / path).is_file()), None)


def dockerfile_text(tree: Path, name: str) -> str:
    """Its text; empty where a link leads out of the tree, as a builder has no more than the tree."""
    try:
        return read_inside(tree, tree / name, MOST_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def read_dockerfile(text: str, context: Sequence[str]) -> DockerfileFindings:
    """Check one Dockerfile against the files that its build is sent."""
    found = DockerfileFindings()
    instructions = list(_instructions(text, found))
    stages, before = _stages(instructions, found)
    arguments = _global_arguments(before, found)
    for number, stage in enumerate(stages):
        _check_base(stage, stages[:number], arguments, found)
        _check_stage(stage, stages[:number], arguments, context, found)
    if not stages:
        found.problems.append("it has no FROM")
    else:
        _check_entry_point(stages[-1], found)
        _check_user(stages[-1], arguments, found)
    return found


def entry_point(text: str) -> list[str] | None:
    """The program that a container of this Dockerfile starts; None where it has none in the exec form."""
    stages, _ = _stages(read_instructions(text), DockerfileFindings())
    lines = [one.text for one in (stages[-1].instructions if stages else ()) if one.name == "ENTRYPOINT"]
    return json_list(lines[-1]) if lines else None


def read_instructions(text: str) -> list[Instruction]:
    """The instructions of a Dockerfile, whatever is wrong with them."""
    return list(_instructions(text, DockerfileFindings()))


def copied_sources(text: str) -> list[str]:
    """Return what a build takes from its context; all of it where a source cannot be known."""
    values: dict[str, str | None] = {}
    sources = []
    for one in read_instructions(text):
        if one.name in ("COPY", "ADD") and "from" not in one.flags:
            sources += [_expanded(word, values) or "." for word in one.words()[:-1]]
        elif one.name == "RUN" and "mount" in one.flags:
            sources.append(".")
        values |= {
            name: _expanded(value, values) for name, value in declared_values(one) if value is not None
        }
    return sources


def declared_values(one: Instruction) -> Iterator[tuple[str, str | None]]:
    """Names with their values that ARG or ENV declare."""
    if one.name == "ARG":
        yield from _declared(one)
    elif one.name == "ENV":
        yield from _variables(one.text)


def expanded(text: str, values: Mapping[str, str | None]) -> str:
    """With the variables filled in whose values are known, as far as they are not endless."""
    left = _MOST_FILLED

    def value_of(match: re.Match[str]) -> str:
        nonlocal left
        value = values.get(match["plain"] or match["braced"]) or match[0]
        left -= len(value)
        return value if left >= 0 else match[0]

    return _VARIABLE.sub(value_of, text)


def json_list(text: str) -> list[str] | None:
    """The exec form; whatever is not a list of texts is taken for a shell's line."""
    try:
        listed = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return listed if isinstance(listed, list) and all(isinstance(one, str) for one in listed) else None


def _instructions(text: str, found: DockerfileFindings) -> Iterator[Instruction]:
    escape, lines = "\\", text.removeprefix("\ufeff").splitlines()
    for line in lines:
        directive = _DIRECTIVE.fullmatch(line.strip())
        if directive is None:
            break
        if directive["name"].lower() == "escape":
            escape = directive["value"]
        elif directive["name"].lower() == "syntax":
            found.notes.append("`# syntax=` is only a comment to the classic builder")
    collected, began = "", 0
    for number, line in enumerate(lines, start=1):
        if line.strip().startswith("#") or (collected and not line.strip()):
            continue  # comments and empty lines do not count, between continued lines too
        began = began if collected else number
        stripped = line.rstrip()
        if stripped.endswith(escape):
            collected += stripped[:-1] + "\n"
            continue
        whole, collected = collected + line, ""
        if whole.strip():
            yield _instruction(began, whole.strip(), found)
    if collected.strip():
        yield _instruction(began, collected.strip(), found)


def _instruction(line: int, text: str, found: DockerfileFindings) -> Instruction:
    name, _, rest = text.partition(" ") if " " in text.split("\n")[0] else text.partition("\n")
    name, rest, flags = name.strip().upper(), rest.strip(), {}
    while (flag := re.match(r"--([a-z-]+)(?:=(\S+))?\s+", rest)) and name in (*BUILDKIT_FLAGS, "FROM"):
        flags[flag[1]] = flag[2] or ""
        rest = rest[flag.end() :]
    if name not in INSTRUCTIONS:
        found.problems.append(f"line {line}: {name[:40]} is not an instruction")
    for option in BUILDKIT_FLAGS.get(name, ()):
        if option in flags:
            found.problems.append(f"line {line}: {name} --{option} needs BuildKit")
    if name in BUILDKIT_FLAGS and _HEREDOC.search(_QUOTED.sub("", rest)):
        found.problems.append(f"line {line}: a here-document needs BuildKit")
    if secret := _SECRET_VALUE.search(rest):
        found.problems.append(f"line {line}: it holds what looks like a secret ({secret[0][:4]}…)")
    if name == "RUN" and _FETCHES_MODEL.search(rest):
        found.notes.append(f"line {line} seems to fetch a model: it counts in the build's 30 minutes")
    return Instruction(line, name, flags, rest)


def _stages(
    instructions: Sequence[Instruction], found: DockerfileFindings
) -> tuple[list[BuildStage], list[Instruction]]:
    stages: list[BuildStage] = []
    before: list[Instruction] = []
    for one in instructions:
        if one.name == "FROM":
            words = one.text.split()
            named = words[2] if len(words) == 3 and words[1].upper() == "AS" else ""
            if len(words) not in (1, 3) or (len(words) == 3 and not named):
                found.problems.append(f"line {one.line}: FROM takes an image, and AS with a name")
            stages.append(BuildStage(words[0] if words else "", named.lower(), [one]))
        elif stages:
            stages[-1].instructions.append(one)
        elif one.name == "ARG":
            before.append(one)
        else:
            found.problems.append(f"line {one.line}: {one.name} stands before the first FROM")
    return stages, before


def _global_arguments(before: Sequence[Instruction], found: DockerfileFindings) -> dict[str, str | None]:
    arguments: dict[str, str | None] = {}
    for one in before:
        for name, value in _declared(one):
            arguments[name] = _expanded(value, arguments) if value is not None else None
            if value is None:
                found.problems.append(
                    f"line {one.line}: ARG {name} before FROM has no default, and no validator gives one"
                )
            _check_secret_name(one, name, value, found)
    return arguments


def _check_base(
    stage: BuildStage,
    earlier: Sequence[BuildStage],
    arguments: Mapping[str, str | None],
    found: DockerfileFindings,
) -> None:
    line = stage.instructions[0].line
    base = _expanded(stage.base, arguments)
    if base is None or not base:
        found.problems.append(f"line {line}: FROM {stage.base} has an argument without a value")
    elif base != "scratch" and base.lower() not in {one.name for one in earlier} and not _DIGEST.search(base):
        found.notes.append(f"the base {base} has no digest: what the tag means may change before the build")


def _check_stage(
    stage: BuildStage,
    earlier: Sequence[BuildStage],
    global_arguments: Mapping[str, str | None],
    context: Sequence[str],
    found: DockerfileFindings,
) -> None:
    values: dict[str, str | None] = {}
    empty: set[str] = set()
    for one in stage.instructions[1:]:
        for match in _VARIABLE.finditer(one.text):
            name = match["plain"] or match["braced"]
            if name in empty and not (match["rest"] or "").startswith((":-", "-", ":+", "+")):
                empty.discard(name)
                why = (
                    "only BuildKit sets it" if name in BUILDKIT_ARGUMENTS else "validators give no arguments"
                )
                found.problems.append(
                    f"line {one.line}: {name} is used and has no value: {why}; give it one, or ARG {name}="
                )
        if one.name == "ARG":
            for name, value in _declared(one):
                inherited = global_arguments.get(name)
                values[name] = _expanded(value, values) if value is not None else inherited
                if value is None and inherited is None and name not in GIVEN_ARGUMENTS:
                    empty.add(name)
                _check_secret_name(one, name, value, found)
        elif one.name == "ENV":
            for name, value in _variables(one.text):
                values[name] = _expanded(value, values)
                empty.discard(name)
                if value and _SECRET_NAME.search(name.upper()) and "$" not in value:
                    found.problems.append(f"line {one.line}: ENV {name} is a secret, and the image is public")
        elif one.name in ("COPY", "ADD"):
            _check_copy(one, earlier, values, context, found)


def _check_secret_name(one: Instruction, name: str, value: str | None, found: DockerfileFindings) -> None:
    if not _SECRET_NAME.search(name.upper()):
        return
    if value:
        found.problems.append(f"line {one.line}: ARG {name} is a secret, and the repository is public")
    else:
        found.notes.append(f"line {one.line}: ARG {name} asks for a secret, which no validator gives")


def _check_copy(
    one: Instruction,
    earlier: Sequence[BuildStage],
    values: Mapping[str, str | None],
    context: Sequence[str],
    found: DockerfileFindings,
) -> None:
    words = one.words()
    if len(words) < 2:
        found.problems.append(f"line {one.line}: {one.name} needs a source and a place")
        return
    if "from" in one.flags:
        _check_stage_name(one, one.flags["from"], earlier, found)
        return
    *sources, place = words
    if len(sources) > 1 and not place.endswith("/"):
        found.problems.append(f"line {one.line}: several sources need a place that ends with /: {place}")
    for source in sources:
        path = _expanded(source, values)
        if path is None or re.match(r"[a-z]+://", path):
            continue
        if not is_in_context(path, context):
            found.problems.append(
                f"line {one.line}: {source} is not there for the build: not in the commit, or left out by "
                ".dockerignore"
            )


def _check_stage_name(
    one: Instruction, name: str, earlier: Sequence[BuildStage], found: DockerfileFindings
) -> None:
    known = {stage.name for stage in earlier if stage.name}
    if name.lower() in known or (name.isdigit() and int(name) < len(earlier)):
        return
    if re.search(r"[/:@.]", name):
        found.notes.append(f"line {one.line}: files are copied from the image {name}, which is fetched")
        return
    found.problems.append(f"line {one.line}: --from={name}: no stage before this one has that name")


def _check_entry_point(stage: BuildStage, found: DockerfileFindings) -> None:
    named = [one for one in stage.instructions if one.name == "ENTRYPOINT"]
    if not named:
        found.problems.append(
            "it has no ENTRYPOINT: the task's arguments would be taken for a program, or go to the base's own"
        )
        return
    last = named[-1]
    program = json_list(last.text)
    if program is None:
        found.problems.append(
            f"line {last.line}: ENTRYPOINT is a shell's line, which drops the task's arguments: "
            'write a list, ["python", "-m", "…"]'
        )
    elif not program:
        found.problems.append(f"line {last.line}: ENTRYPOINT is an empty list")
    elif _drops_arguments(program):
        found.problems.append(f'line {last.line}: `sh -c` drops the task\'s arguments: pass on "$@"')


def _check_user(stage: BuildStage, arguments: Mapping[str, str | None], found: DockerfileFindings) -> None:
    """Another user than root may not save in validators' volumes, and has no capability that would let it."""
    values = dict(arguments)
    user = None
    for one in stage.instructions:
        values |= {name: value for name, value in declared_values(one) if value is not None}
        if one.name == "USER":
            user = one
    name = expanded(user.text, values).strip().partition(":")[0] if user else "root"
    if user and name not in ("root", "0"):
        found.problems.append(
            f"line {user.line}: USER {name} can save nothing: validators mount a volume of root's on "
            "/app/checkpoints and give no capabilities; leave it out"
        )


def _drops_arguments(program: Sequence[str]) -> bool:
    is_shell = Path(program[0]).name in ("sh", "bash", "dash", "ash") and program[1:2] == ["-c"]
    return is_shell and not any("$@" in part or "$*" in part for part in program[2:3])


def _declared(one: Instruction) -> Iterator[tuple[str, str | None]]:
    for word in _split(one.text):
        name, equals, value = word.partition("=")
        yield name, value if equals else None


def _variables(text: str) -> Iterator[tuple[str, str]]:
    words = _split(text)
    if words and "=" not in words[0]:  # the old form: a name, and the rest of the line
        yield words[0], " ".join(words[1:])
        return
    for word in words:
        name, _, value = word.partition("=")
        yield name, value


def _expanded(text: str, values: Mapping[str, str | None]) -> str | None:
    """With its variables filled in; None where one has no known value."""
    unknown, left = False, _MOST_FILLED

    def value_of(match: re.Match[str]) -> str:
        nonlocal unknown, left
        name, rest = match["plain"] or match["braced"], match["rest"] or ""
        value = values.get(name)
        if value is None and rest.startswith((":-", "-")):
            return rest.lstrip(":").removeprefix("-")
        left -= len(value or "")
        if value is None or left < 0:
            unknown = True
            return ""
        return value

    filled = _VARIABLE.sub(value_of, text)
    return None if unknown else filled


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


# — the context of a build


def context_files(tree: Path, files: Sequence[str]) -> list[str]:
    """Return the files that are sent to a build."""
    try:
        lines = read_inside(tree, tree / ".dockerignore").decode("utf-8", "replace").splitlines()
    except OSError:
        return list(files)
    rules = []
    for line in lines:
        pattern = line.strip()
        if not pattern or pattern.startswith("#"):
            continue
        keeps = pattern.startswith("!")
        cleaned = pattern.removeprefix("!").strip().strip("/").removeprefix("./")
        if cleaned:
            rules.append((keeps, _ignore_pattern(cleaned)))
    return [name for name in files if not _ignored(name, rules)]


def is_in_context(path: str, context: Sequence[str]) -> bool:
    """Return True if a source of COPY names anything that is sent to the build."""
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if not parts:
        return bool(context)
    if ".." in parts:
        return False
    depth = len(parts)
    for name in context:
        start = name.split("/")[:depth]
        if len(start) == depth and all(map(fnmatch.fnmatchcase, start, parts)):
            return True
    return False


def _ignored(name: str, rules: Sequence[tuple[bool, re.Pattern[str]]]) -> bool:
    """The last pattern that fits the file, or a directory above it, decides."""
    parts = name.split("/")
    paths = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    ignored = False
    for keeps, pattern in rules:
        if any(pattern.fullmatch(path) for path in paths):
            ignored = not keeps
    return ignored


def _ignore_pattern(pattern: str) -> re.Pattern[str]:
    translated = ""
    at = 0
    while at < len(pattern):
        if pattern.startswith("**", at):
            at += 2
            if pattern.startswith("/", at):
                at += 1
                translated += "(?:.*/)?"
            else:
                translated += ".*"
            continue
        letter = pattern[at]
        if letter == "[" and (end := pattern.find("]", at + 2)) > 0:
            translated += pattern[at : end + 1]
            at = end + 1
            continue
        translated += {"*": "[^/]*", "?": "[^/]"}.get(letter, re.escape(letter))
        at += 1
    return re.compile(translated)
