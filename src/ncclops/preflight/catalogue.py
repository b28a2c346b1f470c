"""The checks as data: ``checks.toml``, read and checked once.

Code says how a check looks at readings (``preflight.checks``); what it is called, its thresholds,
where they come from, how grave it is and what to do stand in the file and nowhere else.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any, Literal

import msgspec

from ncclops.preflight.model import Finding, Status

Subject = Literal["gpu", "nic", "host", "software"]


class Check(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One check. ``severity`` is the gravest it says; ``limits`` are its thresholds by name.

    ``remedies`` say what to do about findings that need something else than ``remedy``, by a word
    for what was found. ``cannot_tell`` says when it has no answer; ``source`` where thresholds and
    rule come from.
    """

    id: str
    subject: Subject
    title: str
    reads: str
    wanted: str
    severity: Literal["WARN", "FAIL"]
    remedy: str
    remedies: Mapping[str, str] = {}
    source: str
    cannot_tell: str
    limits: Mapping[str, Any] = {}

    def limit(self, name: str) -> float:
        """The number that ``limits`` has under ``name``."""
        value = self.limits[name]
        if not isinstance(value, int | float):
            raise TypeError(f"{self.id}: {name} is no number")
        return value

    def numbers(self, name: str) -> frozenset[int]:
        """The list of whole numbers that ``limits`` has under ``name``."""
        value = self.limits[name]
        if not isinstance(value, list):
            raise TypeError(f"{self.id}: {name} is no list")
        return frozenset(int(each) for each in value)

    def words(self, name: str) -> tuple[str, ...]:
        """The list of texts that ``limits`` has under ``name``."""
        value = self.limits[name]
        if not isinstance(value, list):
            raise TypeError(f"{self.id}: {name} is no list")
        return tuple(str(each) for each in value)

    def rates(self, name: str) -> Mapping[str, float]:
        """The table of numbers that ``limits`` has under ``name``."""
        return self._table(name)

    def texts(self, name: str) -> Mapping[str, str]:
        """The table of texts that ``limits`` has under ``name``."""
        return self._table(name)

    def _table(self, name: str) -> dict[str, Any]:
        value = self.limits[name]
        if not isinstance(value, dict):
            raise TypeError(f"{self.id}: {name} is no table")
        return value

    def ok(self, subject: str, read: str) -> Finding:
        """All is well."""
        return self._finding(Status.OK, subject, read)

    def bad(self, subject: str, read: str, what: str = "") -> Finding:
        """It is not, as grave as the catalogue has it. ``what``: whose of ``remedies`` helps."""
        return self._finding(Status(self.severity), subject, read, what)

    def warn(self, subject: str, read: str, what: str = "") -> Finding:
        """It is not as it should be, and does not convict. ``what``: as for ``bad``."""
        return self._finding(Status.WARN, subject, read, what)

    def unknown(self, subject: str, why: str) -> Finding:
        """It could not be known."""
        return self._finding(Status.CANNOT_TELL, subject, why)

    def _finding(self, status: Status, subject: str, read: str, what: str = "") -> Finding:
        told = status in (Status.WARN, Status.FAIL)
        remedy = self.remedies[what] if what else self.remedy
        return Finding(
            check=self.id,
            status=status,
            subject=subject,
            read=read,
            wanted=self.wanted,
            remedy=remedy if told else "",
        )


@cache
def catalogue() -> Mapping[str, Check]:
    """All checks of preflight by id, in the order of the file."""
    return checks_of("ncclops.preflight")


def checks_of(package: str) -> Mapping[str, Check]:
    """The checks in ``checks.toml`` of ``package``. Raises ``ValueError`` for a broken file."""
    text = (resources.files(package) / "checks.toml").read_text(encoding="utf-8")
    found = msgspec.convert(tomllib.loads(text)["check"], list[Check])
    checks = {check.id: check for check in found}
    if len(checks) != len(found):
        raise ValueError(f"{package}: checks.toml: two checks have one id")
    return checks
