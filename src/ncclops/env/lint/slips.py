"""What is wrong with a text itself: it means to set a variable, and does not."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

from ncclops.env.lint.environments import is_setting_of_interest
from ncclops.env.lint.model import LintFinding, Setting
from ncclops.env.lint.passing import ASSIGNMENT
from ncclops.env.lint.words import NAME, Word

# The ids of the findings below, for suppressions.
SLIP_IDS = (
    "cut-off-command",
    "empty-path-entry",
    "no-text",
    "not-passed-on",
    "only-these-exported",
    "own-shell",
    "roles-differ",
    "export-overwritten",
    "set-twice",
    "set-after-job",
    "split-assignment",
    "unexpanded-path",
    "unread-python",
)
# Variables whose values are lists, and what an entry of one looks like.
_LISTS = re.compile(r".*(?:_HCA|_IFNAME|_TLS|_NET_DEVICES|_VISIBLE_DEVICES|_ALGO|_PROTO|_SUBSYS)")
_ENTRY = re.compile(r"[\w.:^-]*[a-z0-9][\w.:-]*,?")
_BASH = "POSIX shell"
_APPTAINER = "Apptainer user guide, environment and metadata"
_SLURM = "Slurm, sbatch and srun --export"
_CATALOGUE = "the catalogue"
_OPEN_MPI = "Open MPI, mpirun -x"


def of_python(error: Exception) -> LintFinding:
    """A file of which this interpreter makes nothing but lines."""
    line = error.lineno if isinstance(error, SyntaxError) else None
    version = f"Python {sys.version_info.major}.{sys.version_info.minor}"
    what = error.msg if isinstance(error, SyntaxError) else str(error) or type(error).__name__
    return LintFinding(
        "unread-python",
        "note",
        (),
        f"this is nothing that {version} reads ({what}): only lines such as"
        " os.environ['NAME'] = 'value' were looked at",
        "run `ncclops env lint` with the Python that runs the file",
        line=line or 0,
    )


def no_text(name: str, value: str, line: int) -> LintFinding:
    """``os.environ["A"] = 1``."""
    number = value.lstrip("-").isdigit()
    return LintFinding(
        "no-text",
        "error",
        (name,),
        f"{name}: os.environ takes text alone, and raises TypeError for {value}",
        f'write "{value}"' if number else 'write "1" or "0", or delete it',
        "Python, os.environ",
        line,
    )


def of_export(words: Sequence[Word]) -> Iterator[LintFinding]:
    """``export A = 1``, ``export A= 1``, ``export $A=1``, ``export A=x, y``."""
    for position, word in enumerate(words[1:], start=1):
        following = words[position + 1] if position + 1 < len(words) else None
        bare = word.text.removesuffix("=")
        split = following is not None and (
            (word.text == bare and following.raw.startswith("="))
            or (
                word.raw == f"{bare}="
                and not ASSIGNMENT.fullmatch(following.text)
                and not is_setting_of_interest(following.text)
                and not following.raw.startswith("$")
            )
        )
        if split and following is not None and is_setting_of_interest(bare):
            third = words[position + 2].raw if position + 2 < len(words) else ""
            yield _split(bare, word, following, third)
        elif following is not None:
            yield from _cut_list(word, following)
        yield from _expanded(word)
        yield from of_path(word)


def _cut_list(word: Word, following: Word) -> Iterator[LintFinding]:
    """``A=x, y``, ``A=x ,y``, ``A=x , y`` and ``A=x y``: the list ends at the blank."""
    match = ASSIGNMENT.fullmatch(word.text)
    if match is None or not match[3] or word.quoted or following.quoted:
        return
    name, value = match[1], match[3]
    goes_on = value.endswith(",") or not re.fullmatch(NAME, following.text)
    entry = following.raw.removeprefix(",")
    if (
        is_setting_of_interest(name)
        and _LISTS.fullmatch(name)
        and goes_on
        and (following.raw == "," or _ENTRY.fullmatch(entry))
    ):
        yield LintFinding(
            "split-assignment",
            "error",
            (name,),
            f"{name}: the blank ends the value, which is {value!r} then",
            "write the list without blanks, with commas",
            _BASH,
            word.line,
            # After a comma that stands alone, what follows is not known here.
            (f"{word.raw} {following.raw}", f"{word.raw.removesuffix(',')},{entry}")
            if entry
            else None,
        )


def of_command(words: Sequence[Word]) -> Iterator[LintFinding]:
    """``A = 1`` and ``$A=1``, which the shell takes for commands."""
    if len(words) > 1 and words[1].raw.startswith("=") and is_setting_of_interest(words[0].text):
        third = words[2].raw if len(words) > 2 else ""
        yield _split(words[0].text, words[0], words[1], third)
    if words:
        yield from _expanded(words[0])
    for word in words:
        if not ASSIGNMENT.fullmatch(word.text):
            break
        yield from of_path(word)


def of_path(word: Word) -> Iterator[LintFinding]:
    """``LD_LIBRARY_PATH=/a:`` and ``/a::/b``."""
    match = ASSIGNMENT.fullmatch(word.text)
    if match is None or match[1] != "LD_LIBRARY_PATH" or match[2]:
        return
    path = match[3]
    for _ in range(3):  # ${A:+:$B} and ${A::1} have colons of their own
        path = re.sub(r"\$\{[^{}]*\}", "$", path)
    if "::" in path or (path.strip(":") and (path[0] == ":" or path[-1] == ":")):
        yield LintFinding(
            "empty-path-entry",
            "note",
            (match[1],),
            f"{match[1]} has an empty entry, which is the current directory: a library that lies"
            " there is loaded",
            "take the colon away that nothing follows, or that another follows",
            "ld.so(8)",
            word.line,
        )


def escaped_path(name: str, line: int) -> LintFinding:
    """``ENV LD_LIBRARY_PATH=/a:\\$LD_LIBRARY_PATH``."""
    return LintFinding(
        "unexpanded-path",
        "warning",
        (name,),
        f"{name}: the backslash keeps its old value out: the text ${name} becomes an entry, and"
        " what the base image has in it is lost",
        f"write ${name} without the backslash",
        "Dockerfile reference, environment replacement",
        line,
    )


def unexpanded_path(name: str, line: int) -> LintFinding:
    """``{name: LD_LIBRARY_PATH, value: "/a:$LD_LIBRARY_PATH"}``."""
    return LintFinding(
        "unexpanded-path",
        "note",
        (name,),
        f"{name}: Kubernetes fills in $(NAME) alone, and only what stands above in the list, so the"
        f" text ${name} becomes an entry, and what the image has in it is lost",
        "write all directories, or add to it in the command",
        "Kubernetes, dependent environment variables",
        line,
    )


def _split(name: str, word: Word, following: Word, third: str) -> LintFinding:
    repair = None
    if following.raw == "=" and third and word.raw == name:
        repair = (f"{name} = {third}", f"{name}={third}")
    elif word.raw == f"{name}=":
        repair = (f"{name}= {following.raw}", f"{name}={following.raw}")
    return LintFinding(
        "split-assignment",
        "error",
        (name,),
        f"{name}: a shell allows no blanks around =, so this does not give it the value",
        f"write {name}=VALUE",
        _BASH,
        word.line,
        repair,
    )


def _expanded(word: Word) -> Iterator[LintFinding]:
    match = re.match(rf"\$\{{?({NAME})\}}?=", word.raw)
    if match and is_setting_of_interest(match[1]):
        yield LintFinding(
            "split-assignment",
            "error",
            (match[1],),
            f"${match[1]}= is filled in before the shell looks for assignments: it sets nothing",
            f"write {match[1]}=VALUE",
            _BASH,
            word.line,
            (match[0], f"{match[1]}="),
        )


def kept_from_container(name: str, variable: str, line: int) -> LintFinding:
    """``APPTAINERENV_A=1`` that no export follows."""
    return LintFinding(
        "not-exported",
        "note",
        (name, variable),
        f"{name} is assigned and not exported here, so the container has no {variable} of it unless"
        " it was exported before",
        f"export {name}",
        _APPTAINER,
        line,
    )


def cut_off(words: Sequence[Word], names: Sequence[str]) -> LintFinding:
    """Options at the begin of a command: the line before has no backslash."""
    return LintFinding(
        "cut-off-command",
        "warning",
        tuple(dict.fromkeys(names)),
        f"{words[0].text} begins a command here: the line before does not go on, so these options"
        " reach nothing",
        "end the line before with a backslash, and have no comment in between",
        _BASH,
        words[0].line,
    )


def only_these(given: Sequence[Setting], line: int, what: str) -> LintFinding:
    """``--export=A=1`` without ``ALL``."""
    return LintFinding(
        "only-these-exported",
        "warning",
        tuple(dict.fromkeys(setting.name for setting in given)),
        f"{what} without ALL: the job gets these variables and Slurm's own, and nothing else of"
        " the environment",
        "write --export=ALL,…, unless that is meant",
        _SLURM,
        line,
    )


def overwritten(given: Sequence[Setting], line: int) -> LintFinding:
    """A second ``#SBATCH --export``."""
    return LintFinding(
        "export-overwritten",
        "warning",
        tuple(dict.fromkeys(setting.name for setting in given)),
        f"a later #SBATCH --export (line {line}) takes the place of this one",
        "put all variables into one",
        _SLURM,
        given[0].line,
    )


def twice(first: Setting, second: Setting) -> LintFinding:
    """Two values, and no program in between that sees the first."""
    return LintFinding(
        "set-twice",
        "warning",
        (first.name,),
        f"{first.name} is {first.value!r} here, and {second.value!r} in line {second.line} before"
        " any program runs: that one counts",
        "keep the one that is meant",
        "",
        first.line,
    )


def not_passed_on(
    names: Sequence[str], line: int, certain: bool, giver: str = "this shell exports"
) -> LintFinding:
    """``mpirun`` on several hosts, without ``-x`` for what its environment has."""
    who = "Open MPI" if certain else "Open MPI, if this is its mpirun,"
    return LintFinding(
        "not-passed-on",
        "warning" if certain else "note",
        tuple(names),
        f"{who} starts the ranks of other hosts without what {giver}:"
        f" {', '.join(names)} {'is' if len(names) == 1 else 'are'} not set there",
        "give each with -x NAME, or put NCCL's own into its configuration file on every host",
        _OPEN_MPI,
        line,
    )


def roles_differ(role: str, other: str, given: Sequence[Setting]) -> LintFinding:
    """Settings that all ranks have to share, and one role of a job has alone."""
    names = tuple(dict.fromkeys(setting.name for setting in given))
    return LintFinding(
        "roles-differ",
        "warning",
        names,
        f"{', '.join(names)}: {other} has no such value as {role}, and all ranks of a job have to"
        " agree on it",
        f"give {other} the same",
        _CATALOGUE,
        given[0].line,
    )


def of_own_shell(name: str, line: int) -> LintFinding:
    """``!export A=1`` in a notebook."""
    return LintFinding(
        "own-shell",
        "warning",
        (name,),
        f"{name}: a line with ! and a cell with %%bash are a shell of their own, which ends with"
        " them, so nothing that follows sees it",
        f"write %env {name}=VALUE, or put it in front of the command that needs it",
        "IPython, shell access",
        line,
    )


def after_job(setting: Setting) -> LintFinding:
    """A variable that is exported when all programs have run."""
    return LintFinding(
        "set-after-job",
        "warning",
        (setting.name,),
        f"{setting.name} is exported behind the last program, so nothing here sees it",
        "move it in front of the command that needs it",
        _BASH,
        setting.line,
    )
