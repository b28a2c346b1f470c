"""What a shell script sets, for which of its commands. It is read, never run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ncclops.env.lint import directives, slips
from ncclops.env.lint.constants import Constants
from ncclops.env.lint.environments import Found, Scope, is_setting_of_interest
from ncclops.env.lint.model import Setting
from ncclops.env.lint.passing import (
    ASSIGNMENT,
    OF_OPEN_MPI,
    PREFIXES,
    inner_words,
    kept_back,
    leading,
    names_passed,
    of_env,
    passed,
    set_of_fish,
    value_of,
    without_key,
    without_prefixes,
)
from ncclops.env.lint.syntax import (
    Block,
    Branches,
    Chain,
    Command,
    Function,
    Node,
    Pipeline,
    parse_script,
)
from ncclops.env.lint.words import (
    NAME,
    HereDocument,
    Word,
    gathered_in,
    printed,
    script_of,
    words_of,
)

_EXPORTERS = frozenset({"export", "declare", "typeset", "readonly", "local"})
# What begins a job, so that the environment counts as it is there.
_JOB = re.compile(
    r"python[\d.]*|torchrun|torchx|srun|mpirun|mpiexec(?:\.\w+)?|orterun|accelerate|deepspeed|ray|vllm"
    r"|sglang|docker|podman|nerdctl|apptainer|singularity|enroot|kubectl|jsrun|aprun|prun|ibrun"
    r"|lightning|composer|colossalai|horovodrun|trtllm-\w+|nsys|pdsh|clush|uv|poetry|conda run|qsub"
    r"|bsub|sbatch|swift|llamafactory-cli|axolotl|tune|trl|dynamo|xtuner|\w+_perf(?:_mpi)?|numactl"
    r"|taskset|julia|flux|prterun|modal|sky|hydra|bash|sh|zsh|\S+\.(?:sh|py|bash|exe|x)"
)
_PRINTS = frozenset({"echo", "printf", "cat", "tee", "log", "info", "warn", "die", "grep", "sed"})
# What needs no setting of ours, whatever its arguments are: it is no job.
_HOUSEKEEPING = frozenset(
    {"[", "[[", "test", "let", "read", "shift", "source", ".", "cd", "pushd", "popd", "mkdir", "rm"}
    | {"cp", "mv", "ln", "ls", "touch", "chmod", "chown", "sleep", "wait", "kill", "module", "ml"}
    | {"ulimit", "shopt", "which", "type", "hostname", "date", "wget", "curl", "git", "tar", "pip"}
)
# Programs whose arguments NAME=VALUE are variables of their own, patterns, or text.
_TAKES_OTHERS = (
    _PRINTS
    | {"make", "gmake", "cmake", "ninja", "scons", "awk", "gawk", "expr", "jq"}
    | {"configure", "logger", "yq", "crudini", "bazel", "meson", "conan", "spack", "rg", "egrep"}
)
_MPI_STARTERS = frozenset({"mpirun", "mpiexec", "orterun", "prterun"})
# Within a job of these, the scheduler starts what starts the ranks, with this environment.
_SCHEDULER = re.compile(
    r"^#(?:SBATCH|PBS|BSUB|\$)[ \t]|\b(?:SLURM|PBS|LSB|OAR|PJM)_[A-Z]", re.MULTILINE
)
_SHELLS = frozenset({"bash", "sh", "zsh", "dash", "ksh"})
_REMOTE = frozenset({"ssh", "pdsh", "clush", "parallel-ssh", "pssh", "mpssh"})
_BUNDLE_NAME = re.compile(rf"\$\{{?({NAME})(?:\[[@*]\])?[}}:+\-?@]?")
_HOLDS_OPTIONS = re.compile(rf"(?:^|\s)(?:-x|-e|--env|-genv|--export)[= ]\s*{NAME}[= ,]")
_TAKES_COMMAND = re.compile(r"--(?:wrap|command|cmd)=")
_HOLDS_COMMANDS = re.compile(
    rf"\s*(?:export|env|set|setenv)\s|\s*{NAME}=\S*[\s;]+\S|[^\n]*[;&|\n]\s*(?:export|env)\s"
)
# A document that is taken into a variable is a script where a line of it sets something.
_SETS = re.compile(
    rf"^[ \t]*(?:&&[ \t]*)?(?:(?:export|env|setenv)[ \t]|{NAME}=[^\s;]*(?:[ \t;]+\S|[ \t]*\\$))",
    re.MULTILINE,
)
# Of an option of theirs that is given twice, the last one counts.
_CONTAINERS = frozenset({"docker", "nerdctl", "podman"})
_MOST_CALLS = 1000
# Functions within functions, and calls within calls, that are followed.
_DEEPEST = 8


def read_shell(text: str, found: Found, begin: Iterable[Setting] = (), line: int = 1) -> None:
    """Tell ``found`` what ``text`` sets; ``begin`` is the environment that it starts in."""
    scope = Scope(found, [*begin, *directives.settings_of(text, line, found)])
    reader = _Reader(scope)
    reader.constants = Constants(text)
    reader.of_scheduler = _SCHEDULER.search(text) is not None
    reader.read(text, line)
    found.slips.extend(slips.after_job(s) for s in scope.late if is_setting_of_interest(s.name))
    found.slips.extend(
        slips.twice(first, second)
        for first, second in scope.twice
        if is_setting_of_interest(first.name) and not _makes_use_of(text, first.name)
    )
    scope.close()


def _given_twice(options: Iterable[Setting]) -> Iterator[tuple[Setting, Setting]]:
    last: dict[str, Setting] = {}
    for option in options:
        first = last.get(option.name, option)
        if None not in (first.value, option.value) and first.value != option.value:
            yield first, option
        last[option.name] = option


def _makes_use_of(text: str, name: str) -> bool:
    return re.search(rf"\$\{{?{name}\b", text) is not None


class _Reader:
    def __init__(self, scope: Scope, depth: int = 0) -> None:
        self.scope, self.depth = scope, depth
        self.functions: dict[str, Block] = {}
        self.called: set[str] = set()
        # What ``APPTAINERENV_NAME=…`` sets for containers, until it is exported.
        self.for_containers: dict[str, Setting] = {}
        self.constants = Constants("")
        self.calls = 0
        self.of_scheduler = False

    def read(self, text: str, line: int) -> None:
        self.block(parse_script(text, line))
        self._uncalled()
        self.scope.found.slips.extend(
            slips.kept_from_container(name, setting.name, setting.line)
            for name, setting in self.for_containers.items()
            if is_setting_of_interest(setting.name)
        )

    def _uncalled(self) -> None:
        for name, body in list(self.functions.items()):
            if name not in self.called and self.depth < _DEEPEST:
                self._alone(body)

    def _alone(self, body: Block) -> None:
        """A function that nothing here calls: where it will run is not known."""
        scope = Scope(self.scope.found)
        reader = _Reader(scope, self.depth + 1)
        choices = scope.alternatives(complete=True)
        with choices.branch():
            reader.block(body)
        reader._uncalled()

    def block(self, block: Block) -> None:
        before: Node | None = None
        for node in block.items:
            if isinstance(node, Command) and isinstance(before, Command):
                self._cut_off(before, node)
            if isinstance(node, Command) and isinstance(before, Block) and not node.words:
                for item in before.items:
                    if isinstance(item, Command) and item.words and not item.targets:
                        _written(self.scope.found, item, node)
            self.node(node)
            before = node

    def _cut_off(self, before: Command, command: Command) -> None:
        """Options that begin a command, right below one that could have had them."""
        words = command.words
        if not words or not before.words or not re.match(r"--?[A-Za-z]", words[0].raw):
            return
        names = [s.name for s in passed(words) if is_setting_of_interest(s.name)]
        if names and words[0].line - before.words[-1].line <= 4:
            self.scope.found.slips.append(slips.cut_off(words, names))

    def node(self, node: Node) -> None:
        if isinstance(node, Command):
            self.command(node)
        elif isinstance(node, Block):
            if node.subshell:
                with self.scope.part():
                    self.block(node)
            else:
                self.block(node)
        elif isinstance(node, Chain):
            self.node(node.items[0])
            choices = self.scope.alternatives(complete=False)
            with choices.branch():
                for item in node.items[1:]:
                    self.node(item)
            choices.merge()
        elif isinstance(node, Pipeline):
            self._pipeline(node)
        elif isinstance(node, Branches):
            for test in node.tests:
                self.block(test)
            choices = self.scope.alternatives(node.complete)
            for body in node.bodies:
                with choices.branch():
                    for setting in leading(node.over):
                        self.scope.assign(setting)
                    self.block(body)
            choices.merge()
        elif isinstance(node, Function):
            self.functions[node.name] = node.body

    def _pipeline(self, node: Pipeline) -> None:
        if all(isinstance(item, Command) for item in node.items):
            first, last = node.items[0], node.items[-1]
            assert isinstance(first, Command)
            assert isinstance(last, Command)
            texts = [word.text for word in first.words]
            for document in first.documents:
                self._document(document, last)
            if texts[:1] in (["echo"], ["printf"], ["cat"]):
                _written(self.scope.found, first, last)
                return
        for item in node.items:
            with self.scope.part():
                self.node(item)

    # ---- simple commands

    def command(self, command: Command) -> None:
        for name, elements in command.arrays:
            self._array(name, elements)
        for document in command.documents:
            self._document(document, command)
        words = [self.constants.put_into(word) for word in command.words]
        for word in words:
            for document in gathered_in(word):
                self._taken(document)
        while words and words[0].text in PREFIXES:
            if words[0].text == "eval" and len(words) == 2 and " " in words[1].text:
                self.block(parse_script(words[1].text, words[1].line))
                return
            words = words[1:]
        if not words:
            return
        first = words[0].text
        if first in _PRINTS:
            _written(self.scope.found, command, command)
            return
        if first == "set":
            if any(word.text in ("-a", "allexport") for word in words[1:]):
                self.scope.export_all()
            for setting in set_of_fish(words):
                self.scope.assign(setting)
        elif first == "unset":
            for word in words[1:]:
                self.scope.unset(word.text)
        elif first in _EXPORTERS:
            self._export(words)
        elif first == "setenv":
            if len(words) >= 3:
                self._assign(words[1].text, words[2].text, words[2], True)
        elif first == "alias" or first == "trap":
            return
        elif first in ("exit", "return", "logout"):
            self.scope.end()
        elif first == ":":
            self._keep_or_set(words)
        elif first in self.functions:
            self._call(first)
        else:
            self._run(words)
        if command.words[0].text == "exec" and len(command.words) > 1:
            self.scope.end()

    def _call(self, name: str) -> None:
        self.called.add(name)
        self.calls += 1
        if self.calls <= _MOST_CALLS and self.depth < _DEEPEST:
            self.depth += 1
            self.block(self.functions[name])
            # ``return`` ends the function, not the script; what it had set stays.
            self.scope.go_on()
            self.depth -= 1

    def _assign(self, name: str, text: str, word: Word, exported: bool) -> None:
        plus = name.endswith("+")
        name = name.rstrip("+")
        value = None if plus else value_of(text, word)
        if value is not None and self.scope.is_certain and not self.depth:
            self.constants.learn(name, value)
        line = word.line + word.raw[: word.raw.find("=") + 1].count("\n")
        prefixed = re.fullmatch(rf"(?:APPTAINERENV|SINGULARITYENV)_({NAME})", name)
        if prefixed:
            inner = Setting(prefixed[1], value, line)
            self.scope.give(name, inner)
            if exported or self.scope.exports_all:
                self.scope.bundle("apptainer", [inner], more=True)
            else:
                self.for_containers[name] = inner
            return
        if not exported and not plus and self._holds_more(name, text, word):
            return
        if plus and self._holds_more(name, text, word, more=True):
            return
        self.scope.assign(Setting(name, value, line, exported))

    def _holds_more(self, name: str, text: str, word: Word, more: bool = False) -> bool:
        """Whether the value is options or a command line for later use; those are then kept."""
        if "=" not in text or is_setting_of_interest(name) or gathered_in(word):
            return False
        if _HOLDS_OPTIONS.search(text):
            settings = list(passed(inner_words(text, word)))
            self.scope.bundle(name, settings, more)
            return bool(settings)
        if re.match(rf"\s*{NAME}=", text) and " " in text.strip():
            words = inner_words(text, word)
            settings = list(leading(words))
            if len(settings) == len(words):
                self.scope.bundle(name, settings, more)
                return True
        if _HOLDS_COMMANDS.match(text):
            self._nested(text, word)
        return False

    def _array(self, name: str, elements: Sequence[Word]) -> None:
        settings = list(passed(elements))
        if not settings:
            settings = [s for word in elements for s in leading([without_key(word)])]
        commands = [word for word in elements if word.quoted and _HOLDS_COMMANDS.match(word.text)]
        for word in commands:
            self._nested(word.text, word)
        self.scope.bundle(name.rstrip("+="), settings, name.endswith("+="))

    def _export(self, words: Sequence[Word]) -> None:
        first = words[0].text
        self.scope.found.slips.extend(slips.of_export(words))
        is_export = first == "export" or any(
            re.fullmatch(r"-[a-zA-Z]*x[a-zA-Z]*", word.text) for word in words[1:]
        )
        for word in words[1:]:
            match = ASSIGNMENT.fullmatch(word.text)
            if match:
                self._assign(match[1] + match[2], match[3], word, is_export)
            elif is_export and re.fullmatch(NAME, word.text):
                self.scope.export(word.text)
                if word.text in self.for_containers:
                    setting = self.for_containers.pop(word.text)
                    self.scope.bundle("apptainer", [setting], more=True)

    def _keep_or_set(self, words: Sequence[Word]) -> None:
        """``: ${NAME:=VALUE}``: what is there stays; otherwise this is the value."""
        for word in words[1:]:
            for match in re.finditer(rf"\$\{{({NAME}):?=([^}}]*)\}}", word.raw):
                inner = words_of(match[2], word.line)
                value = value_of(inner[0].text, inner[0]) if inner else ""
                self.scope.assign(Setting(match[1], value, word.line, False))

    def _run(self, words: Sequence[Word]) -> None:
        """A program, or assignments alone."""
        first = 0
        while first < len(words) and ASSIGNMENT.fullmatch(words[first].text):
            first += 1
        rest = words[first:]
        self.scope.found.slips.extend(slips.of_command(words))
        if not rest:
            for word in words:
                match = ASSIGNMENT.fullmatch(word.text)
                assert match is not None
                self._assign(match[1] + match[2], match[3], word, False)
            return
        given = list(leading(words[:first]))
        before = [setting.name for setting in given]
        rest = without_prefixes(rest)
        if rest and rest[0].text.rpartition("/")[2] == "env":
            clean, settings, rest = of_env(rest[1:])
            given.extend(settings)
            if clean:
                self.scope.run(given, inherits=False)
                return
        if not rest:
            self.scope.run(given) if given else None
            return
        name = rest[0].text.rpartition("/")[2]
        options = list(passed(rest, name))
        given.extend(options)
        if name in _CONTAINERS:
            self.scope.twice.extend(_given_twice(options))
        if name not in _TAKES_OTHERS and name not in _HOUSEKEEPING:
            known = {setting.name for setting in given}
            given.extend(
                setting
                for setting in leading([word for word in rest[1:] if " " not in word.text])
                if is_setting_of_interest(setting.name) and setting.name not in known
            )
        for exported in names_passed(rest):
            self.scope.export(exported)
        bundles = [m[1] for word in words for m in _BUNDLE_NAME.finditer(word.raw)]
        if name in ("apptainer", "singularity"):
            bundles.append("apptainer")
        if name in _HOUSEKEEPING and not given:
            bundles = []
        else:
            if name in _MPI_STARTERS and not self.of_scheduler:
                names, certain = kept_back(rest, dict.fromkeys([*self.scope.exports, *before]))
                if names:
                    self.scope.found.slips.append(slips.not_passed_on(names, rest[0].line, certain))
            self.scope.seen()
        if given or bundles or _JOB.fullmatch(name) or words[0].raw[:1] == "$":
            self._start(name, rest, given, bundles)
        for position, word in enumerate(rest[1:], start=1):
            option = _TAKES_COMMAND.match(word.text)
            if option and " " in word.text:
                self._nested(word.text[option.end() :], word, given)
                continue
            if rest[position - 1].text == "-c" and re.fullmatch(r"python[\d.]*", name):
                self.scope.found.embedded(word.text, "x.py", word.line)
                continue
            if not word.quoted or "=" not in word.text or gathered_in(word):
                continue
            if _is_command_line(name, rest, position):
                self._nested(word.text, word, given)

    def _start(
        self, name: str, rest: Sequence[Word], given: list[Setting], bundles: list[str]
    ) -> None:
        """A program starts; what Slurm does not hand on, or a container lacks, is not there."""
        alone = [word for word in rest if re.match(r"--export=(?!ALL\b|\$)", word.text)]
        cut_off = name in ("srun", "sbatch") and bool(alone)
        if cut_off and any(is_setting_of_interest(s.name) for s in given):
            named = [s for s in given if s.line == alone[0].line]
            self.scope.found.slips.append(slips.only_these(named, alone[0].line, "--export"))
        isolated = name in ("docker", "podman", "nerdctl", "qsub", "kubectl", "sbatch", "bsub")
        self.scope.run(given, bundles, inherits=not (cut_off or isolated))

    # ---- texts within

    def _nested(self, text: str, word: Word, begin: Iterable[Setting] = ()) -> None:
        """A command line in quotes, for a shell of its own."""
        if self.depth >= 4:
            return
        text = script_of(word, text)
        with self.scope.part():
            reader = _Reader(self.scope, self.depth + 1)
            for setting in begin:
                self.scope.assign_again(setting)
            reader.functions = dict(self.functions)
            reader.called = set(self.functions)  # whoever defines them reads them
            reader.read(text, word.line)

    def _taken(self, document: HereDocument) -> None:
        """A script that a variable or an argument gets, for a shell that it is handed to later."""
        if _SETS.search(document.text):
            text = document.text
            if not document.literal:
                text = re.sub(r"\\([$`\\])", r"\1", text)
            self._nested(text, Word(text, document.literal, True, document.line))

    def _document(self, document: HereDocument, command: Command) -> None:
        name = command.words[0].text.rpartition("/")[2] if command.words else ""
        texts = [word.text for word in command.words]
        while texts and texts[0] in PREFIXES:
            texts = texts[1:]
            name = texts[0].rpartition("/")[2] if texts else ""
        if self.depth >= 4:
            return
        if name in ("cat", "tee") or not texts:
            target = command.targets[-1] if command.targets else ""
            if name == "tee":
                target = next((text for text in texts[1:] if not text.startswith("-")), "")
            kind = target
        elif name in _SHELLS or name in _REMOTE or name in ("sbatch", "qsub", "bsub", "srun"):
            kind = "x.sh"
        elif re.fullmatch(r"python[\d.]*", name):
            kind = "x.py"
        elif name == "kubectl":
            kind = "x.yaml"
        elif [text for text in texts if not ASSIGNMENT.fullmatch(text)][:1] == ["read"]:
            self._taken(document)
            return
        elif any(text.rpartition("/")[2] in _SHELLS for text in texts):
            kind = "x.sh"
        else:
            return
        self.scope.found.embedded(document.text, kind, document.line)


def _is_command_line(name: str, words: Sequence[Word], position: int) -> bool:
    """Whether a quoted word is run by a shell somewhere."""
    before = words[position - 1].text
    if before == OF_OPEN_MPI:
        return False
    if re.fullmatch(r"-[a-z]*c|--command|--cmd|--wrap|--entrypoint", before):
        return True
    text = words[position].text
    if _HOLDS_OPTIONS.search(text) and " " in text and name not in _PRINTS:
        return True
    if name in _REMOTE or before in _SHELLS:
        return True
    return _HOLDS_COMMANDS.match(text) is not None and name not in _PRINTS


def _written(found: Found, printing: Command, writing: Command) -> None:
    """``echo NAME=VALUE >> nccl.conf``: a line of a file that is read later; else printed text."""
    targets = list(writing.targets)
    if writing.words and writing.words[0].text in ("tee", "sudo"):
        targets += [word.text for word in writing.words[1:] if "/" in word.text or "." in word.text]
    words = [word for word in printing.words[1:] if not re.fullmatch(r"-[neE]+", word.text)]
    if not targets or not words or printing.words[0].text not in ("echo", "printf"):
        return
    if all(word.constant or "$" in word.text for word in words):
        text = printed(printing.words[0].text, [word.text for word in words])
        found.embedded(text, targets[-1], words[0].line)
