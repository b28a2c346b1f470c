"""What files of other languages set: each is read line by line, or as the shell script it says.

``config``: TOML, INI, Terraform, Nix, units of systemd, Lua modulefiles. A table or block is an
environment of its own there, and in a program (PowerShell, batch) a branch.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ncclops.env.lint.environments import Found, Scope, is_setting_of_interest
from ncclops.env.lint.model import Setting
from ncclops.env.lint.shell import read_shell
from ncclops.env.lint.words import NAME, is_open

_QUOTED = r'"(?:[^"\\]|\\.)*"' + r"|'[^']*'"
_VALUE = rf"(?P<value>{_QUOTED}|(?:(?!,[\"']?[A-Z][A-Z0-9_]*=)[^\s\"';#{{}}\[\]()])+)"
_HAS_EXPANSION = re.compile(r"%\w+%|\$")
# What may stand behind a value that is a literal: all else makes an expression of it.
_ENDS_LITERAL = re.compile(r"\s*(?:[,;}\])#]|//|--|$)")
_GOES_ON = re.compile(r"\s*(?:\+|\.\.|\?|\()")
_TO_SEE = re.compile(rf"{_QUOTED}|(?P<comment>\s(?:#|//).*)")
_BLOCK_COMMENTS = (("/*", "*/"), ("--[[", "]]"), ("<#", "#>"), ("{#", "#}"))
_TEXTS = re.compile(r"\"\"\"|'''|\|\|\||(?<!['$])''(?!['$\\])")
# Keys whose values are for people, whatever they say of variables.
_FOR_PEOPLE = re.compile(
    r"(?i)\s*[\"']?(?:description|title|summary|help|docs?|documentation|comment|about|message"
    r"|error_message|readme)[\"']?\s*[=:]"
)


@dataclass(frozen=True)
class _Language:
    """How a line sets a variable, what is a comment, and which signs begin and end a block.

    A line that ends in ``goes_on`` is one with the next; empty: none is.
    """

    settings: tuple[re.Pattern[str], ...]
    comment: re.Pattern[str]
    begins: re.Pattern[str]
    ends: re.Pattern[str]
    is_program: bool
    goes_on: str = ""


_BRACES = (re.compile(r"\{"), re.compile(r"\}"))
_LANGUAGES = {
    "config": _Language(
        (
            re.compile(rf"(?<![\w/$-])[\"']?(?P<name>{NAME})[\"']?\s*(?:=>|=(?!=)|:)\s*{_VALUE}"),
            re.compile(rf"^\s*Environment=[\"']?(?P<name>{NAME})=(?P<value>[^\s\"']*)"),
            re.compile(
                rf"\bname[\"']?\s*[=:]\s*[\"'](?P<name>{NAME})[\"']\s*,?\s*"
                rf"[\"']?value[\"']?\s*[=:]\s*{_VALUE}"
            ),
            re.compile(rf"\b(?:set|push)env\(\s*[\"'](?P<name>{NAME})[\"']\s*,\s*{_VALUE}\s*\)"),
        ),
        re.compile(r"\s*(?:#|//|;|--)"),
        re.compile(r"\{|^\s*\["),
        re.compile(r"\}|^\s*\["),
        False,
    ),
    "powershell": _Language(
        (
            re.compile(
                rf"(?i)\$\{{?env:(?P<name>{NAME})\}}?\s*=(?!=)\s*{_VALUE}(?=\s*(?:$|[;}}#]))"
            ),
            re.compile(
                rf"(?i)\$env:(?P<name>{NAME})\s*=\s*if\s*\([^()]*\)\s*\{{[^{{}}]*\}}\s*else\s*\{{\s*"
                rf"{_VALUE}\s*\}}"
            ),
            re.compile(
                rf"(?i)\bSet-Item\s+(?:-Path\s+)?Env:\\?(?P<name>{NAME})\s+(?:-Value\s+)?{_VALUE}"
            ),
            re.compile(
                rf"(?i)SetEnvironmentVariable\(\s*[\"'](?P<name>{NAME})[\"']\s*,\s*{_VALUE}"
            ),
            re.compile(rf"(?i)\bsetx\s+(?P<name>{NAME})\s+{_VALUE}"),
        ),
        re.compile(r"\s*#"),
        *_BRACES,
        True,
        goes_on="`",
    ),
    "batch": _Language(
        (
            re.compile(rf"(?i)\bset\s+(?:\"(?P<name>{NAME})=(?P<value>[^\"]*)\")"),
            re.compile(rf"(?i)\bset\s+(?P<name>{NAME})=(?P<value>[^&|<>\"]*)"),
            re.compile(rf"(?i)\bsetx\s+(?P<name>{NAME})\s+{_VALUE}"),
        ),
        re.compile(r"(?i)\s*@?(?:rem\b|::|echo\b[^&]*$)"),
        re.compile(r"\(\s*$"),
        re.compile(r"^\s*\)"),
        True,
        goes_on="^",
    ),
}


def read_lines(text: str, kind: str, found: Found, line: int = 1) -> None:
    """Tell ``found`` what ``text`` sets, ``kind`` being its language."""
    language = _LANGUAGES[kind]
    for begin, end in _BLOCK_COMMENTS:
        text = _without(text, begin, end)
    if kind == "powershell":
        text = _without(_without(text, '@"\n', '\n"@'), "@'\n", "\n'@")
    rows = _joined(text, line, language.goes_on)
    if language.is_program:
        _program(language, rows, found)
    else:
        _tables(language, rows, found)


def _without(text: str, begin: str, end: str) -> str:
    """``text`` without what stands between the two signs, where the first one begins a line."""
    pieces, position, stop = list[str](), 0, 0
    at = text.find(begin)
    while at >= 0:
        if stop < at + len(begin):
            stop = text.find(end, at + len(begin))
        if stop < 0:
            break
        # indented by 200 blanks at most: a line may be long, and is not read again from each sign
        before = "\n" * (at < 200) + text[max(0, at - 200) : at]
        if begin[-1] == "\n" or ("\n" in before and not before.rpartition("\n")[2].strip()):
            pieces += [text[position:at], "\n" * text.count("\n", at, stop + len(end))]
            position = stop + len(end)
        at = text.find(begin, max(position, at + 1))
    return "".join([*pieces, text[position:]])


def _without_end_comment(row: str) -> str:
    found = next((m for m in _TO_SEE.finditer(row) if m["comment"]), None)
    return row[: found.start()] if found else row


def _program(language: _Language, rows: Iterator[tuple[int, str]], found: Found) -> None:
    scope = Scope(found)
    depth = 0
    for number, row in rows:
        if language.comment.match(row):
            continue
        parts = re.split(r"(?i)\)\s*(?=else\b)", row) if language is _LANGUAGES["batch"] else [row]
        settings = [setting for part in parts for setting in _of_row(language, part, number)]
        for setting in settings:
            if depth or language.begins.search(row):
                choices = scope.alternatives(complete=False)
                with choices.branch():
                    scope.assign(setting)
                choices.merge()
            else:
                scope.assign(setting)
        if re.search(rf"\s-(?:e|-env|x)[= ]\"?{NAME}=", row):
            read_shell(row, found, line=number)
        depth += len(language.begins.findall(row)) - len(language.ends.findall(row))
    scope.close()


def _tables(language: _Language, rows: Iterator[tuple[int, str]], found: Found) -> None:
    """A script within, such as user data or a hook, is one that ``export`` shows."""
    table: list[Setting] = []
    waiting, text, for_people = "", "", False
    for number, whole in rows:
        row = _without_end_comment(whole)
        if language.comment.match(row):
            continue
        inside = text
        for sign in _TEXTS.findall(row):
            text = sign if not text else "" if sign == text else text
        if not inside:
            for_people = _FOR_PEOPLE.match(row) is not None
        if for_people:
            continue
        if inside and re.match(rf"\s*{NAME}\s*(?:=\s|:|\s=)", row):
            continue  # of a text, only what a shell would take
        if re.match(r"\s*(?:export|setenv)\s", row):
            read_shell(row, found, line=number)
            continue
        if language.ends.search(row) and not language.begins.search(row.partition("}")[2]):
            table.extend(_of_row(language, row.partition("}")[0], number))
            _together(table, found)
            table = []
            continue
        if language.begins.search(row) and "}" not in row:
            _together(table, found)
            table = []
        # name and value of one entry may have lines of their own
        is_name = re.search(r"\bname[\"']?\s*[=:]\s*[\"']\w+[\"']\s*,?\s*$", row)
        table.extend(_of_row(language, f"{waiting} {row}" if waiting else row, number))
        waiting = row.strip() if is_name else ""
    _together(table, found)


def _together(table: list[Setting], found: Found) -> None:
    scope = Scope(found)
    for setting in table:
        scope.assign(setting)
    scope.close()


def _of_row(language: _Language, row: str, number: int) -> Iterator[Setting]:
    """What a line sets of what lint has a say in, each name once."""
    seen = set()
    for pattern in language.settings:
        for match in pattern.finditer(row):
            name = match["name"]
            if is_setting_of_interest(name) and name not in seen:
                seen.add(name)
                literal = language.is_program or _is_literal(match)
                value = match["value"]
                if language is _LANGUAGES["batch"] and re.search(r"\(\s*@?set\b", row):
                    value = value.rstrip().removesuffix(")")
                yield Setting(name, _known(value) if literal else None, number)


def _is_literal(match: re.Match[str]) -> bool:
    """Whether the value is written here, and no expression gives it.

    What has blanks around its sign is no word of a command, so nothing may follow the value there.
    """
    row, end, begin = match.string, match.end(), match.start("value")
    value = match["value"]
    if match.end("value") != end:
        return True
    if value[0] in "'\"":
        return _GOES_ON.match(row, end) is None
    if row.startswith("(", end):
        return False
    return not row[begin - 1].isspace() or _ENDS_LITERAL.match(row, end) is not None


def _known(text: str) -> str | None:
    """The value; None where it is known only when run, or is no text (``true``, a variable)."""
    text = text.strip().rstrip(",")
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    elif re.fullmatch(r"true|false|null|none|nil|(?:var|local|each|lib|self|config)\..*", text):
        return None
    elif re.fullmatch(r"[+-]?\d+(?:_\d+)+", text):
        text = text.replace("_", "")
    return None if is_open(text) or _HAS_EXPANSION.search(text) else text


def _joined(text: str, first: int, sign: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers; one that ends in ``sign`` goes on in the next."""
    begun, parts = first, list[str]()
    for number, row in enumerate(text.splitlines(), start=first):
        if not parts:
            begun = number
        if sign and row.rstrip().endswith(sign):
            parts.append(row.rstrip()[: -len(sign)])
            continue
        yield begun, " ".join([*parts, row])
        parts = []
    if parts:
        yield begun, " ".join(parts)


# ---- languages that are much like a shell's

_FISH = (
    (re.compile(r"(\s*)else if\b(.*)"), r"\1elif\2; then", ""),
    (re.compile(r"(\s*)if\b(.*?)(;.*|)$"), r"\1if\2; then\3", "fi"),
    (re.compile(r"(\s*)(for|while)\b(.*)"), r"\1\2\3; do", "done"),
    (re.compile(r"(\s*)function\s+(\S+).*"), r"\1\2() {", "}"),
    (re.compile(r"(\s*)(?:begin|switch)\b.*"), r"\1{", "}"),
    (re.compile(r"(\s*)case\b.*"), r"\1:", ""),
)
_CSH = (
    (re.compile(r"(\s*)else if\b.*\bthen\s*"), r"\1elif true; then", ""),
    (re.compile(r"(\s*)if\b.*\bthen\s*"), r"\1if true; then", "fi"),
    (re.compile(r"(\s*)if\s*\(.*\)\s*(setenv\s.*)"), r"\1if true; then \2; fi", ""),
    (re.compile(r"(\s*)(?:foreach|while)\b.*"), r"\1while true; do", "done"),
    (re.compile(r"(\s*)switch\b.*"), r"\1{", "}"),
    (re.compile(r"(\s*)(?:case\b.*|default):\s*"), r"\1:", ""),
)


def read_fish(text: str, found: Found, line: int = 1) -> None:
    """fish, whose blocks all end with ``end``."""
    read_shell(_as_shell(text, _FISH, re.compile(r"\s*end\b")), found, line=line)


def read_csh(text: str, found: Found, line: int = 1) -> None:
    """csh, whose blocks end with ``endif``, ``end`` and ``endsw``."""
    read_shell(_as_shell(text, _CSH, re.compile(r"\s*end(?:if|sw)?\b")), found, line=line)


def _as_shell(
    text: str, forms: tuple[tuple[re.Pattern[str], str, str], ...], end: re.Pattern[str]
) -> str:
    """``text`` with the blocks of a shell, line for line."""
    rows, open_blocks = [], list[str]()
    for row in text.split("\n"):
        form = next((form for form in forms if form[0].fullmatch(row)), None)
        if form is not None:
            rows.append(form[0].sub(form[1], row))
            open_blocks.extend([form[2]] if form[2] else [])
        elif end.match(row):
            rows.append(end.sub(open_blocks.pop() if open_blocks else ":", row))
        else:
            rows.append(row)
    return "\n".join(rows)


_MAKE_SETS = re.compile(rf"(?:export\s+)?(?P<name>{NAME})\s*[:?+]?:?:?=(?!=)\s*(?P<value>.*)")
_MAKE_EXPORTS = re.compile(r"export(?:\s+(?P<names>[\w ]+))?|\.EXPORT_ALL_VARIABLES:.*")
_MAKE_RECIPE = re.compile(r"\t\s*[@-]*")
_JUST_RECIPE = re.compile(r"(?:\t| {2,})\s*[@-]*")
_OF_MAKE = re.compile(r"^(?:\t|ifn?(?:eq|def)\b|endif\b|define\b|\.PHONY\b|-?include\b)", re.M)
_JUST_SETS = re.compile(rf"export\s+(?P<name>{NAME})\s*:=\s*{_VALUE}.*")


def read_make(text: str, found: Found, line: int = 1) -> None:
    """Makefiles and justfiles: what is exported, what a target exports, and the recipes."""
    exports = [m for row in text.splitlines() if (m := _MAKE_EXPORTS.fullmatch(row.strip()))]
    everything = any(not match["names"] for match in exports)
    named = {name for match in exports for name in (match["names"] or "").split()}
    scope = Scope(found)
    variables: dict[str, str] = {}
    recipe: list[tuple[int, str]] = []
    of_recipes = _MAKE_RECIPE if _OF_MAKE.search(text) else _JUST_RECIPE
    text = _without(text, "define ", "\nendef")
    for number, row in _joined(text, line, "\\"):
        if match := of_recipes.match(row):
            recipe.append((number, row[match.end() :]))
            continue
        bare = re.sub(r"^[\w./%-]+\s*:\s*(?=export\s)", "", row.strip())
        match = _JUST_SETS.fullmatch(bare) or _MAKE_SETS.fullmatch(bare)
        if match is None:
            continue
        value = re.split(r"\s+#", match["value"])[0].strip()
        variables[match["name"]] = value
        exported = bare.startswith("export") or everything or match["name"] in named
        if match.re is _JUST_SETS:
            rest = bare[match.end("value") :]
            is_literal = re.match(r"\s*(?:#|$)", rest) is not None
            value = value.strip("'\"") if is_literal else "$"
        known = None if is_open(value) or _HAS_EXPANSION.search(value) else value
        scope.assign(Setting(match["name"], known, number, exported))
    scope.close()
    for number, row in recipe:
        read_shell(_with_variables(row, variables), found, line=number)


def _with_variables(row: str, variables: dict[str, str]) -> str:
    """A line of a recipe for the shell: ``$(NAME)`` filled in, ``$$`` one sign."""
    fill: Callable[[re.Match[str]], str] = lambda m: variables.get(m[1], f"${{{m[1]}}}")  # noqa: E731
    return re.sub(r"\$[({](\w+)[)}]", fill, row).replace("$$", "$")
