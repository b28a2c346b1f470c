"""Random launch files with defects planted in them, and with much that only looks like one."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from ncclops.env.lint.parse import Format

Pairs = list[tuple[str, str]]

# What is wrong: the rule that has to find it, and the variables that make it up.
DEFECTS: list[tuple[str, Pairs]] = [
    ("bad-value", [("NCCL_DEBUG", "LOUD")]),
    ("bad-value", [("NCCL_SHM_DISABLE", "true")]),
    ("bad-value", [("NCCL_NET_GDR_LEVEL", "pix")]),
    ("bad-value", [("NCCL_IB_TIMEOUT", "50")]),
    ("bad-value", [("NCCL_BUFFSIZE", "8M")]),
    ("bad-value", [("TORCH_NCCL_DUMP_ON_TIMEOUT", "sure")]),
    ("bad-value", [("CUDA_VISIBLE_DEVICES", "0-7")]),
    ("bad-value", [("CUBLAS_WORKSPACE_CONFIG", "4096:8")]),
    ("bad-value", [("PYTORCH_CUDA_ALLOC_CONF", "max_split_size:128")]),
    ("unknown-name", [("NCCL_IB_TIMOUT", "20")]),
    ("unknown-name", [("NCCL_SOCKET_IF_NAME", "eth0")]),
    ("unknown-name", [("NCLL_IB_HCA", "mlx5_0")]),
    ("unread", [("NCCL_TIMEOUT", "1800")]),
    ("net-ib-disabled", [("NCCL_NET", "IB"), ("NCCL_IB_DISABLE", "1")]),
    ("net-needs-plugin", [("NCCL_NET_PLUGIN", "none"), ("NCCL_NET", "gIB")]),
    ("nvls-algorithm-off", [("NCCL_ALGO", "NVLS"), ("NCCL_NVLS_ENABLE", "0")]),
    ("min-above-max-channels", [("NCCL_MIN_NCHANNELS", "32"), ("NCCL_MAX_NCHANNELS", "8")]),
    ("p2p-level-without-p2p", [("NCCL_P2P_DISABLE", "1"), ("NCCL_P2P_LEVEL", "NVL")]),
    ("gloo-interface-syntax", [("GLOO_SOCKET_IFNAME", "^lo")]),
    ("socket-threads", [("NCCL_SOCKET_NTHREADS", "16"), ("NCCL_NSOCKS_PERTHREAD", "8")]),
    ("log-file-overwritten", [("NCCL_DEBUG_FILE", "/tmp/nccl.log")]),
]
# What is right, and stands around them.
HARMLESS: Pairs = [
    ("NCCL_CROSS_NIC", "1"),
    ("NCCL_IB_GID_INDEX", "3"),
    ("OMP_NUM_THREADS", "8"),
    ("NCCL_IB_QPS_PER_CONNECTION", "4"),
    ("HF_HOME", "/data/hf"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("NCCL_IB_TC", "106"),
    ("TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC", "1800"),
]


@dataclass(frozen=True)
class LaunchFile:
    """A file, and what has to be found in it: nothing else may be an error."""

    text: str
    kind: Format
    form: str
    rule: str
    names: tuple[str, ...]


def launch_file(seed: int) -> LaunchFile:
    """The launch file of ``seed``."""
    dice = random.Random(seed)
    rule, defect = dice.choice(DEFECTS)
    pairs = [*defect, *dice.sample(HARMLESS, dice.randint(0, 4))]
    dice.shuffle(pairs)
    form = dice.choice(list(FORMS))
    kind, write = FORMS[form]
    return LaunchFile(write(pairs, dice), kind, form, rule, tuple(name for name, _ in defect))


def _quoted(value: str, dice: random.Random) -> str:
    bare = "^" not in value and dice.random() < 0.5
    return value if bare else dice.choice([f'"{value}"', f"'{value}'"])


def _decoys(dice: random.Random) -> str:
    """Lines of a script that set nothing wrong in the job."""
    half = dice.choice([pair for _, pairs in DEFECTS for pair in pairs if len(pairs) > 1])
    lines = [
        "# export NCCL_DEBUG=LOUD",
        'echo "export NCCL_IB_TIMOUT=1"',
        "cat <<USAGE\n  export NCCL_DEBUG=LOUD   # an example\nUSAGE",
        f"{half[0]}={half[1]} nccl_probe --quick",
        f"({'export'} {half[0]}={half[1]}; nccl_probe)",
        'if [ -n "$SLOW" ]; then\n  export NCCL_CROSS_NIC=0\nfi',
        'nodes=$(scontrol show hostnames "$LIST" | head -n 1)',
        'case "$MODE" in\n  a|b) echo "case (one)" ;;\n  *) : ;;\nesac',
        'for host in $nodes; do ssh "$host" "mkdir -p /tmp/x && echo it\'s done"; done',
        "ARGS=(\n  --lr 0.1  # a comment (with a bracket\n  --name 'x y'\n)",
        "trap 'echo ended' EXIT",
        "export PATH=$HOME/bin:${PATH:-/usr/bin}",
    ]
    return "\n".join(dice.sample(lines, dice.randint(0, 5)))


def _script(body: str, dice: random.Random, head: str = "#!/bin/bash\nset -euo pipefail") -> str:
    return "\n".join([head, _decoys(dice), body, ""])


_JOB = [
    "python train.py",
    "torchrun --nproc-per-node 8 train.py",
    "srun python -u t.py",
    "./run.sh",
]


def _exports(pairs: Pairs, dice: random.Random) -> str:
    lines = [f"export {name}={_quoted(value, dice)}" for name, value in pairs]
    lines.insert(dice.randint(0, len(lines)), "echo starting")
    return _script("\n".join([*lines, dice.choice(_JOB)]), dice)


def _one_export(pairs: Pairs, dice: random.Random) -> str:
    words = " \\\n  ".join(f"{name}={_quoted(value, dice)}" for name, value in pairs)
    return _script(f"export {words}\n{dice.choice(_JOB)}", dice)


def _prefixes(pairs: Pairs, dice: random.Random) -> str:
    words = " ".join(f"{name}={_quoted(value, dice)}" for name, value in pairs)
    return _script(f"{dice.choice(['', 'env ', 'exec env '])}{words} python train.py", dice)


def _options(option: str, before: str, after: str) -> Callable[[Pairs, random.Random], str]:
    def write(pairs: Pairs, dice: random.Random) -> str:
        between = dice.choice([" ", " \\\n    "])
        words = between.join(f"{option}{name}={_quoted(value, dice)}" for name, value in pairs)
        return _script(f"{before} {words} {after}", dice)

    return write


def _array(pairs: Pairs, dice: random.Random) -> str:
    first, rest = pairs[:1], pairs[1:]
    lines = [f"ENVS=(-x {name}={_quoted(value, dice)})" for name, value in first]
    lines += [f"ENVS+=( -x {name}={_quoted(value, dice)} )" for name, value in rest]
    return _script("\n".join([*lines, 'mpirun -np 8 "${ENVS[@]}" ./train']), dice)


def _string(pairs: Pairs, dice: random.Random) -> str:
    words = " ".join(f"-e {name}={value}" for name, value in pairs)
    return _script(f'OPTS="--rm {words}"\ndocker run $OPTS image', dice)


def _srun(pairs: Pairs, dice: random.Random) -> str:
    words = ",".join(f"{name}={value}" for name, value in pairs)
    return _script(f"srun --export=ALL,{words} python train.py", dice)


def _directive(pairs: Pairs, dice: random.Random) -> str:
    words = ",".join(f"{name}={value}" for name, value in pairs)
    given = dice.choice([f"#SBATCH --export=ALL,{words}", f"#PBS -v {words}",
                         f'#BSUB -env "all, {words}"'])  # fmt: skip
    return _script("srun python train.py", dice, f"#!/bin/bash\n{given}")


def _heredoc(pairs: Pairs, dice: random.Random) -> str:
    lines = "\n".join(f"export {name}={_quoted(value, dice)}" for name, value in pairs)
    begin = dice.choice(["cat <<'EOF' > /tmp/go.sh", "cat > go.sh <<EOF", "ssh node <<'EOF'"])
    return _script(f"{begin}\n{lines}\npython t.py\nEOF\nbash /tmp/go.sh", dice)


def _nested(pairs: Pairs, dice: random.Random) -> str:
    lines = dice.choice(["; ", " && "]).join(f"export {name}={value}" for name, value in pairs)
    return _script(f"srun bash -c '{lines}; python t.py'", dice)


def _function(pairs: Pairs, dice: random.Random) -> str:
    lines = "\n".join(f"  export {name}={_quoted(value, dice)}" for name, value in pairs)
    return _script(f"setup() {{\n{lines}\n}}\nsetup\npython t.py", dice)


def _branch(pairs: Pairs, dice: random.Random) -> str:
    lines = "\n".join(f"  export {name}={_quoted(value, dice)}" for name, value in pairs)
    return _script(f'if [ "$1" = gpu ]; then\n{lines}\n  python t.py\nelse\n  echo none\nfi', dice)


def _csh(pairs: Pairs, dice: random.Random) -> str:
    lines = "\n".join(f"setenv {name} {_quoted(value, dice)}" for name, value in pairs)
    return f"#!/bin/csh\n{lines}\npython t.py\n"


def _scalar(value: str, dice: random.Random) -> str:
    return dice.choice([f'"{value}"', f"'{value}'"])


def _pod(pairs: Pairs, dice: random.Random) -> str:
    rows = []
    for name, value in pairs:
        text = _scalar(value, dice)
        rows.append(
            dice.choice(
                [
                    f"    - name: {name}\n      value: {text}",
                    f"    - value: {text}\n      name: {name}",
                    f"    - {{name: {name}, value: {text}}}",
                ]
            )
        )
    half = dice.choice([pair for _, pairs in DEFECTS for pair in pairs if len(pairs) > 1])
    other = f'  - name: b\n    env:\n    - name: {half[0]}\n      value: "{half[1]}"\n'
    return (
        "apiVersion: v1\nkind: Pod\nspec:\n  containers:\n"
        f"  - name: a\n    image: x\n    env:\n{chr(10).join(rows)}\n{other}"
    )


def _compose(pairs: Pairs, dice: random.Random) -> str:
    if dice.random() < 0.5:
        rows = "\n".join(f"      {name}: {_scalar(value, dice)}" for name, value in pairs)
    else:
        rows = "\n".join(f"      - {name}={value}" for name, value in pairs)
    return f"services:\n  a:\n    image: x\n    environment:\n{rows}\n  b:\n    image: y\n"


def _block(pairs: Pairs, dice: random.Random) -> str:
    rows = "\n".join(f"      export {name}={_quoted(value, dice)}" for name, value in pairs)
    return f"spec:\n  containers:\n  - name: a\n    args:\n    - |\n{rows}\n      python t.py\n"


def _dockerfile(pairs: Pairs, dice: random.Random) -> str:
    if dice.random() < 0.5:
        rows = "\n".join(f"ENV {name}={_quoted(value, dice)}" for name, value in pairs)
    else:
        words = " \\\n# why\n    ".join(f"{name}={_quoted(value, dice)}" for name, value in pairs)
        rows = f"ENV {words}"
    return f"FROM base AS b\nENV NCCL_CROSS_NIC=1\nFROM base\nRUN make\n{rows}\nCMD ./run\n"


def _python(pairs: Pairs, dice: random.Random) -> str:
    how = dice.randint(0, 3)
    if how == 0:
        rows = "\n".join(f'os.environ["{name}"] = "{value}"' for name, value in pairs)
    elif how == 1:
        rows = "\n".join(f"os.environ.setdefault('{name}', '{value}')" for name, value in pairs)
    else:
        items = ", ".join(f'"{name}": "{value}"' for name, value in pairs)
        rows = f"os.environ.update({{{items}}})" if how == 2 else f"env_vars = {{{items}}}"
    return (
        f'"""Trains.\n\nexport NCCL_DEBUG=LOUD\n"""\nimport os\n{rows}\nprint("NCCL_DEBUG=LOUD")\n'
    )


def _plain(pairs: Pairs, _dice: random.Random) -> str:
    return "".join(f"{name}={value}\n" for name, value in pairs)


def _definition(pairs: Pairs, dice: random.Random) -> str:
    lines = "\n".join(f"    export {name}={_quoted(value, dice)}" for name, value in pairs)
    return f"Bootstrap: docker\nFrom: x\n%environment\n{lines}\n%runscript\n    python t.py\n"


FORMS: dict[str, tuple[Format, Callable[[Pairs, random.Random], str]]] = {
    "exports": ("shell", _exports),
    "one export": ("shell", _one_export),
    "prefixes": ("shell", _prefixes),
    "mpirun -x": ("shell", _options("-x ", "mpirun -np 8", "./train")),
    "docker -e": ("shell", _options("-e ", "docker run --rm", "image python t.py")),
    "docker --env=": ("shell", _options("--env=", "docker run", "image")),
    "array": ("shell", _array),
    "string": ("shell", _string),
    "srun": ("shell", _srun),
    "directive": ("shell", _directive),
    "here-document": ("shell", _heredoc),
    "nested shell": ("shell", _nested),
    "function": ("shell", _function),
    "branch": ("shell", _branch),
    "csh": ("shell", _csh),
    "pod": ("yaml", _pod),
    "compose": ("yaml", _compose),
    "block": ("yaml", _block),
    "dockerfile": ("dockerfile", _dockerfile),
    "python": ("python", _python),
    "dotenv": ("dotenv", _plain),
    "conf": ("conf", _plain),
    "apptainer": ("apptainer", _definition),
}
