"""The manifests of docs/examples: they fit the schemas of their APIs, and use our exit codes.

The schemas are those of the package kubeflow-trainer-api (Apache-2.0), which is generated of the
OpenAPI documents of Kubernetes, JobSet and Kubeflow Trainer, one release of each.
"""

from __future__ import annotations

import copy
import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from ncclops.exit_codes import SETS, with_changes
from tests.conftest import REPOSITORY

EXAMPLES = REPOSITORY / "docs" / "examples"
MANIFESTS = sorted(EXAMPLES.glob("*.yaml"))
# In the module ``kubeflow_trainer_api.models``.
SCHEMAS = {
    "Service": "IoK8sApiCoreV1Service",
    "Job": "IoK8sApiBatchV1Job",
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainingRuntime": "TrainerV1alpha1TrainingRuntime",
    "TrainJob": "TrainerV1alpha1TrainJob",
}
CODES = SETS["scheduler"]
# As Kubernetes words how a podFailurePolicy has ended a job, from 1.26 on.
BY_CODE = (
    "Container {container} for pod default/train-0 failed with exit code {code} matching FailJob"
    " rule at index 1"
)
BY_CONDITION = "Pod default/train-0 has condition DisruptionTarget matching FailJob rule at index 0"


def documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text()))


def problems(document: Mapping[str, Any]) -> list[str]:
    """What of ``document`` its API refuses, or does not know."""
    from kubeflow_trainer_api import models  # a second, in every process of the tests

    schema = getattr(models, SCHEMAS[document["kind"]])
    try:
        read = schema.from_dict(copy.deepcopy(document)).to_dict()
    except ValidationError as error:
        return [str(error)]
    return list(lost(document, read, document["kind"]))


def lost(written: Any, read: Any, where: str) -> Iterator[str]:
    """The fields of ``written`` that are not in ``read``: the schema does not have them."""
    if isinstance(written, dict):
        for key, value in written.items():
            if not isinstance(read, dict) or key not in read:
                yield f"{where}.{key}: there is no such field"
            else:
                yield from lost(value, read[key], f"{where}.{key}")
    elif isinstance(written, list):
        for index, (mine, theirs) in enumerate(zip(written, read, strict=True)):
            yield from lost(mine, theirs, f"{where}[{index}]")
    elif written != read:
        yield f"{where}: {written!r} was read as {read!r}"


def every(name: str, value: Any) -> Iterator[Any]:
    """All values of the key ``name``, at any depth."""
    if isinstance(value, dict):
        if name in value:
            yield value[name]
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from every(name, each)


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_each_manifest_fits_its_api(path: Path) -> None:
    assert [problem for each in documents(path) for problem in problems(each)] == []


def test_what_an_api_does_not_have_is_found() -> None:
    (job,) = (each for each in documents(EXAMPLES / "kubernetes.yaml") if each["kind"] == "Job")
    wrong = copy.deepcopy(job)
    wrong["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    assert problems(wrong) == [
        "Job.spec.podFailurePolicy.rules[0].onExitCode: there is no such field"
    ]
    wrong = copy.deepcopy(job)
    wrong["spec"]["podFailurePolicy"]["rules"][0]["action"] = "FailTheJob"
    assert "must be one of enum values ('Count', 'FailIndex', 'FailJob', 'Ignore')" in str(
        problems(wrong)
    )


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_a_job_ends_at_once_for_what_no_start_mends_and_for_nothing_else(path: Path) -> None:
    found = documents(path)
    (command,) = every("command", found)
    codes = [each.partition("=")[2] for each in command if each.startswith("--exit-codes=")]
    assert [with_changes(text, SETS["default"]) for text in codes] == [CODES]
    (policy,) = every("podFailurePolicy", found)
    final, stopped = (rule for rule in policy["rules"] if "onExitCodes" in rule)
    assert final["action"] == "FailJob"
    assert final["onExitCodes"]["values"] == [2, CODES.fix]
    names = [each["name"] for each in next(every("containers", found))]
    for rule in (final, stopped):
        assert [rule["onExitCodes"]["containerName"]] == names


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_nodes_that_end_with_a_disrupted_one_count_no_more_than_it(path: Path) -> None:
    """All nodes of a job end with 143 where one is told to end, and only one has the condition."""
    (policy,) = every("podFailurePolicy", documents(path))
    (disrupted,) = (rule for rule in policy["rules"] if "onPodConditions" in rule)
    (others,) = (
        rule
        for rule in policy["rules"]
        if 128 + signal.SIGTERM in rule.get("onExitCodes", {}).get("values", [])
    )
    assert others["action"] == disrupted["action"]


@pytest.mark.parametrize("name", ["jobset.yaml", "trainjob.yaml"])
def test_a_set_tells_the_two_ends_of_a_job_apart(name: str) -> None:
    """By the message of the job's condition, since the reason is the same."""
    (policy,) = every("failurePolicy", documents(EXAMPLES / name))

    def action(message: str) -> str:
        for rule in policy["rules"]:
            assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]
            if any(re.search(each, message) for each in rule["onJobFailureMessagePatterns"]):
                return str(rule["action"])
        return "RestartJobSet"

    for code in (2, CODES.fix):
        assert action(BY_CODE.format(container="node", code=code)) == "FailJobSet"
    assert action(BY_CONDITION) == "RestartJobSetAndIgnoreMaxRestarts"
    ended_too = BY_CODE.format(container="node", code=128 + signal.SIGTERM)
    assert action(ended_too) == "RestartJobSetAndIgnoreMaxRestarts"
    assert action(BY_CODE.format(container="node", code=20)) == "RestartJobSet"
    assert action("Job has reached the specified backoff limit") == "RestartJobSet"
