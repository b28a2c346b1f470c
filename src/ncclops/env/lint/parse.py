"""What a file sets, whatever its format: the readers, and which of them a file is for.

A file is read, never run: a value that needs running is unknown, and what holds in a branch, a
container or a command holds there alone (``environments``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Literal, get_args

from ncclops.env.lint.containers import read_yaml
from ncclops.env.lint.dockerfile import read_dockerfile
from ncclops.env.lint.environments import Found
from ncclops.env.lint.model import LintedSettings, Setting
from ncclops.env.lint.notebook import code_of, holds_magics, read_notebook
from ncclops.env.lint.other_languages import read_csh, read_fish, read_lines, read_make
from ncclops.env.lint.python_source import read_python
from ncclops.env.lint.shell import read_shell
from ncclops.env.lint.words import NAME, is_open, without_comment
from ncclops.env.origins import parse_conf

Format = Literal[
    "shell",
    "dotenv",
    "conf",
    "yaml",
    "dockerfile",
    "python",
    "notebook",
    "apptainer",
    "csh",
    "fish",
    "powershell",
    "batch",
    "make",
    "config",
]
FORMATS: tuple[Format, ...] = get_args(Format)

_SUFFIXES: dict[str, Format] = {
    ".env": "dotenv",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".json": "yaml",
    ".dockerfile": "dockerfile",
    ".py": "python",
    ".ipynb": "notebook",
    ".def": "apptainer",
    ".conf": "conf",
    ".csh": "csh",
    ".tcsh": "csh",
    ".fish": "fish",
    ".ps1": "powershell",
    ".psm1": "powershell",
    ".bat": "batch",
    ".cmd": "batch",
    ".mk": "make",
    ".toml": "config",
    ".ini": "config",
    ".cfg": "config",
    ".tf": "config",
    ".tfvars": "config",
    ".hcl": "config",
    ".nix": "config",
    ".service": "config",
    ".lua": "config",
    ".jsonnet": "config",
}
_NAMES: dict[str, Format] = {
    "makefile": "make",
    "gnumakefile": "make",
    "justfile": "make",
    "jenkinsfile": "config",
    "singularity": "apptainer",
    "apptainer": "apptainer",
}
# What is a list of variables by its contents, if its name does not say more.
_ONLY_VARIABLES = re.compile(rf"(?:[ \t]*(?:#.*)?\n|{NAME}=[^\s;&|$`()]*[ \t]*(?:\n|\Z))+")
# A template is read as what it becomes.
_OF_TEMPLATES = frozenset(
    {".j2", ".jinja", ".jinja2", ".tpl", ".tmpl", ".template", ".in", ".example", ".sample"}
)
_SHELL_FILES = re.compile(
    r"\.?(?:bash|zsh|k?sh)?(?:rc|_profile|profile|env)|.*\.(?:sh|bash|sbatch)"
)
# Variables that name a file which a shell reads when it starts.
_SOURCED_LATER = ("BASH_ENV", "R_ENVIRONMENT")
_PROGRAM = re.compile(r"#![^\n]*\b(?:ba|z|da|k)?sh\b|#![^\n]*\bpython")
_INTERPRETERS: dict[str, Format] = {"python": "python", "csh": "csh", "fish": "fish"}
_INTERPRETER = re.compile(r"python|csh|fish")
_MANIFEST = re.compile(r"(?:---\s*+)?apiVersion:")
# What a file whose name does not say so is by what stands in it.
_CONTENTS: tuple[tuple[re.Pattern[str], Format], ...] = (
    (re.compile(r"\s*FROM\s+\S+[^\n]*\n"), "dockerfile"),
    (re.compile(r"(?:.*\n)*?\[(?:Service|Unit)\]"), "config"),
    (re.compile(r"\s*(?:#[^\n]*\n\s*)*(?:import|from)\s+\w+[^\n]*\n"), "python"),
    (re.compile(rf"{_ONLY_VARIABLES.pattern}\Z"), "dotenv"),
    (re.compile(rf"(?:.*\n)*?[ \t]*(?:export\s+{NAME}=|#(?:SBATCH|PBS|BSUB)\s)"), "shell"),
)
# Files for people, whatever they say of variables.
_FOR_PEOPLE = frozenset({".md", ".txt", ".rst", ".html", ".log", ".json", ".csv"})


def guess_format(path: Path, text: str = "") -> Format:
    """What kind of file ``path`` is, by its name and its first line; else a shell script."""
    name = PurePosixPath(path.name)
    while name.suffix.lower() in _OF_TEMPLATES and name.stem:
        name = PurePosixPath(name.stem)
    if name.name.startswith((".env", ".deepspeed_env")) and name.name != ".envrc":
        return "dotenv"
    if name.name.startswith(("Dockerfile", "Containerfile")):
        return "dockerfile"
    for known in (name.stem.lower(), name.name.lower()):
        if known in _NAMES and (known == name.name.lower() or _NAMES[known] != "config"):
            return _NAMES[known]
    first = text[:200].partition("\n")[0]
    if first.startswith("#!") and (program := _INTERPRETER.search(first)):
        return _INTERPRETERS[program[0]]
    if name.suffix.lower() in _SUFFIXES:
        return _SUFFIXES[name.suffix.lower()]
    if name.suffix.lower() in ("", ".list", ".txt") and _ONLY_VARIABLES.fullmatch(text):
        return "dotenv"
    return "shell"


def parse(text: str, kind: Format, path: Path = Path("-")) -> list[Setting]:
    """The settings in ``text``, in order, whichever of them holds where."""
    return list(read(text, kind, path).all)


def read(text: str, kind: Format, path: Path = Path("-")) -> LintedSettings:
    """The settings in ``text``, and the environments that they make."""
    depth = 0

    def embedded(inner: str, name: str, line: int) -> None:
        nonlocal depth
        wanted = _embedded_format(name) or _by_contents(name, inner)
        if wanted is None or depth >= 3:
            return
        depth += 1
        _read_into(found, inner, wanted, path, line, written=True)
        depth -= 1

    found = Found(embedded=embedded)
    _read_into(found, text, kind, path, 1)
    expanded, printed = _expanded(code_of(text) if kind == "notebook" else text)
    settings = dict.fromkeys(
        replace(
            setting,
            exported=setting.exported or setting.name in found.exported,
            expanded=setting.name in expanded,
            printed=setting.name in printed,
        )
        for number, setting in enumerate(found.settings)
        if number >= found.unset.get(setting.name, 0)
    )
    in_order = sorted(settings, key=lambda setting: setting.line)
    return LintedSettings(in_order, found.environments, slips=found.slips)


def _read_into(
    found: Found, text: str, kind: Format, path: Path, line: int, *, written: bool = False
) -> None:
    if kind == "conf":
        # NCCL takes its file as it is; what a script writes into one is filled in before
        rows = [
            Setting(
                row.name,
                None if written and (is_open(row.value) or "$" in row.value) else row.value,
                row.line + line - 1,
            )
            for row in parse_conf(text, path)
        ]
        _one_environment(rows, found)
    elif kind == "dotenv":
        _one_environment(list(_dotenv(text, line)), found)
    elif kind == "yaml":
        read_yaml(text, found, line)
    elif kind == "dockerfile":
        read_dockerfile(text, found)
    elif kind == "notebook" or (kind == "python" and holds_magics(text)):
        read_notebook(text, found, line)
    elif kind == "python":
        read_python(text, found, line)
    elif kind == "apptainer":
        for section, begin in _sections(text):
            read_shell(section, found, line=begin + line - 1)
    elif kind in ("powershell", "batch", "config"):
        read_lines(text, kind, found, line)
    elif kind == "fish":
        read_fish(text, found, line)
    elif kind == "csh":
        read_csh(text, found, line)
    elif kind == "make":
        read_make(text, found, line)
    else:
        read_shell(text, found, line=line)


def _by_contents(name: str, text: str) -> Format | None:
    """What a text is that a script prints, or writes into a file whose name does not say it."""
    if PurePosixPath(name).suffix.lower() in _FOR_PEOPLE:
        return None
    if _PROGRAM.match(text):
        return guess_format(Path(), text)
    if _MANIFEST.match(text):
        return "yaml"
    if not name or re.match(r"/dev/|&|\d+$", name):
        return None  # printed, for people
    return next((kind for pattern, kind in _CONTENTS if pattern.match(text)), None)


def _embedded_format(name: str) -> Format | None:
    """What a file that a script writes is, None where its name does not say so."""
    file = name.rstrip("\"'").rpartition("/")[2]
    if file.endswith("nccl.conf"):
        return "conf"
    if file in ("environment", ".env", ".deepspeed_env", "$GITHUB_ENV", "${GITHUB_ENV}"):
        return "dotenv"
    if _SHELL_FILES.fullmatch(file) or file.rstrip("}").endswith(_SOURCED_LATER):
        return "shell"
    suffix = PurePosixPath(file).suffix.lower()
    if suffix in (".slurm", ".job", ".pbs", ".lsf"):
        return "shell"
    if file.startswith("Dockerfile"):
        return "dockerfile"
    if file.startswith("runtime_env") and suffix == ".json":
        return "yaml"  # what Ray hands to its workers; other JSON that scripts write is anybody's
    return _SUFFIXES.get(suffix) if suffix not in (".conf", ".json") else None


def _one_environment(settings: list[Setting], found: Found) -> None:
    for setting in settings:
        found.note(setting)
    last = {setting.name: setting for setting in settings}
    found.add_environment(last.values(), branched=False)


# A value in quotes, with or without a comment behind it.
_QUOTED = re.compile(r"""(['"])(.*?)\1(?:\s+#.*)?""")


def _dotenv(text: str, first: int) -> Iterator[Setting]:
    for number, line in enumerate(text.splitlines(), start=first):
        match = re.fullmatch(rf"\s*(?:export\s+)?({NAME})\s*=(.*)", line)
        if match is None:
            continue
        value = match[2].strip()
        quoted = _QUOTED.fullmatch(value)
        value = quoted[2] if quoted else without_comment(" " + value).strip()
        yield Setting(match[1], None if is_open(value) or "$" in value else value, number)


def _sections(text: str) -> Iterator[tuple[str, int]]:
    """The shell parts of an Apptainer definition, each with its first line."""
    body: list[str] = []
    begin, kind = 1, ""
    for number, line in enumerate([*text.splitlines(), "%end"], start=1):
        if line.startswith("%"):
            if kind in ("environment", "runscript", "startscript", "test", "post"):
                yield "\n".join(body), begin
            kind = line[1:].split()[0] if line[1:].split() else ""
            body, begin = [], number + 1
        else:
            body.append(line)


# A variable that is given its own value: with a default, or handed on to a program.
_HANDED_ON = re.compile(rf"\b({NAME})=[\"']?\$(?:\{{\1:?[-=]|\{{\1\}}|\1\b)")
_COMMENT_LINE = re.compile(r"^[ \t]*#.*", re.MULTILINE)
# What only prints, and into no file and no other program.
_PRINTS = re.compile(r"\b(?:echo|printf|print)\b[^\n;|&>)`]{0,500}+(?=[\n;]|&&|>\s?&|\Z)")
_MADE_USE_OF = re.compile(
    rf"\$[{{(]?({NAME})|(?:getenv\(|environ\.get\()\s*[\"']({NAME})[\"']"
    rf"|environ\[\s*[\"']({NAME})[\"']\s*\](?!\s*=[^=])"
)


def _expanded(text: str) -> tuple[set[str], set[str]]:
    """The names that ``text`` itself makes use of, and those that it only prints."""
    text = _HANDED_ON.sub("", _COMMENT_LINE.sub("", text))
    used, mentioned = (
        {next(filter(None, found)) for found in _MADE_USE_OF.findall(part)}
        for part in (_PRINTS.sub("", text), text)
    )
    return used, mentioned - used
