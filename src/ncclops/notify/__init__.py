"""Tells people and programs what happens to a run: `[notify]` of a profile.

rules       which events of a run are worth a notification; pure
messages    a notification as Slack, PagerDuty, Kubeflow or a program takes it; pure
targets     where they go: secrets looked up once, when the job is settled
sending     one message to one target, within a deadline
trying      one message to each channel, without a run
notifier    the threads: events in, notifications out, what was dropped counted
"""
