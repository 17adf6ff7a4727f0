#!/usr/bin/env bash
# Flow-GRPO on Qwen-Image. From the checkout, on a login node:
#
#   MODEL=/path/to/Qwen-Image PROMPTS=my/prompts.parquet sbatch sbatch/flowgrpo_qwen_image.sh seed=0
#
# Arguments are overrides of settings; knobs and their meaning: sbatch/common.sh; a first job step by step: docs/slurm.md.
# Account and partition are not in this file: SBATCH_ACCOUNT, SBATCH_PARTITION, or the command line, as anything below
# (`sbatch --nodes=4 --time=12:00:00 sbatch/…`). One task for each GPU.
#SBATCH --job-name=flowgrpo_qwen_image
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
RECIPE=${RECIPE:-flowgrpo_qwen_image}
OMNIRL_ROOT=${OMNIRL_ROOT:-${SLURM_SUBMIT_DIR:-.}}
[[ -e $OMNIRL_ROOT/sbatch/common.sh ]] || { echo "OMNIRL_ROOT=$OMNIRL_ROOT is no checkout: submit from it, or set OMNIRL_ROOT" >&2; exit 2; }
# shellcheck source=sbatch/common.sh
source "$OMNIRL_ROOT/sbatch/common.sh"
train "$@"
