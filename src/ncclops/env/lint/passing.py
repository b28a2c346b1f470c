"""How commands hand NAME=VALUE to programs: options of launchers, containers and schedulers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ncclops.env.lint.model import Setting
from ncclops.env.lint.words import NAME, Word, is_open, script_of, words_of

ASSIGNMENT = re.compile(rf"({NAME})(\+?)=(.*)", re.DOTALL)
# Words before a command that change nothing of what it is given.
PREFIXES = frozenset(
    {"exec", "nohup", "time", "sudo", "command", "nice", "eval", "stdbuf", "-"}
    | {"builtin", "or", "and"}
)
# Options that stand before one NAME=VALUE, whatever the command.
_BEFORE_ONE = frozenset(
    {"-x", "-e", "--env", "--setenv", "--envs", "--export-env", "--container-env"}
    | {"--set-env", "--build-env", "--env-var", "--add-env", "--env-add", "-env", "-envs"}
    | {"--environment", "--from-literal"}
)
# Options that stand before NAME and VALUE in two words (Hydra, Intel MPI, bubblewrap).
_BEFORE_TWO = frozenset({"-genv", "-env", "--genv", "--setenv"})
_WITH_EQUALS = re.compile(
    r"(?:--(?:env|envs|setenv|container-env|set-env|env-var|env-add|environment|from-literal)="
    rf"|-[ex])(?={NAME}=)(.*)",
    re.DOTALL,
)
# Options with a list of them, and values of a chart: ``worker.env.NAME=VALUE``.
_OF_LISTS = re.compile(
    r"(--(?:set|update)-env-vars|--env-vars|--environment-variables|--set(?:-string|-literal)?)"
    r"(?:=(.*))?",
    re.DOTALL,
)
_LIST_OPTION = {"qsub": "-v", "pjsub": "-x"}
OF_OPEN_MPI = "mca_base_env_list"
_KEYS = r"(?:[\w-]+(?:\[\d+\])?\.)*+"
_ENV = re.compile(r"(?:\S*/)?env")
_SLURM = re.compile(r"--export(?:=(.*))?", re.DOTALL)
_RAY = re.compile(r"--runtime-env-json(?:=(.*))?", re.DOTALL)
# One option with several, separated by commas.
_COMMA_LISTS = frozenset({"apptainer", "singularity", "qsub", "bsub", "pjsub"})


def value_of(text: str, word: Word) -> str | None:
    """The value; None where it is known only when run. A ``$`` in quotes is for a later shell."""
    if not word.constant or "$" in text or "`" in text or is_open(text):
        return None
    return text


def passed(words: Sequence[Word], command: str = "") -> Iterator[Setting]:
    """Every NAME=VALUE that an option among ``words`` hands to a program."""
    at = 0
    while at < len(words):
        word = words[at]
        following = words[at + 1] if at + 1 < len(words) else None
        at += 1
        if match := _SLURM.fullmatch(word.text):
            if match[1] is not None:
                yield from listed(match[1], word)
            elif following is not None:
                yield from listed(following.text, following)
                at += 1
        elif match := _RAY.fullmatch(word.text):
            source = word if match[1] is not None else following
            if source is not None:
                yield from _of_json(source, source.text if match[1] is None else match[1])
        elif (match := _OF_LISTS.fullmatch(word.text)) and (match[2] or following is not None):
            source = word if match[2] is not None or following is None else following
            text = source.text if match[2] is None else match[2]
            yield from listed(text, source)
        elif word.text == OF_OPEN_MPI and following is not None:
            yield from listed(following.text.replace(";", ","), following)
        elif _ENV.fullmatch(word.text):
            yield from _behind_env(words[at:])
        elif word.text == "-E" and command == "jsrun" and following is not None:
            yield from _of_option(following.text, following, command)
        elif option := _WITH_EQUALS.fullmatch(word.text):
            yield from _of_option(option[1], word, command)
        elif following is not None and word.text in _BEFORE_ONE | _BEFORE_TWO:
            if ASSIGNMENT.fullmatch(following.text):
                yield from _of_option(following.text, following, command)
                at += 1
            elif word.text == "-env" and "=" in following.text:
                yield from listed(following.text, following)
            elif word.text in _BEFORE_TWO and at + 1 < len(words):
                name, value = following.text, words[at + 1]
                if re.fullmatch(NAME, name):
                    yield Setting(name, value_of(value.text, value), following.line)
                    at += 2
        elif following is not None and word.text == _LIST_OPTION.get(command):
            yield from listed(following.text, following)


def _behind_env(words: Sequence[Word]) -> Iterator[Setting]:
    """``timeout 9 env -u B A=1 program``."""
    skip = False
    for word in words:
        match = ASSIGNMENT.fullmatch(word.text)
        if match:
            yield Setting(match[1], value_of(match[3], word), word.line)
        elif not skip and not word.text.startswith("-"):
            return
        skip = word.text in ("-u", "--unset")


def names_passed(words: Sequence[Word]) -> Iterator[str]:
    """The variables that ``-x NAME`` passes on as they are."""
    for option, after in pairwise(words):
        if option.text in _BEFORE_ONE and re.fullmatch(NAME, after.text):
            yield after.text


# What only Open MPI's mpirun takes, what only others take, and what hands on in another way.
OPEN_MPI = frozenset({"--mca", "-mca", "--allow-run-as-root", "-x", "--prefix", "--oversubscribe"})
_HYDRA = frozenset({"-ppn", "-f", "-genv", "-env", "-hosts", "-genvlist", "-genvall", "-launcher"})
_WITH_TWO = frozenset({"--mca", "-mca", "--gmca", "-gmca", "-genv", "--genv", "-env", "--env"})
_WITHOUT_VALUE = frozenset(
    {"--allow-run-as-root", "--oversubscribe", "-oversubscribe", "--nooversubscribe", "--verbose"}
    | {"--report-bindings", "-report-bindings", "--display-map", "-display-map", "--tag-output"}
    | {"-tag-output", "--merge-stderr-to-stdout", "--use-hwthread-cpus", "-v", "-q", "--quiet"}
    | {"--enable-recovery", "--get-stack-traces", "--debug-daemons", "-genvall"}
)
_HOSTS_OF = re.compile(r"--?(?:host|H)")
_HOST_FILE = re.compile(r"--?(?:hostfile|machinefile)(?:=.*)?")
_OTHERWISE = re.compile(r".*mca_base_env_list.*|--?(?:tune|am)|[A-Z_]+\*", re.DOTALL)
# What programs on every rank read.
_OF_RANKS = ("NCCL_", "TORCH_NCCL_", "RCCL_", "NVSHMEM_", "FI_", "UCX_", "GLOO_")


def _options_end(words: Sequence[Word]) -> int:
    """Where the options of ``mpirun`` end and the program begins."""
    at = 1
    while at < len(words) and words[at].text.startswith("-"):
        text = words[at].text
        alone = "=" in text or text in _WITHOUT_VALUE
        at += 1 if alone else 3 if text in _WITH_TWO else 2
    return min(at, len(words))


def kept_back(words: Sequence[Word], exported: Iterable[str]) -> tuple[list[str], bool]:
    """What ``mpirun`` on several hosts does not hand on, and whether it certainly is Open MPI's.

    ``words`` are the whole command. Where options come from a variable, nothing is known.
    """
    words = words[: _options_end(words)]
    texts = [word.text for word in words]
    certain = not OPEN_MPI.isdisjoint(texts)
    on_several = any(_HOST_FILE.fullmatch(text) for text in texts) or any(
        _HOSTS_OF.fullmatch(option) and "," in hosts for option, hosts in pairwise(texts)
    )
    if not on_several or (not certain and not _HYDRA.isdisjoint(texts)):
        return [], certain
    for option, after in pairwise(words):
        open_options = after.raw.lstrip('"').startswith("$") and not option.text.startswith("-")
        if _OTHERWISE.fullmatch(after.text) or open_options:
            return [], certain
    given = {setting.name for setting in passed(words)} | set(names_passed(words))
    return [name for name in exported if is_of_ranks(name) and name not in given], certain


def is_of_ranks(name: str) -> bool:
    """Whether programs on every rank read it."""
    return name.startswith(_OF_RANKS)


def _of_option(text: str, word: Word, command: str) -> Iterator[Setting]:
    if command in _COMMA_LISTS:
        yield from listed(text, word)
        return
    match = ASSIGNMENT.fullmatch(text)
    if match:
        yield Setting(match[1], value_of(match[3], word), word.line)


def listed(text: str, word: Word) -> Iterator[Setting]:
    """``ALL,A=1,B=2``: a value ends at the next comma that starts another name.

    In values of a chart other keys stand before it: ``worker.env.A=1``.
    """
    for part in re.split(rf",\s*(?={_KEYS}{NAME}(?:=|,|$))", text):
        match = ASSIGNMENT.fullmatch(re.sub(rf"^{_KEYS}(?={NAME}=)", "", part.strip()))
        if match:
            yield Setting(match[1], value_of(match[3].strip("'\""), word), word.line)


def _of_json(word: Word, text: str) -> Iterator[Setting]:
    """``{"env_vars": {"A": "1"}}``, as Ray takes it."""
    try:
        document = json.loads(text)
        variables = document["env_vars"].items()
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return
    for name, value in variables:
        if isinstance(name, str):
            known = isinstance(value, str) and not is_open(value)
            line = word.line + text[: max(text.find(f'"{name}"'), 0)].count("\n")
            yield Setting(name, value if known else None, line)


def without_key(word: Word) -> Word:
    """``[NAME]=VALUE`` of an associative array as ``NAME=VALUE``."""
    return replace(word, text=re.sub(rf"^\[({NAME})\]=", r"\1=", word.text))


def inner_words(text: str, word: Word) -> list[Word]:
    """The words inside a quoted word; nothing in them is known where the word itself is not."""
    open_ended = "'" in word.raw[:1] or word.constant
    return [
        replace(w, constant=w.constant and (open_ended or "$" not in w.text))
        for w in words_of(script_of(word, text), word.line)
    ]


def leading(words: Sequence[Word]) -> Iterator[Setting]:
    for word in words:
        match = ASSIGNMENT.fullmatch(word.text)
        if match:
            name = re.sub(r"^(?:APPTAINERENV|SINGULARITYENV)_", "", match[1])
            yield Setting(name, None if match[2] else value_of(match[3], word), word.line)


def of_env(words: Sequence[Word]) -> tuple[bool, list[Setting], Sequence[Word]]:
    """What ``env`` sets, whether it begins with nothing, and the command behind it."""
    clean = False
    settings: list[Setting] = []
    at = 0
    while at < len(words):
        text = words[at].text
        if text in ("-i", "--ignore-environment", "-"):
            clean = True
        elif text in ("-u", "--unset"):
            at += 1
        elif ASSIGNMENT.fullmatch(text):
            settings.extend(leading([words[at]]))
        elif not text.startswith("-") and not re.match(r"\$\{?\w+", words[at].raw.lstrip('"')):
            break
        at += 1
    return clean, settings, words[at:]


def without_prefixes(words: Sequence[Word]) -> Sequence[Word]:
    while words and words[0].text in PREFIXES:
        words = words[1:]
    return words


def set_of_fish(words: Sequence[Word]) -> Iterator[Setting]:
    """``set -gx NAME VALUE``."""
    options = [word.text for word in words[1:] if re.match(r"-[a-zA-Z-]", word.text)]
    rest = [word for word in words[1:] if word.text not in options]
    exports = any(re.fullmatch(r"-[a-zA-Z]*x[a-zA-Z]*|--export", option) for option in options)
    if len(rest) == 2 and exports and re.fullmatch(NAME, rest[0].text):
        yield Setting(rest[0].text, value_of(rest[1].text, rest[1]), rest[1].line)
