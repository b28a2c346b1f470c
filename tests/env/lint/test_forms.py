"""One wrong value, written in every kind of file and in every way that sets a variable there."""

from __future__ import annotations

from pathlib import Path

import pytest

from ncclops.env.lint import Circumstances, LintFinding, lint
from ncclops.env.lint.parse import guess_format, read

# NAME and VALUE stand for a variable of NCCL and a value that it does not take.
SHELL = [
    "export NAME=VALUE",
    "NAME=VALUE python t.py",
    'eval "export NAME=VALUE"',
    "timeout 10 env -u A NAME=VALUE python t.py",
    'mpirun --mca mca_base_env_list "A=1;NAME=VALUE" ./a',
    "mpirun_rsh -np 2 h1 h2 NAME=VALUE ./a",
    'bsub -env "all, NAME=VALUE" python t.py',
    "jsrun -n 2 -E NAME=VALUE ./a",
    'pjsub -x "A=1,NAME=VALUE" j.sh',
    "#PJM -x NAME=VALUE\npython t.py",
    "# flux: --env=NAME=VALUE\n./a",
    "#COBALT --env A=1:NAME=VALUE\n./a",
    "docker service update --env-add NAME=VALUE s",
    "kubectl set env deploy/x A=1 NAME=VALUE",
    "kubectl create configmap c --from-literal=NAME=VALUE",
    'helm install r c --set "worker.env.NAME=VALUE,worker.x=1"',
    "gcloud run deploy s --set-env-vars=A=1,NAME=VALUE",
    "az container create --environment-variables A=1 NAME=VALUE",
    "bwrap --setenv NAME VALUE python t.py",
    "SINGULARITYENV_NAME=VALUE singularity run i.sif",
    "conda env config vars set A=1 NAME=VALUE -n e",
    "systemctl --user set-environment NAME=VALUE",
    'echo "NAME=VALUE" >> /etc/environment',
    'echo "NAME=VALUE" >> ~/.deepspeed_env',
    'echo "NAME=VALUE" >> "$GITHUB_ENV"',
    'echo "export NAME=VALUE" >> $BASH_ENV',
    "printf '%s\\n' 'A=1' 'NAME=VALUE' > ~/.nccl.conf",
    '{ echo "A=1"; echo "NAME=VALUE"; } > /etc/nccl.conf',
    "cat > .env <<EOF\nNAME=VALUE\nEOF",
    'cat > "$HOME/.run_env" <<EOF\nexport NAME=VALUE\nEOF',
    "cat <<EOF > job\n#SBATCH -N 2\nNAME=VALUE srun a\nEOF",
    "cat > conf.d/nccl <<'EOF'\n# vars\nNAME=VALUE\nEOF",
    "cat > $UNIT <<EOF\n[Unit]\nDescription=x\n[Service]\nEnvironment=NAME=VALUE\nEOF",
    "cat > build.tmp <<EOF\nFROM a\nENV NAME=VALUE\nEOF",
    "cat > launch.inc <<EOF\nimport os\nos.environ['NAME'] = 'VALUE'\nEOF",
    "python -c \"import os; os.environ['NAME']='VALUE'; import torch\"",
    'sbatch --wrap="NAME=VALUE python t.py"',
    "ssh h NAME=VALUE python t.py",
    'for kv in "NAME=VALUE" "A=1"; do export "$kv"; done',
    "declare -A E=([NAME]=VALUE [A]=1)\nfor k in x; do export $k=1; done",
]
DOCKERFILE = [
    "FROM a\nARG X=VALUE\nENV NAME=$X",
    "FROM a\nARG X=VALUE\nENV NAME=${X:-1}",
    "FROM a\nONBUILD ENV NAME=VALUE",
    "FROM a\nCOPY <<EOF /etc/nccl.conf\nNAME=VALUE\nEOF",
    'FROM a\nCMD ["env", "NAME=VALUE", "python"]',
    'FROM a\nRUN { echo "NAME=VALUE"; echo "A=1"; } >> /etc/nccl.conf',
]
PYTHON = [
    "import os as o\no.environ['NAME'] = 'VALUE'",
    "os.environ['NAME'] = os.environ.get('NAME', 'VALUE')",
    "os.environ['NAME'] = os.getenv('NAME') or 'VALUE'",
    "os.environ['NAME'] = 'VALUE' if x else 'VALUE'",
    "X = 'VALUE'\nos.environ['NAME'] = X",
    "K = 'NAME'\nos.environ[K] = 'VALUE'",
    "for k, v in [('A', '1'), ('NAME', 'VALUE')]:\n    os.environ[k] = v",
    "subprocess.run(x, env=dict(os.environ, NAME='VALUE'))",
    "env = os.environ.copy()\nenv['NAME'] = 'VALUE'",
    "self.env_vars.setdefault('NAME', 'VALUE')",
    "child_env.update(NAME='VALUE')",
    "os.environ.update(dict(NAME='VALUE'))",
    "env = [{'name': 'NAME', 'value': 'VALUE'}]",
    "env = [client.V1EnvVar(name='NAME', value='VALUE')]",
    "env = [V1EnvVar('NAME', 'VALUE')]",
    "task.set_env_variable(name='NAME', value='VALUE')",
    "image = base.env('NAME', 'VALUE').run('x')",
    "os.system('NAME=VALUE python t.py')",
    "subprocess.run(['env', 'NAME=VALUE', 'python'])",
]
YAML = [
    "services:\n  a:\n    environment:\n    - NAME: VALUE",
    "environment:\n  NAME: ${NAME:-VALUE}",
    "environment:\n- NAME=${NAME:-VALUE}",
    "environment:\n  environment_variables:\n    cuda:\n    - NAME=VALUE",
    "variables:\n  NAME:\n    value: VALUE",
    "nccl_env: A=1 NAME=VALUE",
    "envs: A=1,NAME=VALUE",
    "env:\n- key: NAME\n  value: 'VALUE'",
    "kind: ConfigMap\ndata:\n  .env: |\n    NAME=VALUE",
    "spark.executorEnv.NAME: VALUE",
    'env:\n- name: NAME\n  value: {{ .Values.x | default "VALUE" | quote }}',
    "env:\n  NAME: \"{{ x | default('VALUE') }}\"",
    "- tasks:\n  - lineinfile:\n      path: /etc/nccl.conf\n      line: NAME=VALUE",
    "- tasks:\n  - copy:\n      dest: /etc/nccl.conf\n      content: |\n        NAME=VALUE",
    "- tasks:\n  - blockinfile:\n      path: /etc/nccl.conf\n      block: |\n        NAME=VALUE",
]
OTHERS = [
    ("d.json", '{"containerEnv": {"NAME": "VALUE"}, // why\n"x": [1,]}'),
    ("d.json", '{"NAME": "VALUE"}'),
    ("d.json", '[{"X": "a", "NAME": "20"}, {"X": "b", "NAME": "VALUE"}]'),
    ("x.toml", '[env]\nNAME = "VALUE"'),
    ("x.toml", 'env = { A = "1", NAME = "VALUE" }'),
    ("x.ini", '[a]\nenvironment=A="1",NAME="VALUE"'),
    ("x.tf", 'env = {\n  NAME = "VALUE"\n}'),
    ("x.tf", 'env {\n  name  = "NAME"\n  value = "VALUE"\n}'),
    ("x.tf", "user_data = <<EOF\n#!/bin/bash\nexport NAME=VALUE\nEOF"),
    ("x.nix", 'environment.variables = { NAME = "VALUE"; };'),
    ("x.service", "[Service]\nEnvironment=NAME=VALUE"),
    ("x.service", '[Service]\nEnvironment="A=1" "NAME=VALUE"'),
    ("m.lua", 'setenv("NAME", "VALUE")'),
    ("1.0", "#%Module1.0\nsetenv NAME VALUE"),
    ("Makefile", "export NAME := VALUE"),
    ("Makefile", "NAME = VALUE\nexport NAME"),
    ("Makefile", "all: export NAME=VALUE\nall:\n\tx"),
    ("Makefile", "E = -x NAME=VALUE\nall:\n\t@mpirun $(E) a"),
    ("Makefile", "all:\n\tdocker run \\\n\t  -e NAME=VALUE \\\n\t  img"),
    ("justfile", 'export NAME := "VALUE"'),
    ("x.ps1", '$env:NAME = "VALUE"'),
    ("x.ps1", '$env:NAME = if ($env:NAME) { $env:NAME } else { "VALUE" }'),
    ("x.ps1", '[Environment]::SetEnvironmentVariable("NAME", "VALUE")'),
    ("x.ps1", "docker run `\n  -e NAME=VALUE `\n  i"),
    ("x.bat", "set NAME=VALUE"),
    ("x.bat", 'set "NAME=VALUE"'),
    ("x.fish", "if not set -q NAME\n    set -gx NAME VALUE\nend"),
    ("x.fish", "set -q NAME; or set --export NAME VALUE"),
    ("x.csh", "if ($?NAME == 0) setenv NAME VALUE"),
    ("x.csh", "if ($x) then\n  setenv NAME VALUE\nendif"),
    ("env.list", "# for docker\nA=1\nNAME=VALUE"),
]
FORMS = [
    *(("j.sh", text) for text in SHELL),
    *(("Dockerfile", text) for text in DOCKERFILE),
    *(("t.py", text) for text in PYTHON),
    *(("m.yaml", text) for text in YAML),
    *OTHERS,
]


def findings(name: str, text: str) -> list[LintFinding]:
    kind = guess_format(Path(name), text)
    return lint(read(text, kind, Path(name)), Circumstances(nccl="2.32.3", torch="2.13.0"))


@pytest.mark.parametrize(("name", "text"), FORMS)
def test_a_wrong_value_is_told_wherever_it_stands(name: str, text: str) -> None:
    text = text.replace("NAME", "NCCL_IB_TIMEOUT").replace("VALUE", "99")
    errors = [f for f in findings(name, text) if f.level == "error"]
    assert {(f.rule, f.names) for f in errors} == {("bad-value", ("NCCL_IB_TIMEOUT",))}


@pytest.mark.parametrize(("name", "text"), FORMS)
def test_a_right_value_is_no_finding(name: str, text: str) -> None:
    text = text.replace("NAME", "NCCL_IB_TIMEOUT").replace("VALUE", "20")
    assert [f for f in findings(name, text) if "NCCL_IB_TIMEOUT" in f.names] == []


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("x.toml", "[env]\nNCCL_IB_DISABLE = true"),
        ("x.toml", '[env]\nNCCL_DEBUG = "INFO"\n\n[other.env]\nNCCL_DEBUG = "WARN"'),
        ("x.tf", "env = {\n  NCCL_DEBUG = var.debug\n}"),
        ("x.ps1", '$env:NCCL_DEBUG = "$level"'),
        ("x.bat", "set NCCL_DEBUG=%LEVEL%"),
        ("Makefile", "NCCL_HOME ?= /usr\nall:\n\tmake NCCL_HOME=$(NCCL_HOME) x"),
        ("j.sh", "export NCCL_ALGO=RING,SCCL NCCL_LL128_NTHREADS=640"),  # SCCL: a fork's
        ("j.sh", 'echo "use NCCL_DEBUG=LOUD"'),
        ("j.sh", "grep NCCL_DEBUG=LOUD f"),
        ("j.sh", "awk NCCL_DEBUG=LOUD f"),
        ("j.sh", "docker run --env NCCL_DEBUG image"),
        ("j.sh", "cat <<EOF\nUsage: export NCCL_DEBUG=LOUD\nexport NCCL_DEBUG=LOUD\nEOF"),
        ("j.sh", "cat >&2 <<EOF\nexport NCCL_DEBUG=LOUD\nEOF"),
        ("j.sh", "cat > notes.md <<EOF\nexport NCCL_DEBUG=LOUD\nEOF"),
        ("t.py", "results['NCCL_DEBUG'] = 'LOUD'"),
        ("t.py", "search = {'NCCL_IB_TIMEOUT': 99}"),
        ("t.py", "check(NCCL_IB_TIMEOUT='99')"),
    ],
)
def test_what_sets_nothing_or_is_not_known_is_no_error(name: str, text: str) -> None:
    assert [f for f in findings(name, text) if f.level == "error"] == []


def test_blocks_of_one_file_are_environments_of_their_own() -> None:
    apart = '[a.env]\nNCCL_NET = "IB"\n\n[b.env]\nNCCL_IB_DISABLE = "1"\n'
    together = '[a.env]\nNCCL_NET = "IB"\nNCCL_IB_DISABLE = "1"\n'
    assert "net-ib-disabled" not in {f.rule for f in findings("x.toml", apart)}
    assert "net-ib-disabled" in {f.rule for f in findings("x.toml", together)}


def test_a_number_in_os_environ_raises_in_python() -> None:
    rules = {f.rule: f.level for f in findings("t.py", "os.environ['NCCL_IB_TIMEOUT'] = 20")}
    assert rules["no-text"] == "error"
    assert "no-text" not in {f.rule for f in findings("t.py", "os.environ['MINE'] = 20")}


def test_what_a_function_sets_before_it_returns_is_an_environment() -> None:
    text = (
        "def setup():\n    os.environ['NCCL_NET'] = 'IB'\n    os.environ['NCCL_IB_DISABLE'] = '1'\n"
    )
    for end in ("", "    return 1\n"):
        assert "net-ib-disabled" in {f.rule for f in findings("t.py", text + end)}


def test_one_word_in_two_cases_is_given_once() -> None:
    text = "export NCCL_DEBUG=INFO\nexport NCCL_DEBUG=info\npython t.py\n"
    assert "set-twice" not in {f.rule for f in findings("j.sh", text)}
