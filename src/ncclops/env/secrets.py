"""Values that must not be written down: tokens, passwords, keys."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ncclops.env.catalogue import catalogue

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|ACCOUNT_?KEY"
    r"|(?:^|_)(?:KEY|AUTH|COOKIE|DSN|SAS|PAT|PWD_HASH)$|SIGNATURE|WEBHOOK",
    re.IGNORECASE,
)
# A password in a URL, and the shapes that well-known services give their keys.
_SECRET_VALUE = re.compile(
    r"://[^/\s:@]*:[^/\s@]+@|\b(?:hf|ghp|gho|ghs|glpat|sk|xox[abp])[-_][A-Za-z0-9_-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|-----BEGIN [A-Z ]*PRIVATE KEY|\beyJ[\w-]{10,}\.[\w-]{10,}\.",
)
# In the catalogue, and a secret all the same.
_SECRET_SETTINGS = frozenset({"NCCL_PSK"})


def is_secret(name: str, value: str) -> bool:
    """Whether a variable looks as if it held a secret, by its name or by its value."""
    if name in catalogue():
        return name in _SECRET_SETTINGS
    return bool(_SECRET_NAME.search(name) or _SECRET_VALUE.search(value))


def redact(variables: Mapping[str, str]) -> dict[str, str]:
    """``variables`` with the values of secrets replaced."""
    return {
        name: REDACTED if is_secret(name, value) else value for name, value in variables.items()
    }
