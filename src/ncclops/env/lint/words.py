"""Shell text as words, operators and here-documents, each with its line; nothing is run.

Time is linear in the text: no character is searched again from each place before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# What is known only when the text runs, or once a template is filled in.
DYNAMIC = re.compile(r"\$[\w{(@*#?!]|`")
_FALLBACK = re.compile(rf"\$\{{{NAME}:?[-=]([^${{}}`]*)\}}")
# Only where white space begins: it is not read again from each of its characters.
_COMMENT = re.compile(r"(?<!\s)\s+#.*")
_TEMPLATE = re.compile(
    r"\{\{|\{%|<%|\$\(|\$\{|\$\w|`|^<[^<>]*>$|\{[A-Za-z_][\w.]*\}|%\(\w+\)s|%[sd]\b|@\w+@|^\.\.\.$"
    r"|__[A-Za-z]\w*__|%[A-Z][A-Z0-9_]*%|\[\["
)
# Words that stand where the reader of a file is to write something.
_TO_FILL_IN = re.compile(
    r"(?<![A-Za-z0-9])(?:YOUR|Your|your)(?:[_-]?[A-Z]\w*|[_-]\w+)"
    r"|^(?:X{2,9}|x{3,9}|TODO|TBD|FIXME|[Cc]hange[_-]?[Mm]e|CHANGE[_-]?ME|REPLACE[_-]?ME)$"
    r"|^(?:INSERT|REPLACE|ENTER|FILL|SET)_\w+$|_HERE$|^\[[A-Za-z][\w -]*\]$"
)


def is_open(value: str) -> bool:
    """Whether ``value`` is filled in later: a template, a reference, ``<your-interface>``."""
    return _TEMPLATE.search(value) is not None or _TO_FILL_IN.search(value) is not None


def without_comment(text: str) -> str:
    """``text`` up to the first ``#`` that stands behind white space."""
    return _COMMENT.sub("", text)


@dataclass(frozen=True)
class Word:
    """One word of a command, quotes removed.

    ``constant``: its text is known without running it. ``quoted``: a quote begins it. ``line`` is
    where it begins, ``raw`` how it is written.
    """

    text: str
    constant: bool
    quoted: bool = False
    line: int = 0
    raw: str = ""


@dataclass
class HereDocument:
    """A here-document: its lines, the first one's number, and whether its end word was quoted."""

    delimiter: str
    literal: bool
    strip_tabs: bool
    text: str = ""
    line: int = 0


@dataclass(frozen=True)
class Operator:
    """An operator or the end of a line (``\\n``); ``glued``: a word ends right before it."""

    text: str
    line: int
    glued: bool = False
    document: HereDocument | None = field(default=None, compare=False)


Token = Word | Operator

_OPERATOR = re.compile(
    r"<<<|<<-?|\d*(?:>>|>&|<&|>\||<>|>|<)|&>>|&>|;;&|;&|;;|&&|\|\||\|&|[;&|()\n]"
)
_BLANK = re.compile(r"(?:[ \t\r]|\\\n)+")
_PLAIN = re.compile(r"[^\s;&|'\"\\$`<>(){#]+")
# Where a shell puts the home directory: at the begin of a word or of the value of an assignment.
_HOME = re.compile(rf"(?:{NAME}\+?=)?~(?=[/:]|$)")
_A_HOME = "/home/user"
_GATHERS = re.compile(r"\$\(\s*+(?=cat\s*+<<-?[^<])")
_PLACEHOLDER = re.compile(r"<[A-Za-z][\w .:/-]{0,60}>")
_FILLED_IN = re.compile(r"<%=?[^%\n]{0,200}%>")
# One that stands alone: no file is read and none written where only options or nothing follow.
_PLACEHOLDER_ALONE = re.compile(rf"{_PLACEHOLDER.pattern}(?=[ \t]*(?:\\?\n|\Z)|[ \t]+-)")
_SPECIAL = re.compile(r"['\"(){}\\]|\$[({]")


class _Next:
    """Where a string comes next, each stretch of the text searched once."""

    def __init__(self, text: str, wanted: str) -> None:
        self._text, self._wanted, self._at = text, wanted, -2

    def after(self, position: int) -> int:
        """Its first place at or after ``position``, -1 where there is none."""
        if self._at != -1 and self._at < position:
            self._at = self._text.find(self._wanted, position)
        return self._at


class _Lexer:
    """``joins``: a line that goes on (``\\``) is one with the next, as a shell reads it."""

    def __init__(self, text: str, line: int, *, joins: bool = True) -> None:
        self.text, self.position, self.line = text, 0, line
        self._going_on = "" if joins else "\\\n"
        self._quote, self._backquote = _Next(text, "'"), _Next(text, "`")
        self._braces = _Next(text, "}}")
        self._all_closed = True
        self._documents: list[HereDocument] = []
        self._expects: HereDocument | None = None

    def tokens(self) -> Iterator[Token]:
        text = self.text
        while self.position < len(text):
            if blank := _BLANK.match(text, self.position):
                self._advance(blank.end())
                continue
            if text[self.position] == "#":
                end = text.find("\n", self.position)
                self._advance(len(text) if end < 0 else end)
                continue
            if self._placeholder_alone():
                yield self._word()
                continue
            operator = _OPERATOR.match(text, self.position)
            if operator and not operator[0][0].isdigit():
                if operator[0] in ("<", ">") and text.startswith("(", operator.end()):
                    yield self._word()  # a process substitution
                    continue
                yield self._operator(operator[0])
                continue
            if operator:
                yield self._operator(operator[0])
                continue
            yield self._word()

    def _placeholder_alone(self) -> bool:
        """Whether ``<name>`` stands here for what a reader is to write, as a word of its own."""
        at = self.position
        return self.text[at] == "<" and (
            _PLACEHOLDER_ALONE.match(self.text, at) is not None
            or _FILLED_IN.match(self.text, at) is not None
        )

    def _advance(self, end: int) -> None:
        self.line += self.text.count("\n", self.position, end)
        self.position = end

    def _operator(self, text: str) -> Operator:
        at, line = self.position, self.line
        glued = at > 0 and self.text[at - 1] not in " \t\n;&|()"
        self._advance(at + len(text))
        document = None
        if text in ("<<", "<<-"):
            document = HereDocument("", False, text == "<<-")
            self._expects = document
        elif text == "\n" and self._documents:
            self._read_documents()
        return Operator(text, line, glued, document)

    def _read_documents(self) -> None:
        """The bodies of the here-documents that the line just ended has begun."""
        for document in self._documents:
            start, document.line = self.position, self.line
            end = start
            while end < len(self.text):
                stop = self.text.find("\n", end)
                stop = len(self.text) if stop < 0 else stop
                row = self.text[end:stop]
                if (row.lstrip("\t") if document.strip_tabs else row).rstrip(
                    "\r"
                ) == document.delimiter:
                    document.text = self.text[start:end]
                    self._advance(min(stop + 1, len(self.text)))
                    break
                end = stop + 1
            else:
                document.text = self.text[start:]
                self._advance(len(self.text))
        self._documents = []

    def whole_word(self) -> str:
        """The text of the word that stands here."""
        return self._word().text

    def _word(self) -> Word:
        text, start, line = self.text, self.position, self.line
        pieces: list[str] = []
        constant = True
        quoted = text[start] in "'\""
        while self.position < len(text):
            character = text[self.position]
            # a bracket goes on with the word in a pattern such as @(a|b)
            bracket = character == "(" and pieces and pieces[-1][-1:] not in ("@", "!", "?", "*")
            if character in " \t\r\n;&|)" or bracket:
                break
            if character in "<>(" and (self.position > start or self._placeholder_alone()):
                placeholder = _PLACEHOLDER.match(text, self.position) or _FILLED_IN.match(
                    text, self.position
                )
                if placeholder is None:
                    break
                constant = False
                pieces.append(placeholder[0])
                self._advance(placeholder.end())
                continue
            piece, known = self._piece(character)
            constant = constant and known
            pieces.append(piece)
        raw = text[start : self.position]
        value = _at_home("".join(pieces), raw) if "~" in raw else "".join(pieces)
        word = Word(value, constant, quoted, line, raw)
        if self._expects is not None:
            document, self._expects = self._expects, None
            document.delimiter = re.sub(r"['\"\\]", "", word.raw)
            document.literal = document.delimiter != word.raw
            self._documents.append(document)
        return word

    def _piece(self, character: str) -> tuple[str, bool]:
        """What comes next in a word, and whether it is known without running it."""
        text, at = self.text, self.position
        if character == "'":
            end = self._quote.after(at + 1)
            if end < 0:
                self._advance(at + 1)
                return "", False
            self._advance(end + 1)
            return text[at + 1 : end], True
        if character == '"':
            end = self._closed(at)
            if not end:
                self._advance(at + 1)
                return "", False
            self._advance(end)
            return _in_double_quotes(text[at + 1 : end - 1], self._going_on)
        if character == "\\":
            self._advance(min(at + 2, len(text)))
            piece = text[at + 1 : at + 2]
            return (self._going_on if piece == "\n" else piece), True
        if character == "`":
            end = self._backquote.after(at + 1)
            self._advance(at + 1 if end < 0 else end + 1)
            return text[at : self.position], False
        if character == "$":
            return self._dollar()
        if text.startswith("{{", at):
            end = self._braces.after(at)
            if end >= 0 and "\n" not in text[at : min(end, at + 500)]:
                self._advance(end + 2)
                return text[at : end + 2], False
        if character in "<>" and text.startswith("(", at + 1):
            end = self._closed(at + 1)
            self._advance(end or at + 2)
            return text[at : self.position], False
        if match := _PLAIN.match(text, at):
            self._advance(match.end())
            return match[0], True
        self._advance(at + 1)
        return character, True

    def _dollar(self) -> tuple[str, bool]:
        text, at = self.text, self.position
        following = text[at + 1 : at + 2]
        if following == "'":
            end = self._quote.after(at + 2)
            if end >= 0:
                self._advance(end + 1)
                return text[at + 2 : end], "\\" not in text[at + 2 : end]
        if following == '"':
            self._advance(at + 1)
            return "", True
        if following in ("(", "{"):
            end = self._closed(at + 1)
            if end:
                self._advance(end)
                piece = text[at:end]
                value = _FALLBACK.sub(lambda match: match[1].strip("'\""), piece)
                return value, DYNAMIC.search(value) is None
            self._advance(at + 2)
            return text[at : at + 2], False
        match = re.compile(r"\$(?:\w+|[@*#?!$-])?").match(text, at)
        assert match is not None
        self._advance(match.end())
        return match[0], match.end() == at + 1

    def _closed(self, at: int) -> int:
        """Behind the bracket or double quote that closes the one at ``at``; 0 where none does."""
        if not self._all_closed:
            return 0
        text = self.text
        stack = [text[at]]
        position = at + 1
        while stack:
            match = _SPECIAL.search(text, position)
            if match is None:
                self._all_closed = False
                return 0
            sign, position = match[0], match.end()
            inside = stack[-1]
            if sign == "\\":
                position += 1
            elif sign in ("$(", "${"):
                stack.append(sign[1])
            elif sign == '"':
                if inside == '"':
                    stack.pop()
                else:
                    stack.append('"')
            elif inside == '"':
                continue
            elif sign == "'" and inside == "(":
                end = text.find("'", position)
                position = end + 1 if end >= 0 else position
            elif sign == "(" and inside == "(":
                stack.append("(")
            elif (sign == ")" and inside == "(") or (sign == "}" and inside == "{"):
                stack.pop()
        return position


def _in_double_quotes(inner: str, going_on: str) -> tuple[str, bool]:
    value = _FALLBACK.sub(lambda match: match[1].strip("'\""), inner)
    known = DYNAMIC.search(re.sub(r"\\.", "", value)) is None and value != "$"
    value = re.sub(r"\\(\n|[\"\\$`])", lambda m: going_on if m[1] == "\n" else m[1], value)
    return value, known


def _at_home(text: str, raw: str) -> str:
    """``text`` with a path where a shell puts the home directory: for a ``~`` without quotes."""
    if _HOME.match(raw) is None:
        return text
    text = text.replace("~", _A_HOME, 1)
    return text if "'" in raw or '"' in raw else text.replace(":~/", f":{_A_HOME}/")


def script_of(word: Word, text: str) -> str:
    """``text``, with which ``word`` ends, for a shell of its own: lines that go on stay lines."""
    if "\\\n" not in word.raw or not word.text.endswith(text):
        return text
    begin = len(word.text) - len(text)  # NAME=, an option: no line goes on there
    whole = _Lexer(word.raw, word.line, joins=False).whole_word()
    return whole[begin:] if whole[:begin] == word.text[:begin] else text


def gathered_in(word: Word) -> list[HereDocument]:
    """The here-documents that ``word`` takes in: ``"$(cat <<EOF …)"``."""
    match = _GATHERS.search(word.raw)
    if match is None:
        return []
    line = word.line + word.raw.count("\n", 0, match.end())
    tokens = tokens_of(word.raw[match.end() :], line)
    return [t.document for t in tokens if isinstance(t, Operator) and t.document is not None]


def tokens_of(text: str, line: int = 1) -> list[Token]:
    """All tokens of ``text``, whose first line has the number ``line``. Comments are left out."""
    return list(_Lexer(text, line).tokens())


def words_of(text: str, line: int = 1) -> list[Word]:
    """The words of ``text`` alone."""
    return [token for token in tokens_of(text, line) if isinstance(token, Word)]


def printed(command: str, words: Sequence[str]) -> str:
    """What ``echo`` and ``printf`` make of their arguments."""
    text = " ".join(words)
    if command == "printf" and "%" in words[0]:
        form = re.sub(r"%[sb]", "\0", words[0])
        if "%" not in form and form.count("\0") == 1:
            text = "".join(form.replace("\0", word) for word in words[1:])
    return text.replace("\\n", "\n")
