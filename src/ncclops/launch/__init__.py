"""`ncclops launch` up to the start: every option checked, everything settled, then the agent.

options, launch_config   spellings of people, torchrun and schedulers, as values
request                  what was asked for, and what was settled
command                  prepare (no side effects: also ``--dry-run``), then start
describe_node            what this node brings to a job of several
stack                    the versions that a post-mortem asks for first
"""
