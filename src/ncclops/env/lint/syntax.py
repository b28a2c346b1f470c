"""The structure of a shell script: which commands follow one another, and which are alternatives.

No more than an environment depends on: branches, subshells, functions, pipelines. What is
no valid shell becomes plain commands.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from ncclops.env.lint.words import NAME, HereDocument, Operator, Token, Word, tokens_of

_DEEPEST = 40
_REDIRECTION = re.compile(r"\d*[<>]|&>")
_ENDS_COMMAND = frozenset({";", "&", "\n", "&&", "||", "|", "|&", ";;", ";&", ";;&", "(", ")"})
_ARRAY = re.compile(rf"(?:{NAME})\+?=")


@dataclass
class Command:
    """A simple command: its words, where its output goes, and the here-documents it reads.

    ``arrays`` holds the elements of ``NAME=(…)``, with the word that names it.
    """

    words: list[Word] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    documents: list[HereDocument] = field(default_factory=list)
    arrays: list[tuple[str, list[Word]]] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        return not (self.words or self.arrays or self.documents)


@dataclass
class Chain:
    """Commands behind ``&&`` and ``||``: each runs, or is the last one that did."""

    items: list[Node]


@dataclass
class Pipeline:
    """Commands that run in processes of their own, side by side."""

    items: list[Node]


@dataclass
class Block:
    """Commands one after another; in a ``subshell`` what they set ends with it."""

    items: list[Node]
    subshell: bool = False


@dataclass
class Branches:
    """Alternatives; ``complete`` where one of them certainly runs. ``tests`` run before.

    ``over`` are the words that a loop goes through.
    """

    tests: list[Block]
    bodies: list[Block]
    complete: bool
    over: list[Word] = field(default_factory=list)


@dataclass
class Function:
    name: str
    body: Block


Node = Command | Chain | Pipeline | Block | Branches | Function


def parse_script(text: str, line: int = 1) -> Block:
    """The commands of ``text``, whose first line has the number ``line``."""
    return _Parser(tokens_of(text, line)).everything()


class _Parser:
    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def everything(self) -> Block:
        items: list[Node] = []
        while self.at < len(self.tokens):
            items.extend(self._block(frozenset()).items)
            self.at += 1  # a stray word such as fi, or a bracket
        return Block(items)

    def _word(self) -> str:
        """The unquoted word that comes next, empty where there is none."""
        if self.at < len(self.tokens):
            token = self.tokens[self.at]
            if isinstance(token, Word) and token.raw == token.text:
                return token.text
        return ""

    def _operator(self, ahead: int = 0) -> str:
        if self.at + ahead < len(self.tokens):
            token = self.tokens[self.at + ahead]
            if isinstance(token, Operator):
                return token.text
        return ""

    def _block(self, until: frozenset[str]) -> Block:
        """Commands up to one of the words in ``until``, which stays, or to a closing bracket."""
        items: list[Node] = []
        while self.at < len(self.tokens):
            if self._operator() in ("\n", ";", "&"):
                self.at += 1
                continue
            if self._word() in until or self._operator() in (")", ";;", ";&", ";;&"):
                break
            if self._word() in ("fi", "done", "esac", "then", "do", "else", "elif"):
                break
            if self._word() == "}" and "}" not in until:
                break
            before = self.at
            items.append(self._chain())
            if self.at == before:
                self.at += 1
        return Block(items)

    def _chain(self) -> Node:
        items = [self._pipeline()]
        while self._operator() in ("&&", "||"):
            self.at += 1
            self._newlines()
            items.append(self._pipeline())
        return items[0] if len(items) == 1 else Chain(items)

    def _pipeline(self) -> Node:
        items = [self._command()]
        while self._operator() in ("|", "|&"):
            self.at += 1
            self._newlines()
            items.append(self._command())
        return items[0] if len(items) == 1 else Pipeline(items)

    def _newlines(self) -> None:
        while self._operator() == "\n":
            self.at += 1

    def _command(self) -> Node:
        while self._word() in ("!", "time"):
            self.at += 1
        self.depth += 1
        try:
            node = self._compound() if self.depth <= _DEEPEST else None
        finally:
            self.depth -= 1
        if node is None:
            return self._simple()
        rest = self._simple(only_redirections=True)
        return node if rest.empty and not rest.targets else Block([node, rest])

    def _compound(self) -> Node | None:
        word = self._word()
        if word == "if":
            return self._if()
        if word in ("while", "until"):
            self.at += 1
            test = self._block(frozenset({"do"}))
            return Branches([test], [self._do()], False)
        if word in ("for", "select"):
            over: list[Word] = []
            while self.at < len(self.tokens) and self._word() != "do":
                if self._operator() == "\n" and self._word_after_newlines() != "do":
                    break
                token = self.tokens[self.at]
                if isinstance(token, Word):
                    over.append(token)
                self.at += 1
            return Branches([], [self._do()], False, over)
        if word == "case":
            return self._case()
        if word == "{":
            self.at += 1
            block = self._block(frozenset({"}"}))
            self._skip("}")
            return block
        if self._operator() == "(":
            self.at += 1
            block = self._block(frozenset())
            if self._operator() == ")":
                self.at += 1
            return Block(block.items, subshell=True)
        return self._function(word)

    def _word_after_newlines(self) -> str:
        at = self.at
        self._newlines()
        word = self._word()
        self.at = at
        return word

    def _skip(self, word: str) -> None:
        if self._word() == word:
            self.at += 1

    def _do(self) -> Block:
        self._newlines()
        self._skip("do")
        body = self._block(frozenset({"done"}))
        self._skip("done")
        return body

    def _if(self) -> Node:
        tests: list[Block] = []
        bodies: list[Block] = []
        complete = False
        while self._word() in ("if", "elif"):
            self.at += 1
            tests.append(self._block(frozenset({"then"})))
            self._skip("then")
            bodies.append(self._block(frozenset({"elif", "else", "fi"})))
        if self._word() == "else":
            self.at += 1
            complete = True
            bodies.append(self._block(frozenset({"fi"})))
        self._skip("fi")
        return Branches(tests, bodies, complete)

    def _case(self) -> Node:
        bodies: list[Block] = []
        complete = False
        while self.at < len(self.tokens) and self._word() != "in":
            self.at += 1
        self.at += 1
        while self.at < len(self.tokens):
            self._newlines()
            if self._word() == "esac" or self.at >= len(self.tokens):
                break
            while self.at < len(self.tokens) and self._operator() not in (")", "\n"):
                complete = complete or self._word() == "*"
                self.at += 1
            self.at += 1
            bodies.append(self._block(frozenset({"esac"})))
            if self._operator() in (";;", ";&", ";;&"):
                self.at += 1
            elif self._word() != "esac":
                break
        self._skip("esac")
        return Branches([], bodies, complete)

    def _function(self, word: str) -> Node | None:
        at = self.at
        if word == "function":
            self.at += 1
            word = self._word()
        if (
            re.fullmatch(r"[\w.:-]+", word)
            and self.at + 1 < len(self.tokens)
            and ((self._operator(1) == "(" and self._operator(2) == ")") or at != self.at)
        ):
            self.at += 1
            if self._operator() == "(":
                self.at += 2
            self._newlines()
            # any compound command is a body: what has been read once is never read again
            body = self._body_of_function()
            if body is not None:
                return Function(word, body if isinstance(body, Block) else Block([body]))
        self.at = at
        return None

    def _body_of_function(self) -> Node | None:
        self.depth += 1
        try:
            return self._compound() if self.depth <= _DEEPEST else None
        finally:
            self.depth -= 1

    def _simple(self, only_redirections: bool = False) -> Command:
        command = Command()
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            if isinstance(token, Operator):
                if _REDIRECTION.match(token.text):
                    self._redirection(command, token)
                    continue
                break
            if only_redirections:
                break
            self.at += 1
            if _ARRAY.fullmatch(token.text) and token.raw == token.text:
                following = self.tokens[self.at] if self.at < len(self.tokens) else None
                if isinstance(following, Operator) and following.text == "(" and following.glued:
                    command.arrays.append((token.text, self._array()))
                    continue
            command.words.append(token)
        return command

    def _redirection(self, command: Command, token: Operator) -> None:
        self.at += 1
        if self.at < len(self.tokens):
            target = self.tokens[self.at]
            if isinstance(target, Word):
                self.at += 1
                if token.document is not None:
                    command.documents.append(token.document)
                elif token.text == "<<<":
                    command.documents.append(
                        HereDocument("", not target.constant, False, target.text, target.line)
                    )
                elif ">" in token.text:
                    command.targets.append(target.text)

    def _array(self) -> list[Word]:
        words: list[Word] = []
        self.at += 1
        while self.at < len(self.tokens) and self._operator() != ")":
            token = self.tokens[self.at]
            if isinstance(token, Word):
                words.append(token)
            elif token.text not in ("\n",) and token.text in _ENDS_COMMAND:
                break
            self.at += 1
        if self._operator() == ")":
            self.at += 1
        return words
