#!/bin/bash
# Trains on two nodes with four GPUs each. Run from the repository root: sbatch recipes/movielens_dlrm/slurm.sh
# Not yet tested on a GPU cluster. Add your partition, account and modules.
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

# Download the data once, on the shared disk that the job is submitted from: compute nodes often have no internet.
# To use your own data, delete this line and add --data.init_args.data_dir=<folder> to the srun line.
test -d data/movielens-100k || .venv/bin/python -c \
    "from recipes.movielens_dlrm.data import MovieLensDataModule; MovieLensDataModule().prepare_data()"

# srun starts one process per GPU. 90 seconds before the time limit they save a checkpoint; Slurm requeues the job, which
# resumes from the checkpoint.
srun --kill-on-bad-exit=1 .venv/bin/lightning-distrec fit --config recipes/movielens_dlrm/gpu.yaml
