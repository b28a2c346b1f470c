"""Each mistake in a profile gives one line with the file, the key and the remedy."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ncclops.errors import ProfileError
from ncclops.profiles import load_profiles

BAD = {
    "syntax": ("[env\n", "not valid TOML: Expected ']' .*line 2, column 5"),
    "unknown key": ('extend = "base"', "extend: unknown key; did you mean extends?"),
    "unknown timeout": (
        '[timeouts]\nproces_group = "1m"',
        "timeouts.proces_group: unknown key; did you mean process_group?",
    ),
    "unknown entry key": (
        'env.X = { st = "1", why = "w" }',
        r"env\.X\.st: unknown key; did you mean set",
    ),
    "unknown condition": (
        'env.X = { set = "1", why = "w", when = { restrt = "none" } }',
        r"env\.X\.when\.restrt: unknown key; did you mean restart?",
    ),
    "number for text": (
        'env.X = { set = 1, why = "w" }',
        r'env\.X\.set: must be text: write it in quotes, as in "1"',
    ),
    "no reason": ('env.X = { set = "1" }', r"env\.X\.why: is missing: every entry says why"),
    "empty reason": ('env.X = { set = "1", why = "" }', r"env\.X\.why: must not be empty"),
    "two actions": (
        'env.X = { set = "1", unset = true, why = "w" }',
        r"env\.X: needs exactly one of set, default, unset = true and scrub",
    ),
    "NUL": (
        'env.X = { set = "a\\u0000b", why = "w" }',
        r"env\.X: holds the character NUL, which no variable can",
    ),
    "too long": ('timeouts.soft = "36526d"', r"timeouts\.soft: .* is longer than any duration"),
    "no action": ('env.X = { why = "w" }', r"env\.X: needs exactly one of"),
    "entry in a list": (
        '[[env.X]]\nset = "1"\nwhy = "w"\n[[env.X]]\nset = 2\nwhy = "w"',
        r"env\.X\.\[2\]\.set: must be text",
    ),
    "not a table": ('env.X = "1"', r"env\.X: must be a table in braces, not '1'"),
    "text for a list": (
        'network.expect = "ib"',
        r'network\.expect: must be a list: write it in brackets, as in \["ib"\]',
    ),
    "text for a number": ('preflight.gpus = "all"', "gpus: must be a whole number, not 'all'"),
    "text for a switch": ('preflight.rdma = "no way"', "rdma: must be true or false, not 'no way'"),
    "list for one value": (
        "parameters.x = [1]",
        r"parameters\.x: must be text, a number, true or false, not \[1\]",
    ),
    "too small": ("preflight.gpus = -1", r"gpus: must be (?!.*input).*, not -1"),
    "a command that may have a secret": (
        'notify.to.ops = { kind = "command", rules = ["failed"], command = "sh -c KEY" }',
        r"notify\.to\.ops\.command: must be a list in brackets(?!.*KEY)",
    ),
    "bad variable": ('env."A-B" = { set = "1", why = "w" }', "'A-B' cannot be the name"),
    "an unknown scope": (
        'scopes.between_node = { unset = true, why = "w" }',
        r"scopes\.between_node: cannot be 'between_node'; write 'between_nodes' or 'within_node'",
    ),
    "a scope without a reason": ("scopes.between_nodes = { unset = true }", "why: is missing"),
    "holding without scrub": (
        'env.X = { unset = true, holding = ["a"], why = "w" }',
        "holding and unless_holding go with scrub",
    ),
    "bad parameter name": ("parameters.A = 1", "parameter 'A': use lower-case"),
    "bad kind": ('kind = "line"', "kind: cannot be 'line'; write 'lane' or 'overlay'"),
    "bad mode": (
        'env.X = { set = "1", why = "w", when = { restart = "inprocess" } }',
        r"restart.*: cannot be 'inprocess'; write 'in-process', 'process' or 'none'",
    ),
    "bad version": (
        'env.X = { set = "1", why = "w", when = { torch = "2.8+" } }',
        r"env\.X\.when\.torch: '2\.8\+' is not a version condition: write it as >=2\.8",
    ),
    "bad duration": (
        '[timeouts]\nstop_grace = "15"',
        "timeouts.stop_grace: '15' is not a duration: write a number and a unit",
    ),
    "duration of the wrong type": (
        "[timeouts]\nstop_grace = 15",
        'timeouts.stop_grace: must be text: write it in quotes, as in "15"',
    ),
    "parameter that is no duration": (
        '[parameters]\nwindow = "soon"\n[timeouts]\nprocess_group = "{window}"',
        "timeouts.process_group: 'soon' is not a duration",
    ),
    "unknown parameter": (
        '[parameters]\nwindow = "1m"\n[env.X]\nset = "{windw}"\nwhy = "w"',
        r"env\.X: there is no parameter 'windw'; did you mean window?",
    ),
    "unknown parent": (
        'extends = "singlenode-h200"',
        r"extends: unknown profile 'singlenode-h200'; did you mean single-node-h200",
    ),
    "missing parent file": ('extends = "./no.toml"', r"extends: profile \./no\.toml: there is no"),
    "extends of the wrong type": ("extends = 3", 'must be text: write it in quotes, as in "3"'),
    "follows without default": (
        'env.X = { set = "1", follows = "Y", why = "w" }',
        r"env\.X: follows goes with default",
    ),
    "deep": ("retry.rows = " + "{a = " * 5000, "not valid TOML: it is nested too deeply"),
    "a key of many parts": ("a." * 100_000 + "a = 1", "line 2 has more than 300 dots"),
    "a number of many digits": (f"growth.x = {'9' * 5000}", "not valid TOML: .*4300 digits"),
    "an endless duration": (
        f'timeouts.soft = "{"9" * 5000}s"',
        r"timeouts\.soft: .* is longer than any duration",
    ),
    "no time": ('timeouts.heartbeat = "0s"', r"timeouts\.heartbeat: must be positive, not 0s"),
    "no time for a group": (
        'timeouts.groups.tp = "0ms"',
        r"timeouts\.groups\.tp: must be positive",
    ),
    "no time by a parameter": (
        '[parameters]\nwait = "0h"\n[watch]\nhang = "{wait}"',
        r"watch\.hang: must be positive, not 0h",
    ),
    "a heartbeat without a pause": (
        'notify.to.ops = { kind = "command", command = ["true"], heartbeat = "0s" }',
        r"notify\.to\.ops\.heartbeat: must be positive",
    ),
    "a long name": (f'extends = "{"x" * 5000}"', r"extends: unknown profile 'xxx"),
    "large": (f'env.X = {{ set = "{"x" * (1 << 20)}", why = "w" }}', "it is larger than 1 MiB"),
    "empty scrub": ('env.X = { scrub = [], why = "w" }', r"env\.X\.scrub: must not be empty"),
}


@pytest.mark.parametrize(("text", "message"), BAD.values(), ids=BAD.keys())
def test_a_mistake_names_file_key_and_remedy(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(f'description = "d"\n{text}\n', encoding="utf-8")
    with pytest.raises(ProfileError, match=message) as caught:
        load_profiles([str(path)])
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


ALL_AT_ONCE = {
    "of shape": (
        'description = "d"\nkind = "Overly"\ncolour = 1\ntimeouts.soft = 5\nenv.X.set = "1"\n',
        [
            "kind: cannot be 'Overly'; write 'lane' or 'overlay'; did you mean overlay?",
            'timeouts.soft: must be text: write it in quotes, as in "5"',
            "env.X.why: is missing: every entry says why",
            "colour: unknown key; known: description, kind,",
        ],
    ),
    "of meaning": (
        'description = "d"\n[timeouts]\nsoft = "0s"\nhard = "{no}"\n[watch]\nhang = "0s"\n'
        '[notify]\nprogress = "0s"\n[notify.to.ops]\nkind = "command"\ncommand = ["x"]\n'
        'heartbeat = "0s"\n[env.X]\nset = "{nor_this}"\nwhy = "w"\n',
        [
            "timeouts.soft: must be positive",
            "timeouts.hard: there is no parameter 'no'",
            "env.X: there is no parameter 'nor_this'",
            "watch.hang: must be positive",
            "notify.to.ops.heartbeat: must be positive",
            "notify.progress: must be positive",
        ],
    ),
    "a misspelt key is missing under its name": (
        'descripton = "d"\n',
        ["descripton: unknown key; did you mean description?"],
    ),
    "a type of several": (
        'description = "d"\nparameters.a = [1]\nparameters.b = {}\n',
        [
            "parameters.a: must be text, a number, true or false, not [1]",
            "parameters.b: must be text, a number, true or false, not {}",
        ],
    ),
}


@pytest.mark.parametrize(("text", "lines"), ALL_AT_ONCE.values(), ids=ALL_AT_ONCE.keys())
def test_all_mistakes_of_a_file_are_told_at_once(
    tmp_path: Path, text: str, lines: list[str]
) -> None:
    path = tmp_path / "bad.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        load_profiles([str(path)])
    said = caught.value.lines
    assert len(said) == len(lines)
    for line, expected in zip(said, lines, strict=True):
        assert line.startswith(f"{path}: {expected}")


def test_of_very_many_mistakes_the_first_are_told(tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_text("".join(f"a{number} = 1\n" for number in range(1000)), encoding="utf-8")
    with pytest.raises(ProfileError) as caught:
        load_profiles([str(path)])
    assert len(caught.value.lines) == 51
    assert caught.value.lines[-1] == "there is more that is wrong: mend this first"


def test_notifications_need_no_pause(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text(
        'description = "d"\n[notify]\ncooldown = "0s"\ngoodput_after = "0s"\n', encoding="utf-8"
    )
    assert not load_profiles([str(path)]).notify.cooldown


def test_an_unknown_profile_gives_the_nearest_names() -> None:
    with pytest.raises(ProfileError, match="'multi-host'; did you mean multi-host-h200"):
        load_profiles(["multi-host"])


def test_of_several_profiles_all_that_is_wrong_is_told() -> None:
    with pytest.raises(ProfileError) as raised:
        load_profiles(["lcoal-cpu", "local-cpu", "regional-compil"])
    first, second = raised.value.lines
    assert "'lcoal-cpu'; did you mean local-cpu" in first
    assert "'regional-compil'; did you mean regional-compile" in second


def test_a_loop_is_named(tmp_path: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.toml").write_text(
            f'description = "d"\nextends = "./{parent}.toml"\n', encoding="utf-8"
        )
    with pytest.raises(ProfileError, match=r"c\.toml: extends: .* loop: a -> b -> c -> a$"):
        load_profiles([str(tmp_path / "a.toml")])


@pytest.mark.parametrize(("levels", "parents"), [(60, 1), (40, 2)])
def test_what_profiles_extend_is_bounded(tmp_path: Path, levels: int, parents: int) -> None:
    """Two parents that both extend the same two, and so on, are on billions of ways."""
    for level in range(levels):
        extends = [f"./{level + 1}-{n}.toml" for n in range(parents)]
        for n in range(parents):
            text = f'description = "d"\nextends = {extends if level + 1 < levels else []}\n'
            (tmp_path / f"{level}-{n}.toml").write_text(text, encoding="utf-8")
    with pytest.raises(ProfileError, match=r"extends: more than 50 profiles in a row, or 1000 in"):
        load_profiles([str(tmp_path / "0-0.toml")])


@pytest.mark.parametrize(
    ("make", "said"),
    [
        ("missing", "there is no such file"),
        ("directory", "that is a directory"),
        ("pipe", "that is a pipe or a device"),
        ("binary", "cannot be read"),
    ],
)
def test_an_unreadable_file_says_so(tmp_path: Path, make: str, said: str) -> None:
    path = tmp_path / "p.toml"
    if make == "directory":
        path.mkdir()
    if make == "pipe":
        os.mkfifo(path)
    if make == "binary":
        path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ProfileError, match=rf"p\.toml: {said}"):
        load_profiles([str(path)])
