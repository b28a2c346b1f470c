"""What the rules take out, and what training prints that they must leave alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncclops.bundle.redact import REDACTED, Redactor, rules

# A line, and the part of it that must not be in a ticket.
SECRETS = [
    ("WANDB_API_KEY=0123456789abcdef0123456789abcdef01234567", "0123456789abcdef"),
    ("export HF_TOKEN='hf_abcdefghijklmnopqrst'", "hf_abcdefg"),
    ("srun train.py --hub-token abc123def456 --lr 3e-4", "abc123def456"),
    ("Authorization: Bearer abcdefgh12345678", "abcdefgh12345678"),
    ("authorization=Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA"),
    ("connecting to postgres://me:hunter2@db.local/runs", "hunter2"),
    ("GET https://bucket/x?X-Amz-Signature=abcdef012345&x=1", "abcdef012345"),
    ('"password": "hunter22x"', "hunter22x"),
    ("AWS_SECRET_ACCESS_KEY=wJalrXUtnFEMI/K7MDENG", "wJalrXUtnFEMI"),
    ("login with AKIAIOSFODNN7EXAMPLE ok", "AKIAIOSFODNN7EXAMPLE"),
    ("config.api_key: abcdefg1", "abcdefg1"),
    ("token=tok-9f8e7d6c5b", "9f8e7d6c5b"),
    ("jwt eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abc-DEF_123", "eyJzdWIiOiIxMjM0In0"),
]
HARMLESS = [
    "step 00005 loss 2.31 tok/s 812,000 tokens/s=12345.6",
    "tokens: 4096, max_tokens=2048, n_token=512000",
    "tokenizer=meta-llama/Llama-3-8B",
    "pad_token: <|endoftext|>",
    "next token prediction loss 3.4",
    "NCCL INFO Bootstrap : Using eth0:10.0.0.1<0>",
    "KeyError: 'input_ids'",
    "RuntimeError: [/pytorch/third_party/gloo/transport/tcp/pair.cc:534] Connection closed",
    "key_value_cache=enabled",
]


@pytest.mark.parametrize(("line", "secret"), SECRETS)
def test_a_secret_goes_and_the_rest_of_the_line_stays(line: str, secret: str) -> None:
    redactor = Redactor()
    clean = redactor.text(line)
    assert secret not in clean
    assert REDACTED in clean
    assert clean.startswith(line[:4])
    assert redactor.taken.total() == 1


@pytest.mark.parametrize("line", HARMLESS)
def test_what_training_prints_stays(line: str) -> None:
    assert Redactor().text(line) == line


def test_a_key_over_several_lines_goes_as_a_whole() -> None:
    lines = ["before\n", "-----BEGIN RSA PRIVATE KEY-----\n", "MIIEabc/+\n", "Zm9v==\n"]
    after = ["-----END RSA PRIVATE KEY-----\n", "step 1\n"]
    clean = "".join(Redactor().lines([*lines, *after]))
    assert clean.startswith("before\n")
    assert clean.endswith("step 1\n")
    assert "MIIE" not in clean
    assert "Zm9v" not in clean


def test_a_key_that_breaks_off_does_not_take_the_log_with_it() -> None:
    lines = ["-----BEGIN PRIVATE KEY-----\n", "MIIEabc\n", "[rank0] step 1 (loss 2.0)\n"]
    assert "".join(Redactor().lines(lines)).endswith("[rank0] step 1 (loss 2.0)\n")


def test_documents_are_searched_by_field_and_by_option() -> None:
    document = {
        "argv": ["train.py", "--api-key", "abc123def", "--token=abcd1234", "--steps", "100"],
        "password": "hunter2hunter",
        "tokens": "500",
        "nested": [{"HF_TOKEN": "zzzzzzz1"}, 3, None, True],
    }
    clean = Redactor().document(document)
    assert clean == {
        "argv": ["train.py", "--api-key", REDACTED, f"--token={REDACTED}", "--steps", "100"],
        "password": REDACTED,
        "tokens": "500",
        "nested": [{"HF_TOKEN": REDACTED}, 3, None, True],
    }


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@given(json_values)
def test_any_document_keeps_its_shape(document: object) -> None:
    clean = Redactor().document(document)
    assert type(clean) is type(document)
    json.dumps(clean)


@given(st.text(), st.sampled_from([secret for secret in SECRETS if "hf_" in secret[0]]))
def test_redacting_twice_changes_nothing_more(text: str, secret: tuple[str, str]) -> None:
    once = Redactor().text(f"{text} {secret[0]}")
    assert secret[1] not in once
    assert Redactor().text(once) == once


def test_every_rule_has_a_secret_here() -> None:
    redactor = Redactor()
    for line, _ in SECRETS:
        redactor.text(line)
    redactor.text("-----BEGIN PRIVATE KEY-----abc-----END PRIVATE KEY-----")
    assert set(redactor.taken) == {rule.name for rule in rules()}
