"""Reading signatures from TOML: the shipped ones and a site's own.

A file holds an array of tables named ``signature``, and maybe a table ``part`` of what several of
their patterns have in common; docs/classify.md describes the keys.
Loading validates everything that can be validated without a log, so that a typing error in a
site's file is one clear line and never a signature that silently matches nothing.
"""

from __future__ import annotations

import json
import logging
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from ncclops.classify.cache import NO_CACHE, Cache
from ncclops.classify.matcher import Matcher, build_matcher
from ncclops.classify.model import (
    CERTAINTY,
    FAILURE_CLASSES,
    PHASES,
    RETRY_POLICIES,
    ROLES,
    CompiledSignature,
    Signature,
)
from ncclops.errors import UsageError
from ncclops.nearest import meant, nearest
from ncclops.toml_files import load_toml, refuse, site_directory, user_directories

log = logging.getLogger("ncclops.classify")

SITE = site_directory("signatures")

_LISTS = (
    "literals", "requires", "requires_all", "absent", "outranks", "explains_line", "echo_of",
    "remedy", "references", "examples", "near_misses",
)  # fmt: skip
_REQUIRED = ("id", "class", "role", "literals", "summary", "examples", "near_misses")
_REQUIRED_OF_FAILURES = ("retry", "remedy")
_TEXTS = (
    "id", "class", "role", "pattern", "unless", "certainty", "phase", "cleared_by", "retry",
    "retry_after_progress", "summary", "condition",
)  # fmt: skip
_KNOWN = frozenset({*_LISTS, *_TEXTS, "tier", "teardown", "exits", "hang", "compares"})
ANY_FAILURE = "nonzero"
OTHER_SIGNAL = "other-signal"
_IDS = ("requires", "requires_all", "absent", "outranks", "explains_line", "echo_of")
_KEPT_AS: dict[str, Callable[[Any], object]] = {
    **dict.fromkeys(_LISTS, tuple),
    **dict.fromkeys(_IDS, frozenset),
    "exits": lambda codes: frozenset(map(str, codes)),
}
# The name of a part in a pattern; what a pattern repeats has numbers in its braces.
_PART = r"(?<!\\)\{([A-Za-z][\w-]*)\}"
# A shorter literal brings half of any log to the pattern stage.
_SHORTEST_LITERAL = 4
_KIND = "signatures"
# importlib.resources takes as long to import as all that is kept there takes to read.
_SHIPPED = Path(__file__).with_name("signatures")


@dataclass(frozen=True)
class SignatureSet:
    """All signatures of a scan, in order, with the index from literals back to them.

    ``cache`` is for what is built of them when the first large block is searched.
    """

    signatures: tuple[Signature, ...]
    cache: Cache = field(default=NO_CACHE, compare=False, repr=False)

    @cached_property
    def compiled(self) -> tuple[CompiledSignature, ...]:
        return tuple(map(CompiledSignature, self.signatures))

    @cached_property
    def by_id(self) -> dict[str, Signature]:
        return {signature.id: signature for signature in self.signatures}

    @cached_property
    def _by_literal(self) -> dict[str, list[int]]:
        index: dict[str, list[int]] = {}
        for number, signature in enumerate(self.signatures):
            for literal in signature.literals:
                index.setdefault(literal, []).append(number)
                if "NCCL WARN" in literal:  # which later versions call an error: see `readings`
                    error = literal.replace("NCCL WARN", "NCCL ERROR")
                    index.setdefault(error, []).append(number)
        return index

    @cached_property
    def literals(self) -> tuple[str, ...]:
        return tuple(self._by_literal)

    @cached_property
    def signatures_of_literal(self) -> tuple[tuple[int, ...], ...]:
        """For each literal (by its index), the signatures that it brings up (by theirs)."""
        return tuple(tuple(numbers) for numbers in self._by_literal.values())

    @cached_property
    def dropped_beside_firm(self) -> frozenset[int]:
        """Weak signatures that outrank weak ones only: beside a firm one they change nothing."""
        weak = {each.id for each in self.signatures if each.certainty == "weak"}
        return frozenset(
            number
            for number, each in enumerate(self.signatures)
            if each.id in weak and each.outranks | each.explains_line <= weak
        )

    @cached_property
    def matcher(self) -> Matcher:
        return build_matcher([literal.encode() for literal in self.literals], self.cache)

    def of_exit(self, code: int | None, signal: str | None) -> list[Signature]:
        """The signatures for a process that ended with ``code``, or was killed by ``signal``."""
        names = {signal} if signal is not None else {str(code), *([ANY_FAILURE] if code else [])}
        found = [signature for signature in self.signatures if signature.exits & names]
        if signal is None or found:
            return found
        return [signature for signature in self.signatures if OTHER_SIGNAL in signature.exits]

    def of_hang(self) -> list[Signature]:
        """The signatures for a rank that the launcher has found hung."""
        return [signature for signature in self.signatures if signature.hang]

    def match_line(self, line: str) -> list[Signature]:
        """Every signature that matches one line; for tests and for trying out a new one."""
        return [
            compiled.signature
            for compiled in self.compiled
            if any(literal in line for literal in compiled.signature.literals)
            and compiled.match(line)
        ]


def load_signatures(*directories: Path, cache: Cache = NO_CACHE) -> SignatureSet:
    """The shipped signatures, then those of ``directories``; a later one replaces its namesake.

    ``cache`` saves the time to read the shipped files as TOML, and to build the matcher.
    Raises ``UsageError`` for a directory without ``*.toml`` files, a file that is not TOML and
    an entry that does not validate: a line for each, with file and entry.
    """
    merged = {signature.id: signature for signature in _shipped(cache)}
    problems: list[str] = []
    for directory in directories:
        merged.update((signature.id, signature) for signature in _of_directory(directory, problems))
    loaded = SignatureSet(tuple(merged.values()), cache)
    # A signature that is refused is not there for others to refer to.
    refuse(problems or _missing_names(loaded))
    return loaded


def standing_directories() -> list[Path]:
    """Where a site and a user keep signatures for every command; those that hold any, the user's
    last, as a later one replaces its namesake."""
    return [each for each in (SITE, *user_directories("signatures")) if any(each.glob("*.toml"))]


def standing_signatures() -> SignatureSet:
    """The shipped signatures and those of ``standing_directories``.

    For what runs beside a job: a file that is wrong is a warning and is left out with all others
    that are not shipped. ``ncclops launch`` has refused it before the start.
    """
    try:
        directories = standing_directories()
        if directories:
            return load_signatures(*directories, cache=Cache.of_user())
    except UsageError as error:
        why = error.first_line("ncclops classify --list")
        log.warning("only the shipped signatures are used: %s", why)
    except OSError as error:
        log.warning("only the shipped signatures are used: %s", error)
    return shipped_signatures()


@lru_cache
def shipped_signatures() -> SignatureSet:
    """The shipped signatures, read once in each process.

    Without the user's cache that takes 0.15 s of a core, twice at each start of a job.
    """
    return load_signatures(cache=Cache.of_user())


def _shipped(cache: Cache) -> Iterator[Signature]:
    files = sorted(_SHIPPED.glob("*.toml"))
    texts = {file.name: file.read_bytes() for file in files}
    for name, document in _documents(texts, cache).items():
        # They are checked by the tests; here that would be most of the start.
        yield from _signatures_in(document, name, check=False)


def _documents(texts: dict[str, bytes], cache: Cache) -> dict[str, dict[str, Any]]:
    """The TOML documents by their names. As JSON, which is kept, they are read 20 times as fast."""
    source = b"".join(
        b"%s %d\n%s" % (name.encode(), len(text), text) for name, text in texts.items()
    )
    if (kept := cache.read(_KIND, source)) is not None:
        documents: dict[str, dict[str, Any]] = json.loads(kept)
        return documents
    documents = {name: _parse(text.decode(), name) for name, text in texts.items()}
    cache.write(_KIND, source, lambda: json.dumps(documents).encode())
    return documents


def _of_directory(directory: Path, problems: list[str]) -> Iterator[Signature]:
    try:
        files = sorted(directory.glob("*.toml"))
    except OSError as error:
        raise UsageError(f"cannot read signatures in {directory}: {error}") from error
    if not files:
        raise UsageError(f"no signatures in {directory}: expected at least one *.toml file there")
    for file in files:
        try:
            signatures = _signatures_in(load_toml(file), str(file), check=True)
        except UsageError as error:
            problems += error.lines
        except OSError as error:
            problems.append(f"cannot read signatures in {directory}: {error}")
        except ValueError as error:
            problems.append(f"{file} is not valid TOML: {error}")
        else:
            yield from (signature._replace(origin=str(file)) for signature in signatures)


def parse_signatures(text: str, where: str) -> list[Signature]:
    """The signatures of one TOML document; raises ``UsageError`` naming ``where`` and the entry."""
    return _signatures_in(_parse(text, where), where, check=True)


def _parse(text: str, where: str) -> dict[str, Any]:
    import tomllib  # not where all documents are kept

    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{where} is not valid TOML: {error}") from error


def _signatures_in(document: dict[str, Any], where: str, check: bool) -> list[Signature]:
    entries, parts = document.pop("signature", None), document.pop("part", {})
    if document or not isinstance(entries, list):
        found = f", not {', '.join(sorted(document))}" if document else ""
        what = "must hold [[signature]] tables, maybe [part], and nothing else at top level"
        raise UsageError(f"{where} {what}{found}")
    if not isinstance(parts, dict) or not all(isinstance(part, str) for part in parts.values()):
        raise UsageError(f"{where}: [part] holds parts of patterns, each a text with a name")
    if not all(isinstance(entry, dict) for entry in entries):
        raise UsageError(f"{where}: each signature is a table, [[signature]]")
    entries = [_whole(entry, parts) for entry in entries]
    if check:
        refuse(
            f"{where}: signature {entry.get('id', '<without id>')!r}: {problem}"
            for entry in entries
            for problem in _problems(entry)
        )
    return [_signature_of(entry) for entry in entries]


def _whole(entry: dict[str, Any], parts: dict[str, str]) -> dict[str, Any]:
    """``entry`` with ``parts`` in the place of their names, as ``{name}``, in its patterns."""
    for key in ("pattern", "unless"):
        for name, part in parts.items():
            if isinstance(text := entry.get(key), str):
                entry = {**entry, key: text.replace(f"{{{name}}}", part)}
    return entry


def _signature_of(entry: dict[str, Any]) -> Signature:
    # At each start for every shipped signature: only what an entry says is turned over.
    given: dict[str, Any] = {
        key: _KEPT_AS[key](value) if key in _KEPT_AS else value for key, value in entry.items()
    }
    given["class_"] = given.pop("class")
    if "tier" not in given:
        certainty = given.get("certainty") or Signature._field_defaults["certainty"]
        given["tier"] = Signature.default_tier(given["role"], certainty)
    if "retry" in given:
        given.setdefault("retry_after_progress", given["retry"])
    return Signature(**given)


def _problems(entry: dict[str, Any]) -> Iterator[str]:
    """All that is wrong with an entry."""
    unknown = sorted(set(entry) - _KNOWN)
    for key in unknown:
        yield f"unknown key {key!r}{nearest(key, sorted(_KNOWN))}"
    shapes = dict(_misshapen(entry))
    yield from shapes.values()
    sound = {key: value for key, value in entry.items() if key not in shapes}
    misspelt = {each for key in unknown for each in meant(key, _KNOWN)} | shapes.keys()
    for key in _REQUIRED:
        if not sound.get(key) and key not in misspelt:
            yield f"{key} is missing or empty"
    if sound.get("role") != "benign":
        for key in _REQUIRED_OF_FAILURES:
            if not sound.get(key) and key not in misspelt:
                yield f"{key} is missing: a signature that can decide must say what to do"
    yield from _problems_of_values(sound)
    yield from _problems_of_literals(sound)
    yield from _problems_of_patterns(sound)


def _misshapen(entry: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The keys whose values are of another type than they have to be."""
    for key in (key for key in _TEXTS if not isinstance(entry.get(key, ""), str)):
        yield key, f'{key} must be a string: write it in quotes, as in "{entry[key]}"'
    for key in _LISTS:
        value = entry.get(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            yield key, f'{key} must be a list of strings, as in ["one", "two"], not {value!r}'
    if not isinstance(entry.get("tier", 0), int):
        yield "tier", f"tier must be a whole number, not {entry['tier']!r}"
    for key in ("teardown", "hang", "compares"):
        if not isinstance(entry.get(key, False), bool):
            yield key, f"{key} must be true or false, not {entry[key]!r}"


def _problems_of_values(entry: dict[str, Any]) -> Iterator[str]:
    choices: dict[str, Iterable[str]] = {
        "class": FAILURE_CLASSES,
        "role": ROLES,
        "certainty": CERTAINTY,
        "phase": PHASES,
        "cleared_by": ("", "init", "step", "never"),
        "retry": RETRY_POLICIES,
        "retry_after_progress": RETRY_POLICIES,
    }
    for key, allowed in choices.items():
        if key in entry and entry[key] not in allowed and (entry[key] or key not in _REQUIRED):
            shown = list(filter(None, allowed))
            close = nearest(entry[key], shown, or_else="")
            yield f"{key} = {entry[key]!r} is none of {', '.join(shown)}{close}"
    exits = entry.get("exits", [])
    if not isinstance(exits, list) or not all(map(_is_exit, exits)):
        names = f"names of signals, exit codes from 1 to 255, {OTHER_SIGNAL!r} or {ANY_FAILURE!r}"
        yield f"exits must be a list of {names}"


def _is_exit(value: object) -> bool:
    if isinstance(value, int):
        return 0 < value < 256
    return isinstance(value, str) and value in {
        ANY_FAILURE,
        OTHER_SIGNAL,
        *signal.Signals.__members__,
    }


def _problems_of_literals(entry: dict[str, Any]) -> Iterator[str]:
    for literal in entry.get("literals", ()):
        if len(literal) < _SHORTEST_LITERAL:
            yield f"literal {literal!r} is shorter than {_SHORTEST_LITERAL} characters"
        if not literal.isascii() or "\n" in literal:
            yield f"literal {literal!r} must be ASCII and on one line"


def _problems_of_patterns(entry: dict[str, Any]) -> Iterator[str]:
    for key in ("pattern", "unless"):
        try:
            re.compile(entry.get(key, ""))
        except (re.error, RecursionError, OverflowError) as error:
            yield f"{key} is not a regular expression: {error}"
        if unknown := re.search(_PART, entry.get(key, "")):
            yield f"{key} has {unknown[0]}, and [part] has no {unknown[1]!r}"


def _missing_names(loaded: SignatureSet) -> Iterator[str]:
    """What signatures refer to and is not there."""
    known = set(loaded.by_id)
    for signature in loaded.signatures:
        named = signature.requires | signature.requires_all | signature.absent | signature.echo_of
        named |= {name for name in signature.outranks if not name.startswith("class:")}
        named |= signature.explains_line
        for name in sorted(named - known):
            hint = "check requires, absent, outranks, explains_line and echo_of"
            yield (
                f"signature {signature.id!r} ({signature.origin}) refers to {name!r}, "
                f"which does not exist{nearest(name, known, or_else=f': {hint}')}"
            )
