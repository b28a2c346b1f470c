"""This node's place in the job, as Slurm, Open MPI and Kubernetes give it."""
