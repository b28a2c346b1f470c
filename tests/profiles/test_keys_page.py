"""The JSON schema of profile files accepts what ncclops does, and docs/profile-keys.md says it."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from ncclops.profiles.schema import json_schema
from tests.conftest import REPOSITORY, CompletedText
from tests.scripts_of_repository import load_script

SHIPPED = sorted((REPOSITORY / "profiles").glob("*.toml"))
HEAD = 'description = "d"\n'

Validate = Callable[..., CompletedText]


def mistakes(text: str) -> list[str]:
    validator = Draft202012Validator(json_schema())
    return [error.message for error in validator.iter_errors(tomllib.loads(text))]


def test_the_page_is_what_the_schema_gives() -> None:
    script = load_script("profile_keys_page")
    page = (REPOSITORY / "docs" / "profile-keys.md").read_text()
    assert page == script.page(), "run scripts/profile_keys_page.py"


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(json_schema())


@pytest.mark.parametrize("path", SHIPPED, ids=[path.stem for path in SHIPPED])
def test_shipped_profiles_fit(path: Path) -> None:
    assert mistakes(path.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        'extends = "base"',
        'extends = ["base", "./ours.toml"]',
        '[timeouts]\nsoft = "{limit}"\nhard = "1.5 h"\n[timeouts.groups]\n"mesh*" = "5m"',
        '[env.A]\nunset = true\nwhy = "w"\nwhen = { host = "n*", restart = ["process"] }',
        '[[env.A]]\nset = "1"\nwhy = "w"\n[[env.A]]\ndefault = "0"\nwhy = "w"',
        '[scopes.between_nodes]\nunset = false\nwhy = "w"',
        '[notify.to.me]\nkind = "command"\ncommand = ["mail"]\nrules = ["failed"]',
        "[growth]\ngpu_memory_gib = 1\nfds = 0",
    ],
)
def test_what_ncclops_accepts_fits(text: str, tmp_path: Path, ncclops_in_process: Validate) -> None:
    assert mistakes(HEAD + text) == []
    written = HEAD + ('[parameters]\nlimit = "1h"\n' if "{limit}" in text else "") + text
    (tmp_path / "base.toml").write_text(HEAD)
    (tmp_path / "ours.toml").write_text(HEAD)
    path = tmp_path / "profile.toml"
    path.write_text(written)
    done = ncclops_in_process("profile", "validate", path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "text",
    [
        'descripton = "x"',
        'nodes = "two"',
        '[timeouts]\nsoft = "90"',
        "[growth]\nfds = -1",
        '[env.A]\nset = "1"\nunset = true\nwhy = "w"',
        '[env.A]\nset = "1"',
        "[exit_codes]\nretry = 256",
        '[scopes.elsewhere]\nunset = true\nwhy = "w"',
    ],
)
def test_what_ncclops_refuses_does_not(
    text: str, tmp_path: Path, ncclops_in_process: Validate
) -> None:
    assert mistakes(HEAD + text)
    path = tmp_path / "profile.toml"
    path.write_text(HEAD + text)
    assert ncclops_in_process("profile", "validate", path).returncode == 2
