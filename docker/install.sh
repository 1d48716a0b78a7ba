#!/usr/bin/env bash
# Installs the package of this folder with pip, and checks it: the Dockerfile's steps, which need no Docker.
#   docker/install.sh [install] [check]     both, where none is named
# check trains on two ranks in an empty folder, exports and serves, without network.
# TORCH, FBGEMM and TORCHREC name other versions that belong together: docs/installing.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

install() {
    pip install "${TORCH:=torch==2.13.0}"
    pip install '.[recipes]' pandas "$TORCH"
    pip install --no-deps "${FBGEMM:=fbgemm-gpu-cpu==1.8.0}" "${TORCHREC:=torchrec==1.8.0}"
}

check() {
    cd "$(mktemp -d)"
    lightning-distrec --version
    lightning-distrec recipes copy criteo_dlrm
    local small=(--data.init_args.num_examples=8192 --data.init_args.batch_size=512 --trainer.enable_progress_bar=false)
    lightning-distrec fit --config recipes/criteo_dlrm/cpu.yaml "${small[@]}"
    lightning-distrec export outputs/criteo_dlrm/version_0/checkpoints/best.ckpt served --format torch.export \
        --config recipes/criteo_dlrm/cpu.yaml
    python served/serve.py --check
}

for step in "${@:-install check}"; do
    for name in $step; do "$name"; done
done
