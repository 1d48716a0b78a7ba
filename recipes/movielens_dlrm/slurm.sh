#!/bin/bash
# Two machines with four GPUs each: sbatch recipes/movielens_dlrm/slurm.sh, from the repository root.
# Not yet run on a GPU cluster; partition, account and modules are yours to add.
#SBATCH --job-name=movielens_dlrm
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --output=%x-%j.out

set -euo pipefail

# Compute nodes often cannot download: fetch the data here, once, where the job is submitted from a shared disk.
# With data of your own, delete this line and add --data.init_args.data_dir=<folder> to the srun line.
test -d data/movielens-100k || .venv/bin/python -c \
    "from recipes.movielens_dlrm.data import MovieLensDataModule; MovieLensDataModule().prepare_data()"

# srun starts one process per GPU; num_nodes and devices repeat what was asked of Slurm above.
srun --kill-on-bad-exit=1 .venv/bin/lightning-distrec fit --config recipes/movielens_dlrm/gpu.yaml \
    --trainer.num_nodes="$SLURM_JOB_NUM_NODES" \
    --trainer.devices="$SLURM_NTASKS_PER_NODE"
