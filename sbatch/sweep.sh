#!/usr/bin/env bash
# A sweep as a job array: each task trains one combination of the values given in Hydra's syntax, in a folder of its own.
#
#   MODEL=… PROMPTS=… sbatch --array=0-3%2 sbatch/sweep.sh seed=0,1 actor.optimizer.lr=1e-4,3e-4
#
# `omnirl-hpc sweep …` lists the combinations with their numbers. Knobs: sbatch/common.sh; RUN_DIR is the folder of the sweep.
#SBATCH --job-name=sweep
#SBATCH --array=0-3
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --output=logs/%x-%A_%a.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@300
set -euo pipefail
RECIPE=${RECIPE:-flowgrpo_qwen_image}
RUN_DIR=${RUN_DIR:-runs/sweep-${SLURM_ARRAY_JOB_ID:-}}/$(printf %03d "${SLURM_ARRAY_TASK_ID:-0}")
OMNIRL_ROOT=${OMNIRL_ROOT:-${SLURM_SUBMIT_DIR:-.}}
[[ -e $OMNIRL_ROOT/sbatch/common.sh ]] || { echo "OMNIRL_ROOT=$OMNIRL_ROOT is no checkout: submit from it, or set OMNIRL_ROOT" >&2; exit 2; }
# shellcheck source=sbatch/common.sh
source "$OMNIRL_ROOT/sbatch/common.sh"
[[ -n ${SLURM_ARRAY_TASK_ID:-} ]] || fail "this is a job array: submit it with --array=0-N"
mapfile -t overrides < <(omnirl sweep --task "$SLURM_ARRAY_TASK_ID" "$@")
wait $! || exit 2 # the command has said why
train "${overrides[@]}"
