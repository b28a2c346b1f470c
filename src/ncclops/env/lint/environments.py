"""The environments that a file makes: what is set where, and what a program there sees.

A reader (``shell``, ``containers``, ``dockerfile``, ``python_source``) walks its file and tells a
``Scope`` what happens; the scope knows what holds in a branch and after it. Combinations are judged
in each environment by itself, so two containers, two branches or two commands never make one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache

from ncclops.env.catalogue import MISSPELT_PREFIXES, catalogue, is_covered, names_of_today
from ncclops.env.lint.model import LintedSettings, LintFinding, Setting

# What is kept of one file: more environments, or bundles of options, than any real file has.
_MOST_ENVIRONMENTS = 1000
_MOST_BUNDLES = 100
_MOST_IN_A_BUNDLE = 200
_MOST_VARIANTS = 8


@cache
def watched() -> frozenset[str]:
    """The names that combinations depend on; only these are followed through a file."""
    from ncclops.env.lint.rules import rules

    names = {"TORCH_DIST_USE_NCCL2"}
    for rule in rules():
        for name, condition in rule.conditions.items():
            share = condition.get("above_share_of", {"variable": name})
            names |= {name, share["variable"], condition.get("differs_from", name)}
    return frozenset(names | {old for old, today in names_of_today().items() if today in names})


def _nowhere(_text: str, _name: str, _line: int) -> None:
    return None


@dataclass
class Found:
    """All that a file sets, and the environments that it makes.

    ``embedded`` reads the text of a file that this file writes, given the other's name and the line
    where the text begins.
    """

    embedded: Callable[[str, str, int], None] = _nowhere
    settings: list[Setting] = field(default_factory=list)
    environments: list[LintedSettings] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)
    # How many settings there were when a name was unset before any program ran.
    unset: dict[str, int] = field(default_factory=dict)
    slips: list[LintFinding] = field(default_factory=list)
    _seen: set[object] = field(default_factory=set)

    def note(self, setting: Setting) -> None:
        self.settings.append(setting)

    def add_environment(self, values: Iterable[Setting], branched: bool) -> None:
        """An environment that a program sees; ``branched`` if what follows may still change it."""
        entries = tuple(values)
        key = (entries, branched)
        if key in self._seen or len(self.environments) >= _MOST_ENVIRONMENTS:
            return
        self._seen.add(key)
        self.environments.append(LintedSettings(entries, open_end=branched))


@dataclass
class _State:
    """What holds at one place. ``None`` as a setting: set here or not, that is not known.

    ``variants`` holds what a bundle is after each branch, where branches differ.
    """

    exported: dict[str, Setting | None] = field(default_factory=dict)
    plain: dict[str, Setting] = field(default_factory=dict)
    bundles: dict[str, tuple[Setting, ...]] = field(default_factory=dict)
    variants: dict[str, tuple[tuple[Setting, ...], ...]] = field(default_factory=dict)
    export_all: bool = False
    ended: bool = False
    changed: bool = False

    def copy(self) -> _State:
        return replace(
            self,
            exported=dict(self.exported),
            plain=dict(self.plain),
            bundles=dict(self.bundles),
            variants=dict(self.variants),
        )


class Scope:
    """One line of execution through a file."""

    def __init__(self, found: Found, begin: Iterable[Setting] = ()) -> None:
        self.found = found
        given: dict[str, Setting | None] = {s.name: s for s in begin if s.name in watched()}
        self._state = _State(exported=given, changed=bool(given))
        self._branches = 0
        self.jobs = 0
        # What has been exported since the last program began, outside all branches.
        self.late: list[Setting] = []
        # What is exported so far, and what has a value that no program has seen yet.
        self.exports: dict[str, None] = {}
        self.twice: list[tuple[Setting, Setting]] = []
        self._unseen: dict[str, Setting] = {}

    # ---- what happens

    def assign(self, setting: Setting) -> None:
        """``setting`` is made; it reaches programs if it is ``exported``."""
        state = self._state
        exported = setting.exported or state.export_all or setting.name in state.exported
        setting = replace(setting, exported=exported)
        self.found.note(setting)
        if exported:
            self.exports[setting.name] = None
        if exported and self._branches == 0 and self.jobs:
            self.late.append(setting)
        self.give(setting.name, setting)
        if setting.name in watched() and not state.ended:
            if exported:
                state.exported[setting.name] = setting
                state.changed = True
            else:
                state.plain[setting.name] = setting

    def give(self, key: str, setting: Setting) -> None:
        """``key`` has this value now; one that no program has seen is without effect."""
        before = self._unseen.pop(key, None)
        if not self.is_certain or setting.value is None:
            return
        differs = before is not None and (before.value or "").lower() != setting.value.lower()
        if before is not None and differs and before.line != setting.line:
            self.twice.append((before, setting))
        self._unseen[key] = setting

    def seen(self) -> None:
        """A program runs that may see what has been set."""
        self.late.clear()
        self._unseen.clear()

    def export(self, name: str) -> None:
        """What ``name`` has been given reaches programs from here on, and did not before."""
        self.found.exported.add(name)
        self.exports[name] = None
        if name in self._state.plain:
            plain = self._state.plain.pop(name)
            self._state.exported[name] = replace(plain, exported=True)
            self._state.changed = True

    @property
    def is_certain(self) -> bool:
        """Whether what happens here certainly does: outside all branches."""
        return self._branches == 0 and not self._state.ended

    @property
    def exports_all(self) -> bool:
        """Whether what is assigned reaches programs without more (``set -a``)."""
        return self._state.export_all

    def export_all(self) -> None:
        self._state.export_all = True

    def unset(self, name: str) -> None:
        self._state.plain.pop(name, None)
        self.exports.pop(name, None)
        self._unseen.pop(name, None)
        if self._state.exported.pop(name, None) is not None:
            self._state.changed = True
        if self._branches == 0 and self.jobs == 0:
            self.found.unset[name] = len(self.found.settings)

    def clear(self) -> None:
        """Nothing that has been exported reaches what follows."""
        self._state.exported.clear()

    def assign_again(self, setting: Setting) -> None:
        """``setting``, which has been told of, holds for what follows."""
        if setting.name in watched():
            self._state.exported[setting.name] = setting

    def go_on(self) -> None:
        """What has ended was a function: its caller goes on."""
        self._state.ended = False

    def end(self) -> None:
        """Nothing follows on this line of execution (``exit``)."""
        self._state.ended = True

    def bundle(self, name: str, settings: Iterable[Setting], more: bool) -> None:
        """Options in a variable or an array, for commands that use it; ``more`` adds to it."""
        settings = tuple(settings)
        for setting in settings:
            self.found.note(setting)
        known = tuple(setting for setting in settings if setting.name in watched())
        before = self._state.bundles.get(name, ()) if more else ()
        variants = self._state.variants.pop(name, ())
        if more and variants:
            self._state.variants[name] = tuple(variant + known for variant in variants)
        if not before and not known:
            return
        if len(self._state.bundles) < _MOST_BUNDLES or name in self._state.bundles:
            self._state.bundles[name] = (before + known)[:_MOST_IN_A_BUNDLE]

    def run(
        self, given: Iterable[Setting] = (), bundles: Iterable[str] = (), inherits: bool = True
    ) -> None:
        """A program runs with what is exported, and with ``given`` and ``bundles`` besides."""
        state = self._state
        values: dict[str, Setting | None] = dict(state.exported) if inherits else {}
        for setting in given:
            self.found.note(setting)
            if setting.name in watched():
                values[setting.name] = setting
        bundles = tuple(bundles)
        for name in bundles:
            for setting in state.bundles.get(name, ()):
                values[setting.name] = setting
        if not state.ended:
            self.jobs += 1
            self.seen()
            self._add(values, branched=False)
            for name in bundles:
                for variant in state.variants.get(name, ()):
                    self._add(values | {s.name: s for s in variant}, branched=True)
            if inherits:
                state.changed = False

    def close(self) -> None:
        """The file, or a part with an environment of its own, ends."""
        state = self._state
        if state.changed and not state.ended:
            self._add(state.exported, branched=self._branches > 0)
            state.changed = False
        if self._branches == 0:
            for settings in state.bundles.values():
                self._add({setting.name: setting for setting in settings}, branched=False)

    def _add(self, values: dict[str, Setting | None], branched: bool) -> None:
        entries = [
            setting if setting is not None else Setting(name, None, certain=False)
            for name, setting in values.items()
        ]
        self.found.add_environment(entries, branched)

    # ---- where it happens

    @contextmanager
    def part(self) -> Iterator[None]:
        """What happens inside ends with it: a subshell."""
        before, exports = self._state, dict(self.exports)
        unseen, self._unseen = self._unseen, {}
        self._state = before.copy()
        yield
        self.close_part()
        self._state, self.exports, self._unseen = before, exports, unseen

    def close_part(self) -> None:
        state = self._state
        if state.changed and not state.ended:
            self._add(state.exported, branched=self._branches > 0)

    def alternatives(self, complete: bool) -> Alternatives:
        """Branches, of which one runs; ``complete``: one of them certainly does."""
        return Alternatives(self, complete)


class Alternatives:
    """The branches of one place. ``with alternatives.branch(): …`` for each, then ``merge()``."""

    def __init__(self, scope: Scope, complete: bool) -> None:
        self.scope, self._before = scope, scope._state
        self._after: list[_State] = [] if complete else [scope._state]

    @contextmanager
    def branch(self) -> Iterator[None]:
        scope = self.scope
        scope._state = self._before.copy()
        scope._state.changed = False
        scope._branches += 1
        yield
        if scope._state.changed and not scope._state.ended:
            scope._add(scope._state.exported, branched=True)
        scope._branches -= 1
        self._after.append(scope._state)
        scope._state = self._before

    def merge(self) -> None:
        live = [state for state in self._after if not state.ended]
        if not live:
            self.scope._state = replace(self._before.copy(), ended=True)
            return
        merged = live[0].copy()
        merged.changed = any(state.changed for state in self._after) or self._before.changed
        merged.exported = _merged([state.exported for state in live])
        merged.plain = {
            name: setting
            for name, setting in merged.plain.items()
            if all(state.plain.get(name) == setting for state in live)
        }
        names = {name for state in live for name in state.bundles}
        merged.bundles = {name: _common(name, live) for name in names}
        merged.variants = {name: _variants(name, live) for name in names}
        self.scope._state = merged


def _merged(states: list[dict[str, Setting | None]]) -> dict[str, Setting | None]:
    """What all agree on; a value that differs is unknown, and so is what only some set."""
    merged: dict[str, Setting | None] = {}
    for name in dict.fromkeys(name for state in states for name in state):
        settings = [state.get(name) for state in states]
        first = settings[0]
        if first is None or any(setting is None for setting in settings):
            merged[name] = None
        elif all(setting and setting.value == first.value for setting in settings):
            merged[name] = first
        else:
            merged[name] = replace(first, value=None)
    return merged


def _common(name: str, states: list[_State]) -> tuple[Setting, ...]:
    tuples = [state.bundles.get(name, ()) for state in states]
    if all(settings == tuples[0] for settings in tuples):
        return tuples[0]
    everywhere = set(tuples[0]).intersection(*map(set, tuples[1:]))
    seen = dict.fromkeys(setting for settings in tuples for setting in settings)
    return tuple(
        setting if setting in everywhere else replace(setting, value=None, certain=False)
        for setting in seen
    )[:_MOST_IN_A_BUNDLE]


def _variants(name: str, states: list[_State]) -> tuple[tuple[Setting, ...], ...]:
    variants: dict[tuple[Setting, ...], None] = {}
    for state in states:
        here = state.variants.get(name) or (state.bundles.get(name, ()),)
        variants.update(dict.fromkeys(here))
    return tuple(variants)[:_MOST_VARIANTS] if len(variants) > 1 else ()


def is_setting_of_interest(name: str) -> bool:
    """Whether lint has a say in ``name``: the catalogue has it, or it looks like one of its."""
    return name in catalogue() or is_covered(name) or name.startswith(tuple(MISSPELT_PREFIXES))
