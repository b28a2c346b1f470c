"""Every defect that is planted in a random launch file is found, and nothing else is an error."""

from __future__ import annotations

import os

from ncclops.env.lint import Circumstances, lint
from ncclops.env.lint.parse import read
from tests.env.lint.launch_files import FORMS, launch_file

WHERE = Circumstances(torch="2.9.0", nccl="2.27.5")
# NCCLOPS_LAUNCH_FILES=5000:9000 looks at other files than the tests usually do.
BEGIN, END = map(int, os.environ.get("NCCLOPS_LAUNCH_FILES", "0:600").split(":"))


def test_planted_defects_are_found_and_nothing_else_is_an_error() -> None:
    missed, wrong = [], []
    for seed in range(BEGIN, END):
        file = launch_file(seed)
        findings = lint(read(file.text, file.kind), WHERE)
        mine = [f for f in findings if f.rule == file.rule and {*f.names} & {*file.names}]
        others = [f for f in findings if f.level == "error" and f not in mine]
        if not mine:
            missed.append((seed, file.form, file.rule))
        if others:
            wrong.append((seed, file.form, others[0].message))
    assert missed == []
    assert wrong == []


def test_the_files_have_all_forms() -> None:
    assert {launch_file(seed).form for seed in range(600)} == set(FORMS)
