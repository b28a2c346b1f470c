"""Every signature is data with proof: examples it matches, near misses it does not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ncclops.classify import classify_bytes, load_signatures
from ncclops.classify.loader import parse_signatures
from ncclops.classify.model import FAILURE_CLASSES, Signature
from ncclops.errors import UsageError
from tests.classify.shipped import LOADED
from tests.conftest import CompletedText

SHIPPED = Path("src/ncclops/classify/signatures")


@pytest.mark.parametrize("signature", LOADED.signatures, ids=lambda item: item.id)
def test_examples_match_and_near_misses_do_not(signature: Signature) -> None:
    assert signature.examples and signature.near_misses
    for example in signature.examples:
        assert signature in LOADED.match_line(example), example
    for near_miss in signature.near_misses:
        assert signature not in LOADED.match_line(near_miss), near_miss


@pytest.mark.parametrize(
    "signature",
    [
        s
        for s in LOADED.signatures
        if s.role != "benign" and not (s.requires or s.requires_all or s.compares) and s.tier < 4
    ],
    ids=lambda item: item.id,
)
def test_an_example_alone_gets_its_class(signature: Signature) -> None:
    """A line by itself is classified as its signature says, unless another explains it better."""
    for example in signature.examples:
        verdict = classify_bytes(example.encode(), LOADED).verdict
        winner = LOADED.by_id[verdict.signature or ""] if verdict.signature else None
        explained = winner is not None and winner.outranks_signature(signature)
        assert verdict.class_ == signature.class_ or explained, (example, verdict)


@pytest.mark.parametrize(
    "signature", [s for s in LOADED.signatures if s.role == "benign"], ids=lambda item: item.id
)
def test_benign_examples_are_no_failure(signature: Signature) -> None:
    """The line by itself proves nothing; what NCCL traces while it fails is at most a symptom."""
    for example in signature.examples:
        verdict = classify_bytes(example.encode(), LOADED).verdict
        if verdict.names_failure and verdict.signature is None:
            assert signature.id == "context-error-line", example
        elif verdict.names_failure:
            assert LOADED.by_id[verdict.signature or ""].role in ("symptom", "victim"), example
            assert not verdict.eligible


def test_every_class_has_a_cause_or_symptom() -> None:
    covered = {s.class_ for s in LOADED.signatures if s.role in ("cause", "symptom")}
    assert covered == set(FAILURE_CLASSES)


def test_bootstrap_phases_are_distinguished() -> None:
    phases = {s.phase for s in LOADED.signatures if s.class_ in ("bootstrap", "store-rendezvous")}
    assert phases >= {"store", "unique-id", "socket", "topology", "transport"}


def test_shipped_patterns_compile_and_remedies_exist() -> None:
    """The start skips compiling the shipped patterns, so this is where a bad one is caught."""
    for file in sorted(SHIPPED.glob("*.toml")):
        for signature in parse_signatures(file.read_text(), file.name):
            assert signature.role == "benign" or (signature.remedy and signature.references)


def test_ids_are_unique_over_files() -> None:
    ids = [s.id for f in SHIPPED.glob("*.toml") for s in parse_signatures(f.read_text(), f.name)]
    assert len(ids) == len(set(ids))


GOOD = """
[[signature]]
id = "site-license"
class = "user-error"
role = "cause"
literals = ["license server"]
pattern = "license server (?:refused|timed out)"
retry = "fix-config"
summary = "the licence server refused"
remedy = ["ask the licence team"]
examples = ["ERROR license server refused token"]
near_misses = ["license server ok"]
"""


def test_a_site_adds_its_own(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(GOOD)
    loaded = load_signatures(tmp_path)
    assert len(loaded.signatures) == len(LOADED.signatures) + 1
    verdict = classify_bytes(b"ERROR license server refused token\n", loaded).verdict
    assert (verdict.class_, verdict.signature) == ("user-error", "site-license")


def test_what_patterns_have_in_common_is_written_once(tmp_path: Path) -> None:
    part = "[part]\nfails = '(?:refused|timed out)'\n"
    own = GOOD.replace('pattern = "license server', 'pattern = "license server {fails}" # ')
    (tmp_path / "site.toml").write_text(part + own)
    assert load_signatures(tmp_path).by_id["site-license"].pattern.endswith("(?:refused|timed out)")


def test_a_site_replaces_a_shipped_one_by_its_id(tmp_path: Path) -> None:
    (tmp_path / "site.toml").write_text(GOOD.replace("site-license", "no-net-plugin"))
    loaded = load_signatures(tmp_path)
    assert len(loaded.signatures) == len(LOADED.signatures)
    assert loaded.by_id["no-net-plugin"].summary == "the licence server refused"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('class = "user-error"', 'class = "user-eror"', "class = 'user-eror'"),
        ('role = "cause"', 'role = "reason"', "role = 'reason'"),
        ('literals = ["license server"]', "literals = []", "literals is missing"),
        ('literals = ["license server"]', 'literals = ["err"]', "shorter than"),
        ('literals = ["license server"]', "literals = [1]", "list of strings"),
        ('pattern = "license', 'pattern = "(license', "not a regular expression"),
        ('pattern = "license', f'pattern = "{"(" * 5000}', "not a regular expression"),
        ('retry = "fix-config"', 'retry = "retry-forever"', "retry = 'retry-forever'"),
        ('retry = "fix-config"', "", "retry is missing"),
        ("remedy = ", "remedies = ", "unknown key 'remedies'"),
        ('examples = ["ERROR license server refused token"]', "", "examples is missing"),
        ('near_misses = ["license server ok"]', "", "near_misses is missing"),
        ('id = "site-license"', 'id = "site-license"\noutranks = ["nope"]', "refers to 'nope'"),
        ('id = "site-license"', 'id = "site-license"\nouttake', "not valid TOML"),
        ('id = "site-license"', 'id = "site-license"\ntier = "1"', "tier must be"),
        ('pattern = "license', 'pattern = "{licence} ', "[part] has no 'licence'"),
        ("[[signature]]", "[part]\nname = 7\n[[signature]]", "[part] holds parts of patterns"),
        ("[[signature]]", "[parts]\n[[signature]]", "nothing else at top level"),
    ],
)
def test_mistakes_are_one_clear_line(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in GOOD
    (tmp_path / "site.toml").write_text(GOOD.replace(old, new))
    with pytest.raises(UsageError) as caught:
        load_signatures(tmp_path)
    message = str(caught.value)
    assert complaint in message and "\n" not in message
    assert "site.toml" in message


def test_all_mistakes_of_all_files_are_told_at_once(tmp_path: Path) -> None:
    wrong = GOOD.replace('"user-error"', '"user-eror"').replace("remedy = ", "remedi = ")
    exits = GOOD.replace('id = "site', 'tier = 1.5\nexits = [[1]]\nid = "site')
    (tmp_path / "a.toml").write_text(wrong + exits)
    (tmp_path / "b.toml").write_text(GOOD.replace('id = "', 'outranks = ["no-net-plugi"]\nid = "'))
    (tmp_path / "c.toml").write_text("[[signature]\n")
    with pytest.raises(UsageError) as caught:
        load_signatures(tmp_path)
    expected = [
        r"a\.toml: .*'site-license': unknown key 'remedi'; did you mean remedy\?",
        r"a\.toml: .*class = 'user-eror' is none of .*; did you mean user-error\?",
        r"a\.toml: .*tier must be a whole number, not 1\.5",
        r"a\.toml: .*exits must be a list of names of signals",
        r"c\.toml is not valid TOML",
    ]
    assert len(caught.value.lines) == len(expected)
    for line, says in zip(caught.value.lines, expected, strict=True):
        assert re.search(says, line)


def test_names_that_do_not_exist_are_all_told(tmp_path: Path) -> None:
    named = 'outranks = ["no-net-plugi"]\nabsent = ["zzzz"]\nid = "'
    (tmp_path / "b.toml").write_text(GOOD.replace('id = "', named))
    with pytest.raises(UsageError) as caught:
        load_signatures(tmp_path)
    first, second = caught.value.lines
    assert "'no-net-plugi', which does not exist; did you mean no-net-plugin?" in first
    assert "'zzzz', which does not exist: check requires" in second


def test_a_directory_without_signatures_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no signatures in"):
        load_signatures(tmp_path)
    with pytest.raises(UsageError, match="no signatures in"):
        load_signatures(tmp_path / "missing")


OWN = """
[[signature]]
id = "site-license"
class = "user-error"
role = "cause"
literals = ["license server"]
retry = "fix-config"
summary = "the licence server refused"
remedy = ["ask the licence team"]
examples = ["license server refused"]
near_misses = ["licence"]
"""


@pytest.fixture
def user_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a user keeps signatures for every command."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    directory = tmp_path / "ncclops" / "signatures"
    directory.mkdir(parents=True)
    return directory


def test_a_site_s_signatures_count_for_every_command_and_the_user_s_replace_them(
    user_s: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (site := tmp_path / "etc").mkdir()
    monkeypatch.setattr("ncclops.classify.loader.SITE", site)
    (site / "ours.toml").write_text(OWN.replace("refused", "of the site refused"))
    line = b"license server of the site refused\n"
    assert classify_bytes(line).verdict.summary == "the licence server of the site refused"
    (user_s / "mine.toml").write_text(OWN)
    assert classify_bytes(line).verdict.summary == "the licence server refused"


def test_beside_a_job_a_file_that_is_wrong_is_a_warning_and_only_the_shipped_count(
    user_s: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (user_s / "mine.toml").write_text("[[signature]]\nid = 7\n")
    assert classify_bytes(b"license server refused\n").verdict.signature != "site-license"
    assert "only the shipped signatures are used" in caplog.text
    assert "mine.toml" in caplog.text


@pytest.mark.parametrize("command", [("launch", "--dry-run", "train.py"), ("classify", "--list")])
def test_a_command_refuses_standing_signatures_that_are_wrong(
    user_s: Path,
    tmp_path: Path,
    ncclops_in_process: Callable[..., CompletedText],
    command: tuple[str, ...],
) -> None:
    (tmp_path / "train.py").touch()
    (user_s / "mine.toml").write_text("[[signature]]\nid = 7\n")
    done = ncclops_in_process(*command, env={"XDG_CONFIG_HOME": str(tmp_path)})
    assert done.returncode == 2
    assert "mine.toml" in done.stderr
