"""What `ncclops classify` keeps from call to call: the same answers, whatever became of it."""

from __future__ import annotations

import functools
import os
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ncclops.classify import SignatureSet, classify_bytes, load_signatures
from ncclops.classify import cache as cache_module
from ncclops.classify.cache import NO_CACHE, Cache
from ncclops.classify.matcher import build_matcher
from tests.classify.shipped import LOADED

EXAMPLES = "\n".join(each.examples[0] for each in LOADED.signatures).encode()
LITERALS = [literal.encode() for literal in LOADED.literals]
OWN = """
[[signature]]
id = "site-license"
class = "user-error"
role = "cause"
literals = ["license server"]
retry = "fix-config"
summary = "the licence server refused"
remedy = ["ask the licence team"]
examples = ["ERROR license server refused token"]
near_misses = ["licence server"]
"""


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache(tmp_path / "cache" / "ncclops")


def files(cache: Cache, kind: str = "") -> list[Path]:
    assert cache.directory is not None
    return sorted(cache.directory.glob(f"{kind}*")) if cache.directory.exists() else []


def the_file(cache: Cache, kind: str) -> Path:
    (found,) = files(cache, kind)
    return found


def answers(loaded: SignatureSet) -> object:
    """All that signatures say of a text that is large enough for hyperscan."""
    assert len(EXAMPLES) > 1 << 14
    return loaded.signatures, classify_bytes(EXAMPLES, loaded).evidence


@functools.cache
def expected() -> object:
    """What they say without a cache."""
    return answers(LOADED)


def test_what_was_written_is_read_for_the_same_source_alone(cache: Cache) -> None:
    assert cache.read("kind", b"source") is None
    cache.write("kind", b"source", lambda: b"result")
    assert cache.read("kind", b"source") == b"result"
    assert cache.read("kind", b"sourc") is None
    assert cache.read("other", b"source") is None


def test_answers_are_the_same_without_a_cache_with_an_empty_and_with_a_full_one(
    cache: Cache,
) -> None:
    for _ in range(2):
        assert answers(load_signatures(cache=cache)) == expected()
    assert len(files(cache)) == 2


def test_what_is_kept_saves_reading_toml_and_compiling(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(load_signatures(cache=cache))
    before = [path.stat().st_ino for path in files(cache)]
    monkeypatch.setitem(sys.modules, "tomllib", None)
    assert answers(load_signatures(cache=cache)) == expected()
    assert [path.stat().st_ino for path in files(cache)] == before  # nothing was built again
    with pytest.raises(ImportError):
        load_signatures()


def test_signatures_of_a_site_are_read_as_they_are_now(cache: Cache, tmp_path: Path) -> None:
    load_signatures(cache=cache)
    site = tmp_path / "site"
    site.mkdir()
    for words in ("license server", "licence daemon"):
        (site / "own.toml").write_text(OWN.replace("license server", words))
        for _ in range(2):
            kept, plain = load_signatures(site, cache=cache), load_signatures(site)
            assert kept.signatures == plain.signatures
            text = EXAMPLES + f"\nERROR {words} refused token\n".encode()
            report = classify_bytes(text, kept)
            assert report.evidence == classify_bytes(text, plain).evidence
            alone = b"-\n" * (1 << 14) + f"ERROR {words} refused token\n".encode()
            assert classify_bytes(alone, kept).verdict.signature == "site-license"
    assert len(files(cache, "literals")) == 2  # the shipped ones alone were never searched


def test_another_version_of_ncclops_uses_nothing_of_it(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write("kind", b"source", lambda: b"result")
    monkeypatch.setattr(cache_module, "_MAKER", "ncclops-cache/1 99.0")
    assert cache.read("kind", b"source") is None


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9])


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


def _pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _link(path: Path) -> None:
    target = path.with_name(f"of-{path.name}")
    path.rename(target)
    path.symlink_to(target)


def _open_to_all(path: Path) -> None:
    path.chmod(0o666)


def _directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _endless(path: Path) -> None:
    os.truncate(path, 1 << 33)


def _foreign_database(path: Path) -> None:
    """As a machine with other processors has written it, with the same name and all checks."""
    if path.name.startswith("literals"):
        whole = bytearray(path.read_bytes()[:-4])
        whole[whole.index(b"\xdb\xdb\xdb\xdb") + 12] ^= 0x55  # of the platform's bits
        path.write_bytes(bytes(whole) + zlib.crc32(whole).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "harm",
    [
        _truncate,
        _empty,
        _flip,
        _pipe,
        _link,
        _open_to_all,
        _directory,
        _endless,
        _foreign_database,
    ],
)
def test_a_damaged_or_foreign_file_costs_only_time(
    cache: Cache, harm: Callable[[Path], None]
) -> None:
    answers(load_signatures(cache=cache))
    before = {path.name: path.read_bytes() for path in files(cache)}
    for path in files(cache):
        harm(path)
    assert answers(load_signatures(cache=cache)) == expected()
    if harm is not _directory:  # a file cannot take the place of one
        assert {name: (files(cache)[0].parent / name).read_bytes() for name in before} == before


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_directory_in_which_others_may_write_is_not_used(cache: Cache, mode: int) -> None:
    cache.write("kind", b"source", lambda: b"result")
    assert cache.directory is not None
    cache.directory.chmod(mode)
    assert cache.read("kind", b"source") is None
    cache.write("kind", b"more", lambda: b"result")
    assert len(files(cache)) == 1


def _give_away(path: Path) -> None:
    try:
        os.chown(path, 12345, 12345)
    except OSError as error:
        pytest.skip(f"only root gives a file away: {error}")


@pytest.mark.parametrize("part", ["directory", "file", "above"])
def test_what_belongs_to_somebody_else_is_not_used(cache: Cache, part: str) -> None:
    assert cache.directory is not None
    if part == "above":
        cache.directory.parent.mkdir()
        _give_away(cache.directory.parent)
        cache.write("kind", b"source", lambda: b"result")
        assert not cache.directory.exists()  # its owner could not use what root makes there
        return
    cache.write("kind", b"source", lambda: b"result")
    _give_away(cache.directory if part == "directory" else the_file(cache, "kind"))
    assert cache.read("kind", b"source") is None


def test_only_the_user_may_read_it(cache: Cache) -> None:
    before = os.umask(0)
    try:
        cache.write("kind", b"source", lambda: b"result")
    finally:
        os.umask(before)
    assert cache.directory is not None
    assert the_file(cache, "kind").stat().st_mode & 0o777 == 0o600
    assert cache.directory.stat().st_mode & 0o777 == 0o700


def test_where_nothing_can_be_kept_nothing_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for directory in (
        Path("/proc/ncclops"),
        tmp_path / "no" / "such" / "directory",
        tmp_path / "file" / "ncclops",
        tmp_path / "file",
        tmp_path / "dangling",
    ):
        kept = Cache(directory)
        kept.write("kind", b"source", lambda: b"result")
        assert kept.read("kind", b"source") is None
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dangling", "file"]


def test_of_a_kind_the_newest_eight_stay(cache: Cache) -> None:
    cache.write("other", b"", lambda: b"")
    for number in range(12):
        cache.write("kind", b"%d" % number, lambda: b"result")
        for path in files(cache, "kind"):  # as if each was made some time after the last
            os.utime(path, ns=(0, path.stat().st_mtime_ns - 10**9))
    assert [number for number in range(12) if cache.read("kind", b"%d" % number)] == [*range(4, 12)]
    assert len(files(cache)) == 9


def test_readers_and_writers_at_once_see_whole_results(cache: Cache) -> None:
    result = b"x" * 100_000

    def use(_number: int) -> bytes | None:
        cache.write("kind", b"source", lambda: result)
        return cache.read("kind", b"source")

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(use, range(100))) == {result}
    assert len(files(cache)) == 1


def test_the_user_s_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/scratch/cache")
    assert Cache.of_user() == Cache(Path("/scratch/cache/ncclops"))
    for unset in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", unset)
        assert Cache.of_user() == Cache(Path("/home/someone/.cache/ncclops"))
    monkeypatch.setenv("HOME", "relative")
    assert Cache.of_user() == NO_CACHE


@pytest.mark.parametrize("size", [100, 1 << 20])
def test_a_matcher_of_a_kept_database_finds_the_same(cache: Cache, size: int) -> None:
    text = (EXAMPLES * (1 + size // len(EXAMPLES)))[:size]
    expected = build_matcher(LITERALS)(text)
    assert expected
    for _ in range(2):
        assert build_matcher(LITERALS, cache)(text) == expected
    assert len(files(cache, "literals")) == (size > 1 << 14)
