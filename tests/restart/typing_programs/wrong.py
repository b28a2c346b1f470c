"""Uses of the API that a type checker has to refuse, each line for the reasons after its E."""

from __future__ import annotations

from datetime import timedelta

from ncclops import restart as inprocess
from ncclops.restart import CallWrapper, Wrapper

Wrapper(soft_timeout=60)  # E: arg-type
Wrapper(soft_timeouts=timedelta(seconds=60))  # E: call-arg
Wrapper(timedelta(seconds=60))  # E: arg-type
Wrapper(health_check=inprocess.initialize.RetryController())  # E: arg-type
Wrapper(abort=print)  # E: arg-type
Wrapper(on_incident=lambda incident: incident.cause_of_all)  # E: attr-defined
inprocess.Wraper()  # E: attr-defined
inprocess.initialize.RetryControl()  # E: attr-defined


@Wrapper()
def train(call: CallWrapper, steps: int) -> float:
    call.pong()  # E: attr-defined
    call.set_timeouts(soft_timeout=60, hard_timeout=90)  # E: arg-type
    with call.phase("compile", soft_timeout=timedelta(minutes=30)):  # E: call-arg
        pass
    return steps / 2


train("three")  # E: arg-type
train()  # E: call-arg
train(3, 4)  # E: call-arg
half: float = train(3)  # E: assignment
print(Wrapper().soft_time)  # E: attr-defined
inprocess.exception.Escalation("again", "a way that does not exist")  # E: arg-type
