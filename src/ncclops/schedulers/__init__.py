"""What Slurm, Open MPI and Kubernetes say about this node's place in the job."""
