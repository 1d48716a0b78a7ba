#!/bin/bash
# Two machines with four GPUs each: sbatch recipes/movielens_dlrm/slurm.sh, from the repository root.
# Not yet run on a GPU cluster; partition, account and modules are yours to add.
#SBATCH --job-name=movielens_dlrm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --signal=USR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -euo pipefail

# Compute nodes often cannot download: fetch the data here, once, where the job is submitted from a shared disk.
# With data of your own, delete this line and add --data.init_args.data_dir=<folder> to the srun line.
test -d data/movielens-100k || .venv/bin/python -c \
    "from recipes.movielens_dlrm.data import MovieLensDataModule; MovieLensDataModule().prepare_data()"

# srun starts one process per GPU; how many there are is Slurm's to say. 90 seconds before the time is over they save a
# checkpoint, the job is requeued, and goes on from there.
srun --kill-on-bad-exit=1 .venv/bin/lightning-distrec fit --config recipes/movielens_dlrm/gpu.yaml
