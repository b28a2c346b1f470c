"""The launcher: one agent per node that spawns workers, supervises them and keeps the record.

    cli  ->  command.launch      check everything that can be wrong, before anything exists
               -> rundir         the run directory: every file name of a run, in one place
               -> warden.hold    the process the user sees; the agent is its child
                    -> agent     store server, workers, supervision, verdict
                         -> workers / store / echo / proctree

Data flows one way: options and plan -> processes -> events -> verdict.
"""
