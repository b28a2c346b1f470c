"""What a text means to set and does not, and the repairs of what is wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ncclops.env.lint import Circumstances, LintFinding, known_ids, lint
from ncclops.env.lint.parse import Format, read
from ncclops.env.lint.repairs import difference, repaired
from ncclops.env.lint.slips import SLIP_IDS

WHERE = Circumstances(torch="2.9.0", nccl="2.27.5")


def found(text: str, kind: Format = "shell") -> list[LintFinding]:
    return lint(read(text, kind), WHERE)


def ids(text: str, kind: Format = "shell") -> set[str]:
    return {finding.rule for finding in found(text, kind)}


@pytest.mark.parametrize(
    ("text", "rule", "line"),
    [
        ("export NCCL_DEBUG = WARN\n", "split-assignment", 1),
        ("export NCCL_DEBUG= WARN\n", "split-assignment", 1),
        ("export NCCL_DEBUG =WARN\n", "split-assignment", 1),
        ("\nNCCL_DEBUG = WARN\n", "split-assignment", 2),
        ("export $NCCL_DEBUG=WARN\n", "split-assignment", 1),
        ("${NCCL_DEBUG}=WARN\n", "split-assignment", 1),
        ("mpirun -np 2\n  -x NCCL_DEBUG=WARN ./t\n", "cut-off-command", 2),
        ("mpirun -np 2 \\\n# why\n  -x NCCL_DEBUG=WARN ./t\n", "cut-off-command", 3),
        ("#SBATCH --export=NCCL_DEBUG=WARN\nsrun t\n", "only-these-exported", 1),
        ("srun --export=NCCL_DEBUG=WARN t\n", "only-these-exported", 1),
        ("#SBATCH --export=ALL,NCCL_DEBUG=WARN\n#SBATCH --export=ALL,A=1\n",
         "export-overwritten", 1),
        ("sbatch --export=NCCL_DEBUG=WARN job.sh\n", "only-these-exported", 1),
        ("export UCX_TLS=self, tcp\n", "split-assignment", 1),
        ("export NCCL_SOCKET_IFNAME=eth0,eth1, eth2\n", "split-assignment", 1),
        ("\nexport NCCL_IB_HCA=mlx5_0:1 mlx5_1:1\n", "split-assignment", 2),
        ("export NCCL_IB_HCA=mlx5_0 ,mlx5_1\n", "split-assignment", 1),
        ("export NCCL_IB_HCA=mlx5_0 , mlx5_1\n", "split-assignment", 1),
        ("SINGULARITYENV_NCCL_DEBUG=WARN\nsingularity exec i.sif t\n", "not-exported", 1),
        ("torchrun t.py\nexport NCCL_DEBUG=WARN\n", "set-after-job", 2),
        ("export NCCL_ALGO=Tree\nexport NCCL_ALGO=Ring\npython t.py\n", "set-twice", 1),
        ("export APPTAINERENV_NCCL_ALGO=Tree\nmkdir x\nexport APPTAINERENV_NCCL_ALGO=Ring\n",
         "set-twice", 1),
        ("docker run -e NCCL_SOCKET_IFNAME=ens5 \\\n -e NCCL_SOCKET_IFNAME=^lo i t\n",
         "set-twice", 1),
        ("export NCCL_IB_TC=106\nmpirun -np 16 --hostfile hosts t -f 2\n", "not-passed-on", 2),
        ("export NCCL_IB_TC=106\nmpirun --mca btl tcp -H a:8,b:8 -x PATH t\n",
         "not-passed-on", 2),
        ("NCCL_IB_TC=106 /opt/ompi/bin/mpirun -H a:8,b:8 -x PATH t\n", "not-passed-on", 1),
        ("export NCCL_IB_HCA=mx5_0,mlx5_2\npython t.py\n", "unlikely-adapter", 1),
        ("export UCX_NET_DEVICES=mxl5_0:1\npython t.py\n", "unlikely-adapter", 1),
        ("export NCCL_IB_HCA=^bntx_re0\npython t.py\n", "unlikely-adapter", 1),
        ("export NCCL_IB_HCA=eth0\npython t.py\n", "unlikely-adapter", 1),
        ("export NCCL_IB_HCA=mlx5_0,ipogif0\npython t.py\n", "unlikely-adapter", 1),
        ("export NCCL_IB_HCA=mlx5_0:1,mlx5_1:1\npython t.py\n", "adapter-prefix", 1),
        ("export LD_LIBRARY_PATH=$LD_LIBRARY_PATH:/a:\npython t.py\n", "empty-path-entry", 1),
        ("LD_LIBRARY_PATH=/a::/b python t.py\n", "empty-path-entry", 1),
        ("export NCLL_DEBUG=WARN\npython t.py\n", "unknown-name", 1),
        ("export nccl_debug=WARN\npython t.py\n", "unknown-name", 1),
    ],
)  # fmt: skip
def test_what_is_meant_and_does_not_come_about(text: str, rule: str, line: int) -> None:
    assert [f.line for f in found(text) if f.rule == rule] == [line]


@pytest.mark.parametrize(
    "text",
    [
        "export NCCL_DEBUG=WARN\npython t.py\n",
        "export NCCL_DEBUG=\npython t.py\n",
        "export NCCL_IB_HCA= # none\npython t.py\n",
        'if [ "$NCCL_DEBUG" = WARN ]; then python t.py; fi\n',
        "[[ $NCCL_DEBUG = WARN ]] && python t.py\n",
        "mpirun -np 2 \\\n  -x NCCL_DEBUG=WARN ./t\n",
        "#SBATCH --export=ALL,NCCL_DEBUG=WARN\nsrun t\n",
        "#SBATCH --export=NONE\nsrun --export=ALL t\n",
        "torchrun t.py\nexport NCCL_DEBUG=WARN\ntorchrun u.py\n",
        "python prepare.py\nexport NCCL_DEBUG=WARN\n./train\n",
        "export UCX_TLS=self NCCL_DEBUG\npython t.py\n",
        "export NCCL_IB_HCA=mlx5_0 # mlx5_1\npython t.py\n",
        'export NCCL_IB_HCA="mlx5_0," MORE\npython t.py\n',
        "APPTAINERENV_NCCL_DEBUG=WARN\nexport APPTAINERENV_NCCL_DEBUG\napptainer exec i.sif t\n",
        "APPTAINERENV_NCCL_DEBUG=WARN apptainer exec i.sif t\n",
        "set -a\nAPPTAINERENV_NCCL_DEBUG=WARN\napptainer exec i.sif t\n",
        "sbatch --export=ALL,NCCL_DEBUG=WARN job.sh\nsbatch --export=NONE job.sh\n",
        "export NCCL_PLUGIN_HOME=/opt/x NCCL_OWN_DIR=/y\npython t.py\n",
        "# export NCCL_DEBUG = WARN\necho 'export NCCL_DEBUG = WARN'\n",
        "export NCCL_ALGO=Tree\npython t.py\nexport NCCL_ALGO=Ring\npython t.py\n",
        "export NCCL_ALGO=Ring\nif x; then\nexport NCCL_ALGO=Tree\nfi\npython t.py\n",
        "export NCCL_ALGO=Ring\necho $NCCL_ALGO\nexport NCCL_ALGO=Tree\npython t.py\n",
        "export NCCL_ALGO=Ring\nunset NCCL_ALGO\nexport NCCL_ALGO=Tree\npython t.py\n",
        "(export NCCL_ALGO=Ring; python t.py)\nexport NCCL_ALGO=Tree\npython t.py\n",
        "export NCCL_IB_TC=106\nmpirun -np 8 t\n",
        "export NCCL_IB_TC=106\nmpirun -H a:8,b:8 -x NCCL_IB_TC t\n",
        "export NCCL_IB_TC=106\nmpirun -hosts a,b -ppn 8 t\n",
        "export NCCL_IB_TC=106\nmpirun -H a:8,b:8 -x 'NCCL_*' t\n",
        "export NCCL_IB_TC=106\nmpirun --mca btl tcp $OPTIONS --hostfile h t\n",
        "export NCCL_IB_TC=106\nmpirun --hostfile h --mca mca_base_env_list NCCL_IB_TC t\n",
        "#SBATCH -n 8\nexport NCCL_IB_TC=106\nmpirun --hostfile h t\n",
        "export NCCL_IB_HCA=mlx5_bond_0,mlx,mlx4_0,bnxt_re1,rocep1s0,rdma0,ib0,efa_0\npython t\n",
        "export RCCL_X=1 HCCL_DEBUG=1 nccl_dir=/x\npython t.py\n",
        "export NCCL_IB_HCA==mlx5_1,mlx5_10 UCX_NET_DEVICES=eth0\npython t.py\n",
        "export LD_LIBRARY_PATH=/a${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}\npython t.py\n",
        "export LD_LIBRARY_PATH=/a:$LD_LIBRARY_PATH APATH=/b:\npython t.py\n",
        "#PBS -l select=2\nexport NCCL_IB_DISABLE=1 FI_CXI_DISABLE_HOST_REGISTER=1\npython t.py\n",
        "export NCCL_DEBUG=WARN\n. other.sh\n",
        "export CUDA_VISIBLE_DEVICES=0,1 CUBLAS_WORKSPACE_CONFIG=:4096:8\npython t.py\n",
        "export NCCL_IB_HCA=mlx5_0,mlx5_2 NCCL_SOCKET_IFNAME=^lo,docker0\npython t.py\n",
        "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,some_new_key:1\npython t.py\n",
    ],
)
def test_what_is_right_or_cannot_be_known(text: str) -> None:
    assert ids(text) <= {"debug-level-not-effective"}


@pytest.mark.parametrize(
    ("line", "rules"),
    [
        ("ENV LD_LIBRARY_PATH=/a:\\$LD_LIBRARY_PATH", {"unexpanded-path"}),
        ('ENV A=1 LD_LIBRARY_PATH="\\${LD_LIBRARY_PATH}:/a"', {"unexpanded-path"}),
        ("ENV LD_LIBRARY_PATH=/a:/b:", {"empty-path-entry"}),
        ("ENV LD_LIBRARY_PATH=/a:$LD_LIBRARY_PATH PATH=${PATH}:/b", set()),
        ("ENV LD_LIBRARY_PATH=/a:\\$ORIGIN A_PATH=/b:\\$A_PATHS", set()),
        ('RUN echo "export LD_LIBRARY_PATH=/a:\\$LD_LIBRARY_PATH" >> ~/.bashrc', set()),
    ],
)
def test_paths_of_an_image(line: str, rules: set[str]) -> None:
    assert ids(f"FROM x\n{line}\n", "dockerfile") == rules


MPI_JOB = """
kind: MPIJob
spec:
  mpiReplicaSpecs:
    Launcher:
      template:
        spec:
          containers:
          - env:
            - {name: NCCL_IB_TC, value: "106"}
            command: [bash, -c, "mpirun --allow-run-as-root -np 16 GIVEN ./t"]
    Worker:
      template:
        spec:
          containers:
          - image: x
"""


@pytest.mark.parametrize(
    ("given", "lines"),
    [
        ("-x LD_LIBRARY_PATH", [10]),
        ("-x NCCL_IB_TC", []),
        ("-x 'NCCL_*'", []),
        ("$OPTIONS -x $NAMES", []),
    ],
)
def test_what_a_launcher_alone_is_given(given: str, lines: list[int]) -> None:
    """The ranks of an MPIJob run in its workers, which mpirun starts without its environment."""
    text = MPI_JOB.replace("GIVEN", given)
    assert [f.line for f in found(text, "yaml") if f.rule == "not-passed-on"] == lines
    theirs = text.replace("- image: x", "- env: [{name: NCCL_IB_TC, value: '106'}]")
    assert "not-passed-on" not in ids(theirs, "yaml")


def test_paths_of_a_container() -> None:
    """Kubernetes leaves $NAME as it is; what a script writes is filled in before."""
    entries = "- {name: LD_LIBRARY_PATH, value: '/a:VALUE'}\n"
    text = f"kind: Pod\nspec:\n  containers:\n  - env:\n    {entries}"
    lost = text.replace("VALUE", "$LD_LIBRARY_PATH")
    assert [(f.rule, f.level, f.line) for f in found(lost, "yaml")] == [
        ("unexpanded-path", "note", 5)
    ]
    assert "unexpanded-path" in ids(text.replace("VALUE", "${LD_LIBRARY_PATH}:/b"), "yaml")
    for value in ("$(LD_LIBRARY_PATH)", "$LD_LIBRARY_PATHS", "/b"):
        assert ids(text.replace("VALUE", value), "yaml") == set()
    assert ids(f"cat <<EOF > pod.yaml\n{lost}EOF\nkubectl apply -f pod.yaml\n") == set()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("CUDA_VISIBLE_DEVICES", "0-7"),
        ("CUDA_VISIBLE_DEVICES", "0 1 2"),
        ("CUDA_VISIBLE_DEVICES", "all"),
        ("NCCL_NET", "IB:mlx5_0,mlx5_1"),
        ("CUBLAS_WORKSPACE_CONFIG", "4096:8"),
        ("NCCL_IB_HCA", "mlx5_0 mlx5_1"),
        ("NCCL_SOCKET_IFNAME", "eth0 eth1"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size:128"),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segment:True"),
    ],
)
def test_values_that_their_readers_misread(name: str, value: str) -> None:
    assert "bad-value" in ids(f'export {name}="{value}"\npython t.py\n')


_ROLES = """\
kind: PyTorchJob
spec:
  pytorchReplicaSpecs:
    Master:
      template:
        spec:
          containers:
          - name: pytorch
            env:
            - {{name: NCCL_IB_DISABLE, value: "1"}}
            - {{name: MASTER_ADDR, value: localhost}}
    {role}:
      template:
        spec:
          containers:
          - name: pytorch
            env: [{env}]
{more}"""


@pytest.mark.parametrize(
    ("role", "env", "more", "told"),
    [
        ("Worker", "", "", True),
        ("Worker", '{name: NCCL_IB_DISABLE, value: "0"}', "", True),
        ("Worker", '{name: NCCL_IB_DISABLE, value: "1"}', "", False),
        ("Worker", "{name: NCCL_IB_DISABLE, valueFrom: {}}", "", False),
        ("Worker", "", "            envFrom: [{configMapRef: {name: nccl}}]\n", False),
        ("Launcher", "", "", False),
    ],
)
def test_what_one_role_of_a_job_has_alone(role: str, env: str, more: str, told: bool) -> None:
    findings = found(_ROLES.format(role=role, env=env, more=more), "yaml")
    assert [(f.names, f.line) for f in findings if f.rule == "roles-differ"] == (
        [(("NCCL_IB_DISABLE",), 10)] if told else []
    )


def test_suppressions_can_name_each_of_them() -> None:
    assert set(SLIP_IDS) <= set(known_ids())


def test_a_version_that_is_only_assumed_makes_no_error() -> None:
    settings = read("export TORCH_NCCL_BLOCKING_WAIT=1\npython t.py\n", "shell")
    assumed = replace(WHERE, assumed=frozenset({"torch"}))
    levels = [
        [f.level for f in lint(settings, where) if f.rule == "blocking-wait-without-timeout"]
        for where in (WHERE, assumed)
    ]
    assert levels == [["error"], ["warning"]]


def test_under_rocm_a_near_match_is_told_and_other_names_are_not() -> None:
    text = "export HSA_X=1 NCCL_IB_TIMOUT=22 NCCL_RCCL_OWN=1\npython t.py\n"
    where = Circumstances(uses=frozenset({"rocm"}))
    assert [f.names for f in lint(read(text, "shell"), where)] == [("NCCL_IB_TIMOUT",)]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("export NCCL_IB_TIMOUT=22\n", "export NCCL_IB_TIMEOUT=22\n"),
        ("export nccl_ib_timeout=22\n", "export NCCL_IB_TIMEOUT=22\n"),
        ("export NCLL_NTHREADS=256\n", "export NCCL_NTHREADS=256\n"),
        ("export NCCL_NTHREADS = 256\n", "export NCCL_NTHREADS=256\n"),
        ("export NCCL_NTHREADS= 256\n", "export NCCL_NTHREADS=256\n"),
        ("export $NCCL_NTHREADS=256\n", "export NCCL_NTHREADS=256\n"),
        ("NCCL_SHM_DISABLE=true python t.py\n", "NCCL_SHM_DISABLE=1 python t.py\n"),
        ("export NCCL_NET_GDR_LEVEL=pix\n", "export NCCL_NET_GDR_LEVEL=PIX\n"),
        ("export CUBLAS_WORKSPACE_CONFIG=16:8\n", "export CUBLAS_WORKSPACE_CONFIG=:16:8\n"),
        ("export UCX_TLS=self, tcp\n", "export UCX_TLS=self,tcp\n"),
        ('export NCCL_IB_HCA="mlx5_0 mlx5_1"\n', 'export NCCL_IB_HCA="mlx5_0,mlx5_1"\n'),
    ],
)
def test_safe_repairs(before: str, after: str) -> None:
    text = f"set -e\n{before}python t.py\n"
    assert repaired(text, found) == f"set -e\n{after}python t.py\n"
    assert f"-{before}+{after}" in difference(text, repaired(text, found), "t.sh")


@pytest.mark.parametrize(
    "text",
    [
        "export NCCL_DEBUG=INFO,TRACE\n",  # which of them is not known
        "export NCCL_IB_TIMOUT=1; echo NCCL_IB_TIMOUT\n",  # which of the two is not known
        "export NCCL_SHM_TRUE=1 NCCL_NET=IB NCCL_IB_DISABLE=1\n",
        "export NCCL_NTHREADS=256\n",
    ],
)
def test_what_is_not_certain_is_left_alone(text: str) -> None:
    assert repaired(text, found) == text


def test_a_repair_in_yaml_stays_in_its_line() -> None:
    text = 'env:\n- name: NCCL_IB_TIMOUT\n  value: "22"\n- name: NCCL_P2P_DISABLE\n  value: "no"\n'
    mended = repaired(text, lambda text: found(text, "yaml"))
    assert mended == text.replace('"no"', '"0"')


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("FI_CXI_RDV_PROTO", True),
        ("FI_EFA_USE_DEVICE_RDMAS", True),
        ("FI_EFA_USE_DEVICE_RDMB", True),
        ("FI_VERBS_TX_SIZF", False),  # other providers have more names than the catalogue
        ("FI_MY_OWN", False),
    ],
)
def test_a_letter_too_many_or_too_few_in_a_name_of_libfabric(name: str, told: bool) -> None:
    assert ("unknown-name" in ids(f"export {name}=1\npython t.py\n")) is told


@pytest.mark.parametrize(
    "command",
    ['[ -f "$X" ] || exit 3', 'if [[ "$X" == a ]]; then Y=b; fi', 'cd "$X"', 'mkdir -p "$X"'],
)
def test_tests_and_files_are_no_job_that_exports_could_be_behind(command: str) -> None:
    assert ids(f"{command}\nexport NCCL_DEBUG=WARN\n") == set()


def test_the_line_of_a_variable_in_a_quoted_command_that_goes_on() -> None:
    text = 'srun bash -c "\n  export A=1 \\\n    NCLL_DEBUG=WARN \\\n    B=2\n  python t.py"\n'
    assert [f.line for f in found(text) if f.rule == "unknown-name"] == [3]


def test_what_a_script_writes_for_workers_of_ray_is_read() -> None:
    text = 'cat > "$D/runtime_env.json" <<EOF\n{"env_vars":\n{"NCLL_DEBUG": "1", "A": "$B"}}\nEOF\n'
    assert [f.line for f in found(text) if f.rule == "unknown-name"] == [3]
    assert ids(text.replace("runtime_env", "model")) == set()


def test_python_that_cannot_be_read_is_told_of() -> None:
    text = 'import os\nos.environ["NCCL_DEBUG"] = "LOUD"\nprint "x"\n'
    noted = {finding.rule: finding for finding in found(text, "python")}
    assert noted["unread-python"].line == 3
    assert noted["unread-python"].level == "note"
    assert noted.keys() > {"unread-python"}, "what stands in plain lines is found all the same"
    # What a script writes has names in it that are filled in first.
    assert "unread-python" not in ids("cat > t.py <<EOF\n$SETUP\nprint x y\nEOF\n")
    assert "unread-python" not in ids("\0", "shell")
    assert "unread-python" in ids("\0", "python")


def test_a_finding_has_bounds_however_long_a_value_is() -> None:
    (finding,) = (f for f in found(f"NCCL_DEBUG={'x' * 100_000}\n", "dotenv") if f.names)
    assert len(finding.message) == 2000
    assert finding.message.endswith("…")
