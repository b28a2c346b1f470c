"""Reading assignments out of scripts and files, without running anything."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncclops.env.lint import Setting
from ncclops.env.lint.jobs import features, node_count
from ncclops.env.lint.parse import Format, guess_format, parse
from ncclops.env.lint.shell import _Reader
from ncclops.env.lint.syntax import Block


def shell(text: str) -> dict[str, str | None]:
    return {setting.name: setting.value for setting in parse(text, "shell") if setting.exported}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("export A=1 B='two words' C=\"x\"", {"A": "1", "B": "two words", "C": "x"}),
        ("A=1\nB=2\nexport A", {"A": "1"}),
        ("A=1; export A && echo", {"A": "1"}),
        ("set -a\nA=1\n", {"A": "1"}),
        ("A=1 B=2 python train.py", {"A": "1", "B": "2"}),
        ("env A=1 python train.py x=3", {"A": "1"}),
        ("mpirun -np 8 -x A=1 -x B ./t", {"A": "1"}),
        ("docker run -e A=1 --env B=2 --env=C=3 image", {"A": "1", "B": "2", "C": "3"}),
        ("srun --export=ALL,A=1,B=x ./t", {"A": "1", "B": "x"}),
        ("#SBATCH --export=ALL,A=1\n", {"A": "1"}),
        ("declare -x A=1", {"A": "1"}),
        ("setenv A 1", {"A": "1"}),
        ("export A=1 # B=2", {"A": "1"}),
        ("# export A=1", {}),
        ("export A=a#b", {"A": "a#b"}),
        ("export A=${X:-5} B=${X-y}", {"A": "5", "B": "y"}),
        ('export A=${A:="INFO"}', {"A": "INFO"}),
        ("export A=$X B=$(date) C=`date` D=a$X", {"A": None, "B": None, "C": None, "D": None}),
        ("export A='$X'", {"A": None}),
        ("export A=\\$X", {"A": None}),
        ("bash -c 'export A=1; B=2 python t.py'", {"A": "1", "B": "2"}),
        ('ssh node "A=1 ./t"', {"A": "1"}),
        ('echo "A=1"', {}),
        ("args=(\n  -x A=1\n)", {"A": "1"}),
        ("export A=$((60 * 60))", {"A": None}),
        ("export A=$((1 + (2 * (3 + 4)))) B=1", {"A": None, "B": "1"}),
        ("export A=${X-$( B=2", {"A": None, "B": "2"}),
        ("export A=1\nunset A\nexport A=2", {"A": "2"}),
        (': "${A:=INFO}"; export A', {"A": "INFO"}),
        ('export A="$X"', {"A": None}),
        ("export A=1 \\\n  B=2", {"A": "1", "B": "2"}),
        ("if true; then export A=1; fi", {"A": "1"}),
        ("export A=1\nunset A", {}),
        ("export A=", {"A": ""}),
        ("export A=mlx5_0,mlx5_1", {"A": "mlx5_0,mlx5_1"}),
        ("export A=it\\'s", {"A": "it's"}),
        ("python train.py --lr=0.1 model.size=7", {}),
        ("export A=1|cat", {"A": "1"}),
        ("docker run -e A=1 <your image>\nexport B=2", {"A": "1", "B": "2"}),
        ("submit <spec.yml> \\\n  --env NCCL_DEBUG=INFO", {"NCCL_DEBUG": "INFO"}),
        ("A=1 sort <in.txt >out.txt", {"A": "1"}),
        ("echo 'unclosed", {}),
        ("bash -c '\nexport A=1\nexport B=2'", {"A": "1", "B": "2"}),
    ],
)
def test_shell(text: str, expected: dict[str, str | None]) -> None:
    assert shell(text) == expected


def test_an_assignment_that_is_not_exported_is_distinguished() -> None:
    assert parse("NCCL_DEBUG=INFO\n", "shell") == [Setting("NCCL_DEBUG", "INFO", 1, False)]


@pytest.mark.parametrize(
    ("text", "expanded"),
    [
        ("export A=1\nrun --size $A", True),
        ("export A=1\necho $A > file", True),
        ("export A=1\necho $A | run", True),
        ("export A=1\nrun $(echo $A)", True),
        ("export A=1\nrun ${A:+--x}", True),
        ("export A=${A:-1}", False),
        ('export A="${A:-1}"', False),
        ("export A=1", False),
        ("export A=1\necho $A", False),
        ("export A=1\nmpirun -x A=$A run", False),
    ],
)
def test_what_a_script_makes_use_of_itself(text: str, expanded: bool) -> None:
    assert {setting.expanded for setting in parse(text, "shell")} == {expanded}


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("export A=1\necho $A", True),
        ('export A=1\necho "a: $A" >&2; run', True),
        ("export A=1\necho $A && run $A", False),
        ("export A=1\nrun --size $A", False),
        ("export A=1", False),
    ],
)
def test_what_a_script_only_prints(text: str, printed: bool) -> None:
    (setting,) = parse(text, "shell")
    assert setting.printed is printed


def test_lines_are_those_of_the_variable_itself() -> None:
    found = parse("\n\nexport A=1 \\\n B=2\nexport C=3", "shell")
    assert [(setting.name, setting.line) for setting in found] == [("A", 3), ("B", 4), ("C", 5)]


IN_LONG_STRINGS = [
    (
        "shell",
        'OPTIONS="--env X=1 \\\n    --env A=1 \\\n    --env B="" \\\n --env C=3"\nrun $OPTIONS',
    ),
    ("shell", 'CMD="\\\n mpirun -x X=1 \\\n -x A=1 \\\n -x B=2 -x C=3 ./t"\neval $CMD'),
    ("shell", 'sbatch --wrap="srun \\\n  --export=ALL,A=1 \\\n a; B=2 C=3 b"'),
    (
        "python",
        "c = f\"apptainer exec --env NCCL_X=1 \\\n --env A='1' \\\n --env B='{x}' --env C=3 {y}\"",
    ),
    ("python", "c = ('mpirun -x NCCL_X=1 '\n     f'-x A=1 -x Z={z} '\n     '-x B=2 -x C=3 ./t')"),
    ("python", 'c = """mpirun -x NCCL_X=1 \n  -x A=1 \\\n  -x B=2 -x C=3 ./t"""'),
]


@pytest.mark.parametrize(("kind", "text"), IN_LONG_STRINGS)
def test_lines_in_a_string_over_several_lines_are_those_of_the_variable(
    kind: Format, text: str
) -> None:
    lines = {setting.name: setting.line for setting in parse(text, kind)}
    rows = text.splitlines()
    for name in "ABC":
        assert f"{name}=" in rows[lines[name] - 1]


def test_a_string_over_several_lines_is_the_same_to_a_shell() -> None:
    text = "c = ('mpirun -x NCCL_X=\"a '\n     'b\" -x NCCL_Y=c'\n     'd ./t')"
    found = {setting.name: setting.value for setting in parse(text, "python")}
    assert found == {"NCCL_X": "a b", "NCCL_Y": "cd"}


@settings(max_examples=200)
@given(st.text(st.sampled_from("ABx=1 '\"\\$`{}()[]<>|&;#!\n\texportunsv-:,/*?"), max_size=60))
def test_no_text_is_too_broken_to_read(text: str) -> None:
    for kind in get_args(Format):
        for setting in parse(text, kind):
            assert isinstance(setting, Setting)


def test_dotenv() -> None:
    text = "# c\nA=1\nexport B='two'\nC = \"x y\"  \nD=z # comment\nE=$X\nnot a line\n"
    text += "F=\"INFO\" # loud\nG='a # b'\n"
    found = {setting.name: setting.value for setting in parse(text, "dotenv")}
    assert found == {"A": "1", "B": "two", "C": "x y", "D": "z", "E": None} | {
        "F": "INFO",
        "G": "a # b",
    }


MANIFEST = """\
spec:
  containers:
  - name: train
    image: x
    env:
    - name: NCCL_DEBUG
      value: INFO  # loud
    - name: NCCL_NET
      valueFrom: {fieldRef: x}
    - {name: NCCL_ALGO, value: "Ring"}
    - name: NCCL_PROTO
      value: "{{ .Values.proto }}"
    command: ["bash", "-c", "export NCCL_IB_DISABLE=1; python t.py"]
  environment:
    NCCL_SOCKET_IFNAME: eth0
    - NCCL_NTHREADS=256
    - "NCCL_BUFFSIZE=1"
  args: |
    mpirun -x NCCL_TIMEOUT=3 ./t
"""


def test_yaml_manifests() -> None:
    found = {setting.name: (setting.value, setting.line) for setting in parse(MANIFEST, "yaml")}
    assert found == {
        "NCCL_DEBUG": ("INFO", 7),
        "NCCL_ALGO": ("Ring", 10),
        "NCCL_PROTO": (None, 12),
        "NCCL_IB_DISABLE": ("1", 13),
        "NCCL_SOCKET_IFNAME": ("eth0", 15),
        "NCCL_NTHREADS": ("256", 16),
        "NCCL_BUFFSIZE": ("1", 17),
        "NCCL_TIMEOUT": ("3", 19),
    }


def test_dockerfiles() -> None:
    text = "FROM x\nENV A=1 B='two words' \\\n    C=$X\nENV NCCL_DEBUG INFO\nRUN A=2 make\n"
    found = [(setting.name, setting.value, setting.line) for setting in parse(text, "dockerfile")]
    assert found == [
        ("A", "1", 2),
        ("B", "two words", 2),
        ("C", None, 3),
        ("NCCL_DEBUG", "INFO", 4),
        ("A", "2", 5),
    ]


def test_nccl_configuration_files_are_taken_literally() -> None:
    found = parse('A=1\n B=2\nexport C=3\n#D=4\nE="x" \n', "conf")
    assert [(setting.name, setting.value) for setting in found] == [
        ("A", "1"),
        (" B", "2"),
        ("export C", "3"),
        ("E", '"x" '),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (".env", "dotenv"),
        ("prod.env", "dotenv"),
        ("nccl.conf", "conf"),
        (".nccl.conf", "conf"),
        ("job.sbatch", "shell"),
        ("run", "shell"),
        ("job.yaml", "yaml"),
        ("Dockerfile.train", "dockerfile"),
    ],
)
def test_the_format_is_guessed_by_name(name: str, kind: str) -> None:
    assert guess_format(Path(name)) == kind


def test_what_a_script_shows_about_its_job() -> None:
    assert node_count("#SBATCH --nodes=4\n") == "many"
    assert node_count("#SBATCH -N 1\n") == "one"
    assert node_count("torchrun --nnodes 2 t.py") == "many"
    assert node_count("deepspeed --num_nodes=4 t.py") == "many"
    assert node_count("accelerate launch --num_machines 1 t.py") == "one"
    assert node_count("#BSUB -nnodes 4\n") == "many"
    assert node_count("torchrun --nnodes $N t.py") is None
    assert node_count(f"torchrun --nnodes {'9' * 5000} t.py") is None
    assert features("torchrun t.py --use-torch-fsdp2") == {"torchrun", "fsdp2"}
    assert features("# torchrun would be\npython t.py") == frozenset()
    assert features("t.py --tensor-model-parallel-size 4") == {"tensor-parallel"}
    assert features("t.py --tensor-model-parallel-size 1") == frozenset()


@pytest.mark.parametrize(
    "body", ["for i in a; do", "while :; do", "if :; then", "(", "case a in b)"]
)
def test_a_function_has_any_compound_command_as_its_body_and_is_read_once(body: str) -> None:
    """Read twice at each level, these would take longer than anybody waits."""
    text = "export NCCL_DEBUG=WARN\n" + f"f() {body}\n" * 60
    assert [setting.name for setting in parse(text, "shell")] == ["NCCL_DEBUG"]


def test_a_function_within_a_function_that_nothing_calls_is_read() -> None:
    text = "f() {\n  g() (\n    export NCCL_DEBUG=WARN\n  )\n}\n"
    assert [(setting.name, setting.line) for setting in parse(text, "shell")] == [("NCCL_DEBUG", 3)]


def test_quoted_commands_do_not_read_the_functions_around_them_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else the time would be that of functions times commands."""
    read: list[Block] = []
    alone = _Reader._alone

    def counted(reader: _Reader, body: Block) -> None:
        read.append(body)
        alone(reader, body)

    monkeypatch.setattr(_Reader, "_alone", counted)
    functions = "".join(f"f{i}() {{\n  export NCCL_DEBUG=WARN\n}}\n" for i in range(20))
    parse(functions + 'bash -c "export A=1; python t.py"\n' * 20, "shell")
    assert len(read) == 20


@pytest.mark.parametrize("mark", ["__IB_OFF__", "%IB_OFF%", "@IB_OFF@", "[[ off ]]", "mlx5___N__"])
def test_a_mark_that_is_filled_in_later_is_no_value(mark: str) -> None:
    text = f'env:\n- {{name: NCCL_IB_DISABLE, value: "{mark}"}}\n'
    assert [setting.value for setting in parse(text, "yaml")] == [None]
