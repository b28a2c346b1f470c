"""Files of other languages that are right: no error, whatever else stands in them."""

from __future__ import annotations

import pytest

from ncclops.env.lint import Circumstances, lint
from ncclops.env.lint.parse import Format, read

RIGHT: list[tuple[Format, str]] = [
    ("config", "NCCL_BUFFSIZE = 8_388_608"),
    ("config", 'NCCL_DEBUG = "INFO" # and not NCCL_IB_TIMEOUT = 99'),
    ("config", "/* NCCL_DEBUG = LOUD\n   NCCL_IB_TIMEOUT = 99 */\n"),
    ("config", '--[[ setenv("NCCL_DEBUG", "LOUD")\nNCCL_IB_TIMEOUT = 99\n]]\n'),
    ("config", 'doc = """\nNCCL_IB_TIMEOUT = 99\nNCCL_DEBUG=LOUD\n"""\n'),
    ("config", "[Unit]\nDescription=A job with NCCL_DEBUG=LOUD\n"),
    ("config", "NCCL_IB_DISABLE = tostring(1)"),
    ("config", 'NCCL_ALGO = lookup(var.env, "algo", "Ring")'),
    ("config", 'NCCL_P2P_DISABLE = if config.p2p then "0" else "1";'),
    ("config", "NCCL_ALGO = credentials('algorithm')"),
    ("config", "NCCL_IB_TC = %(tc)s"),
    ("config", "{ name: 'NCCL_ALGO', value: 'R' + rest }"),
    ("powershell", '<#\n$env:NCCL_DEBUG = "LOUD"\n#>\n'),
    ("powershell", '$text = @"\n`$env:NCCL_IB_TIMEOUT = 99\n"@\n'),
    ("batch", 'if "%1"=="" (set NCCL_CROSS_NIC=0) else (set NCCL_CROSS_NIC=1)'),
    ("batch", "echo set NCCL_DEBUG=LOUD"),
    ("make", "ifdef X\n  export NCCL_DEBUG = WARN\nendif\n"),
    ("make", "define HELP\nexport NCCL_IB_TIMEOUT=99\nendef\n"),
    ("make", 'export NCCL_DEBUG := env_var_or_default("NCCL_DEBUG", "INFO")'),
    ("shell", "export NCCL_SOCKET_IFNAME=<%= @iface %>"),
]


@pytest.mark.parametrize(("kind", "text"), RIGHT)
def test_no_error_in_what_is_right(kind: Format, text: str) -> None:
    found = lint(read(text, kind), Circumstances())
    assert [finding for finding in found if finding.level == "error"] == []


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("config", 'NCCL_DEBUG = "LOUD" # why'),
        ("config", "NCCL_IB_TIMEOUT = 99;"),
        ("config", "env = { NCCL_IB_TIMEOUT = 99 }"),
        ("config", 'run = """\nexport NCCL_IB_TIMEOUT=99\n"""\n'),
        ("config", '/* of the job */\nNCCL_DEBUG = "LOUD"\n'),
        ("powershell", '<# why #>\n$env:NCCL_DEBUG = "LOUD"\n'),
        ("batch", 'if "%1"=="" (set NCCL_CROSS_NIC=0) else (set NCCL_CROSS_NIC=7)'),
        ("make", "ifdef X\n  export NCCL_DEBUG = LOUD\nendif\n"),
        ("make", 'export NCCL_DEBUG := "LOUD"'),
    ],
)
def test_what_is_wrong_beside_it(kind: Format, text: str) -> None:
    assert "bad-value" in {finding.rule for finding in lint(read(text, kind), Circumstances())}
