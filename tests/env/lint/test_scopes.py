"""Combinations are judged where one program sees them: by container, branch and command."""

from __future__ import annotations

import textwrap

import pytest

from ncclops.env.lint import Circumstances, LintFinding, lint
from ncclops.env.lint.parse import Format, read

CLASH = "net-ib-disabled"


def found(text: str, kind: Format = "shell") -> list[LintFinding]:
    return lint(read(textwrap.dedent(text), kind), Circumstances())


def clashes(text: str, kind: Format = "shell") -> list[tuple[str, int]]:
    return [(f.level, f.line) for f in found(text, kind) if f.rule == CLASH]


TOGETHER = {
    "straight": "export NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\npython t.py\n",
    "one line": "NCCL_NET=IB NCCL_IB_DISABLE=1 python t.py\n",
    "no command": "export NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\n",
    "exported later": "NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\nexport NCCL_NET\npython t.py\n",
    "prefix over export": "export NCCL_NET=IB\nNCCL_IB_DISABLE=1 torchrun t.py\n",
    "overwritten": "export NCCL_NET=Socket NCCL_IB_DISABLE=1\nexport NCCL_NET=IB\npython t.py\n",
    "in a branch with its command": """
        if [ "$1" = ib ]; then
            export NCCL_NET=IB NCCL_IB_DISABLE=1
            python t.py
        fi
        """,
    "all branches agree": """
        if [ "$1" ]; then export NCCL_NET=IB; else export NCCL_NET=IB; fi
        export NCCL_IB_DISABLE=1
        python t.py
        """,
    "a function that is called": """
        setup() { export NCCL_NET=IB; }
        export NCCL_IB_DISABLE=1
        setup
        python t.py
        """,
    "a shell of its own": "ssh $host 'export NCCL_NET=IB; export NCCL_IB_DISABLE=1; ./t'\n",
    "mpirun": "mpirun -x NCCL_NET=IB -x NCCL_IB_DISABLE=1 ./t\n",
    "docker": "docker run -eNCCL_NET=IB \\\n  --env NCCL_IB_DISABLE=1 image\n",
    "array": 'A=(-x NCCL_NET=IB)\nA+=(-x NCCL_IB_DISABLE=1)\nmpirun "${A[@]}" ./t\n',
    "env with an array": 'A=(NCCL_NET=IB NCCL_IB_DISABLE=1)\nenv "${A[@]}" ./t\n',
    "options in a string": 'O="-x NCCL_NET=IB -x NCCL_IB_DISABLE=1"\nmpirun $O ./t\n',
    "Intel's mpirun": "mpirun -genv NCCL_NET IB -genv NCCL_IB_DISABLE 1 ./t\n",
    "srun": "srun --export=ALL,NCCL_NET=IB,NCCL_IB_DISABLE=1 ./t\n",
    "sbatch directive": "#SBATCH --export=ALL,NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\nsrun t\n",
    "directive with a blank": "#SBATCH --export ALL,NCCL_NET=IB\nNCCL_IB_DISABLE=1 srun t\n",
    "PBS": "#PBS -v NCCL_NET=IB,NCCL_IB_DISABLE=1\npython t.py\n",
    "LSF": '#BSUB -env "all, NCCL_NET=IB, NCCL_IB_DISABLE=1"\npython t.py\n',
    "Apptainer": "export APPTAINERENV_NCCL_NET=IB\n"
    "export SINGULARITYENV_NCCL_IB_DISABLE=1\napptainer exec i.sif t\n",
    "apptainer --env": "apptainer exec --env NCCL_NET=IB,NCCL_IB_DISABLE=1 i.sif t\n",
    "Ray": """ray job submit --runtime-env-json='{"env_vars":
        {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "1"}}' -- t\n""",
    "nccl.conf": "cat > /etc/nccl.conf <<EOF\nNCCL_NET=IB\nNCCL_IB_DISABLE=1\nEOF\n",
    "a script that is written": "cat <<'EOF' > run.sh\nexport NCCL_NET=IB\n"
    "export NCCL_IB_DISABLE=1\nEOF\n",
    "a script that is fed": "bash <<EOF\nexport NCCL_NET=IB NCCL_IB_DISABLE=1\nEOF\n",
    "a manifest that is fed": "cat <<EOF | kubectl apply -f -\nenv:\n"
    "  NCCL_NET: IB\n  NCCL_IB_DISABLE: '1'\nEOF\n",
    "a script that is read into a variable": "IFS= read -r -d '' go <<EOF\n"
    'export NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\nEOF\nsrun bash -c "$go"\n',
    "a script that is taken into a variable": 'go="$(\n  cat <<EOF\n'
    'export A=\\$(hostname)\nexport NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\nEOF\n)"\n',
    "a script that an argument takes": 'srun bash -c "$(cat <<EOF\n'
    'export NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\nEOF\n)"\n',
    "a job script under a variable's name": 'cat > "$JOB" <<EOF\n#!/bin/bash\n'
    'export NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\nEOF\nsbatch "$JOB"\n',
    "a manifest that is printed": "cat <<EOF\napiVersion: v1\nenv:\n"
    "  NCCL_NET: IB\n  NCCL_IB_DISABLE: '1'\nEOF\n",
    "defaults": ": ${NCCL_NET:=IB}\n: ${NCCL_IB_DISABLE:=1}\n"
    "export NCCL_NET NCCL_IB_DISABLE\n./t.sh\n",
    "a chain": "cd x && export NCCL_NET=IB && NCCL_IB_DISABLE=1 python t.py\n",
    "loop": "export NCCL_NET=IB\nfor i in 1 2; do NCCL_IB_DISABLE=1 python t.py; done\n",
    "csh": "setenv NCCL_NET IB\nsetenv NCCL_IB_DISABLE 1\npython t.py\n",
}


@pytest.mark.parametrize("text", TOGETHER.values(), ids=TOGETHER)
def test_what_one_program_sees_together(text: str) -> None:
    assert [level for level, _ in clashes(text)] == ["error"]


APART = {
    "branches": """
        if [ "$1" = ib ]; then
            export NCCL_NET=IB
        else
            export NCCL_IB_DISABLE=1
        fi
        python t.py
        """,
    "cases": """
        case "$1" in
          ib) export NCCL_NET=IB ;;
          eth|tcp) export NCCL_IB_DISABLE=1 ;;
        esac
        python t.py
        """,
    "prefixes of two commands": "NCCL_NET=IB python a.py\nNCCL_IB_DISABLE=1 python b.py\n",
    "subshell": "(export NCCL_NET=IB; python a.py)\nNCCL_IB_DISABLE=1 python b.py\n",
    "unset between": "export NCCL_NET=IB\npython a.py\nunset NCCL_NET\n"
    "export NCCL_IB_DISABLE=1\npython b.py\n",
    "overwritten": "export NCCL_NET=IB NCCL_IB_DISABLE=1\nexport NCCL_NET=Socket\npython t.py\n",
    "two docker runs": "docker run -e NCCL_NET=IB a\ndocker run -e NCCL_IB_DISABLE=1 b\n",
    "docker inherits nothing": "export NCCL_NET=IB\ndocker run -e NCCL_IB_DISABLE=1 b\n",
    "printed": 'echo "export NCCL_NET=IB NCCL_IB_DISABLE=1"\n',
    "usage text": "cat <<EOF\nexport NCCL_NET=IB\nexport NCCL_IB_DISABLE=1\nEOF\n",
    "prose in a variable": "read -r -d '' help <<EOF\nSet export NCCL_NET=IB\n"
    "and export NCCL_IB_DISABLE=1\nEOF\n",
    "a branch that ends": """
        export NCCL_NET=IB
        if [ "$1" ]; then
            export NCCL_NET=Socket NCCL_IB_DISABLE=1
            python t.py
            exit
        fi
        python t.py
        """,
    "functions": "a() { export NCCL_NET=IB; t.sh; }\nb() { export NCCL_IB_DISABLE=1; t.sh; }\n",
    "comment": "export NCCL_NET=IB # NCCL_IB_DISABLE=1\npython t.py\n",
    "unknown": "export NCCL_NET=IB\nexport NCCL_IB_DISABLE=$1\npython t.py\n",
    "printed with a form": "printf 'NCCL_DEBUG=%s\\n' INFO >> nccl.conf\n",
    "Slurm drops it": "export NCCL_NET=IB\nsrun --export=NCCL_IB_DISABLE=1 t\n",
}


@pytest.mark.parametrize("text", APART.values(), ids=APART)
def test_what_no_program_sees_together(text: str) -> None:
    assert clashes(text) == []


@pytest.mark.parametrize(
    "script",
    [
        "LEVEL=INOF\nexport NCCL_DEBUG=$LEVEL",
        'export LEVEL=INOF\necho "LEVEL=$LEVEL"\nexport NCCL_DEBUG="${LEVEL:-WARN}"',
        "LEVEL=INOF\nmpirun -x NCCL_DEBUG=${LEVEL} ./train",
        "LEVEL=INOF\nNCCL_DEBUG=$LEVEL python train.py",
    ],
)
def test_a_value_that_one_variable_hands_to_another_is_known(script: str) -> None:
    assert [(f.rule, f.level) for f in found(script)] == [("bad-value", "error")]


@pytest.mark.parametrize(
    "script",
    [
        "if a; then LEVEL=INOF; fi",
        "LEVEL=INOF\nif a; then LEVEL=INFO; fi",
        "LEVEL=INOF\nread -r LEVEL",
        "LEVEL=INOF\nfor LEVEL in INFO WARN; do",
        "LEVEL=INOF\nwhile getopts l: LEVEL; do",
        "LEVEL=$(level INOF)",
        "LEVEL='INOF INFO'",
        "a() { LEVEL=INOF; }",
    ],
)
def test_a_value_that_may_be_another_is_not(script: str) -> None:
    end = "\ndone" if script.endswith("do") else ""
    assert not found(f"{script}\nexport NCCL_DEBUG=$LEVEL{end}")


def test_what_a_later_line_may_change_is_no_error() -> None:
    text = 'export NCCL_NET=IB\nif [ "$1" ]; then\n  export NCCL_IB_DISABLE=1\nfi\n. more.sh\n'
    assert clashes(text) == [("warning", 3)]


def test_a_finding_stands_at_the_line_of_its_own_assignment() -> None:
    text = """\
        NCCL_IB_DISABLE=1 python a.py
        export NCCL_NET=IB
        NCCL_IB_DISABLE=1 \\
          NCCL_DEBUG=WARN \\
          python b.py
        NCCL_IB_DISABLE=0 python c.py
        """
    assert clashes(text) == [("error", 3)]
    odd = "docker run \\\n  -e A=1 \\\n  -e NCCL_DEBUG=LOUD \\\n  image\n"
    assert [(f.rule, f.line) for f in found(odd)] == [("bad-value", 3)]


POD = """\
spec:
  containers:
  - name: a
    env:
    - {name: NCCL_NET, value: "IB"}
    - value: "WARN"
      name: NCCL_DEBUG
    - name: NCCL_ALGO
      value:
    command: ["bash", "-c"]
    args:
    - |
      export %s
      python t.py
  - name: b
    env: [{name: NCCL_IB_DISABLE, value: "1"}]
"""


def test_each_container_is_a_scope_of_its_own() -> None:
    assert clashes(POD % "A=1", "yaml") == []
    assert clashes(POD % "NCCL_IB_DISABLE=1", "yaml") == [("error", 13)]
    assert [f.rule for f in found(POD % "A=1", "yaml")] == []


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('services:\n  a:\n    environment:\n      NCCL_DEBUG: "WARN"\n      NCCL_NET: ~\n', []),
        ("services:\n  a:\n    environment:\n      NCCL_NET: IB\n      NCCL_IB_DISABLE: 1\n", [5]),
        ("x:\n  environment: [NCCL_NET=IB, 'NCCL_IB_DISABLE=1']\n", [2]),
        ("envs:\n  NCCL_NET: IB\nrun: |\n  NCCL_IB_DISABLE=1 python t.py\n", [4]),
        ("args: [mpirun, -x, NCCL_NET=IB, -x, NCCL_IB_DISABLE=1, ./t]\n", [1]),
        ("data:\n  nccl.conf: |\n    NCCL_NET=IB\n    NCCL_IB_DISABLE=1\n", [4]),
        ("data:\n  run.sh: |\n    export NCCL_NET=IB\n    export NCCL_IB_DISABLE=1\n", [4]),
        ("a: &e\n  NCCL_NET: IB\nenv:\n  <<: *e\n  NCCL_IB_DISABLE: '1'\n", [5]),
        ('{"runtime_env": {"env_vars": {"NCCL_NET": "IB",\n"NCCL_IB_DISABLE": "1"}}}', [2]),
        ("env:\n- name: NCCL_NET\n  value: IB\n{{- if .x }}\n- name: NCCL_IB_DISABLE\n"
         "  value: {{ .y }}\n{{- end }}\n", []),
    ],
    ids=["null", "compose", "list", "SkyPilot", "words", "conf", "script", "merge", "Ray", "chart"],
)  # fmt: skip
def test_manifests(text: str, wrong: list[int]) -> None:
    assert [line for _, line in clashes(text, "yaml")] == wrong
    assert "bad-value" not in {finding.rule for finding in found(text, "yaml")}


def test_the_stages_of_a_dockerfile() -> None:
    apart = "FROM a AS x\nENV NCCL_NET=IB\nFROM b\nENV NCCL_IB_DISABLE=1\n"
    assert clashes(apart, "dockerfile") == []
    built_on = "FROM a AS x\nENV NCCL_NET=IB\nFROM x\nENV A=1 \\\n# why\n  NCCL_IB_DISABLE=1\n"
    assert clashes(built_on, "dockerfile") == [("error", 6)]
    conf = "FROM a\nRUN echo NCCL_IB_TIMOUT=1 >> /etc/nccl.conf && echo NCCL_NTHREADS=x\n"
    assert [(f.rule, f.line) for f in found(conf, "dockerfile")] == [("unknown-name", 2)]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("os.environ['NCCL_NET'] = 'IB'\nos.environ['NCCL_IB_DISABLE'] = '1'\n", [("error", 2)]),
        ("os.environ.update({'NCCL_NET': 'IB',\n'NCCL_IB_DISABLE': '1'})\n", [("error", 2)]),
        ("os.environ.setdefault('NCCL_NET', 'IB')\nos.putenv('NCCL_IB_DISABLE', '1')\n",
         [("error", 2)]),
        ("if x:\n  os.environ['NCCL_NET'] = 'IB'\nelse:\n  os.environ['NCCL_IB_DISABLE'] = '1'\n",
         []),
        ("a = {'NCCL_NET': 'IB'}\nb = {'NCCL_IB_DISABLE': '1'}\n", []),
        ("ray.init(runtime_env={'env_vars': {'NCCL_NET': 'IB', 'NCCL_IB_DISABLE': '1'}})\n",
         [("error", 1)]),
        ("def a():\n  os.environ['NCCL_NET'] = 'IB'\n"
         "def b():\n  os.environ['NCCL_IB_DISABLE'] = '1'\n", []),
        ("os.environ['NCCL_NET'] = 'IB'\ndel os.environ['NCCL_NET']\n"
         "os.environ['NCCL_IB_DISABLE'] = '1'\n", []),
    ],
)  # fmt: skip
def test_python(text: str, wrong: list[tuple[str, int]]) -> None:
    assert clashes("import os\n" + text, "python") == [(lv, n + 1) for lv, n in wrong]


def test_an_apptainer_definition() -> None:
    text = "Bootstrap: docker\n%post\n  make\n%environment\n  export NCCL_NET=IB\n"
    both = text + "  export NCCL_IB_DISABLE=1\n"
    assert clashes(text, "apptainer") == []
    assert clashes(both, "apptainer") == [("error", 6)]


OPTIONS_IN_A_BRANCH = {
    "an array that a branch adds to": """
        ARGS=()
        if [ "$1" != off ]; then
            ARGS+=(-e NCCL_NET=IB -e NCCL_IB_DISABLE=1)
        fi
        docker run "${ARGS[@]}" image python t.py
        """,
    "an array of one of two branches": """
        if [ "$1" ]; then
            ARGS=(-e NCCL_NET=IB -e NCCL_IB_DISABLE=1)
        else
            ARGS=(-e NCCL_DEBUG=WARN)
        fi
        docker run "${ARGS[@]}" image python t.py
        """,
    "a string": """
        if [ "$1" ]; then
            ARGS="-e NCCL_NET=IB -e NCCL_IB_DISABLE=1"
        fi
        docker run $ARGS image python t.py
        """,
}


@pytest.mark.parametrize("text", OPTIONS_IN_A_BRANCH.values(), ids=OPTIONS_IN_A_BRANCH)
def test_options_gathered_in_a_branch_are_judged_there(text: str) -> None:
    assert [level for level, _ in clashes(text)] == ["warning"]


def test_options_of_a_branch_may_be_completed_elsewhere() -> None:
    text = """
        ARGS=()
        if [ "$1" ]; then
            ARGS+=(-e NCCL_DEBUG_SUBSYS=NET)
        fi
        docker run "${ARGS[@]}" -e NCCL_DEBUG=INFO image python t.py
        """
    assert not [f for f in found(text) if f.rule == "log-settings-without-log"]


BY_CHOICE = """
    if ls /sys/class/infiniband/*; then
        export NCCL_IB_DISABLE=0
    else
        export NCCL_IB_DISABLE=1
        srun python t.py
    fi
    """


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (BY_CHOICE, False),
        (BY_CHOICE.replace("NCCL_IB_DISABLE=0", "NCCL_DEBUG=WARN"), True),
        ("export NCCL_IB_DISABLE=1\nsrun python t.py\n", True),
    ],
)
def test_what_a_script_chooses_by_the_machine_has_not_leaked(text: str, told: bool) -> None:
    settings = read(textwrap.dedent(text), "shell")
    rules = {f.rule for f in lint(settings, Circumstances(nodes="many"))}
    assert ("ib-off-on-many-nodes" in rules) is told
