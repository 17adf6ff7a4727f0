#!/usr/bin/env bash
# Base model and adapter side by side on fixed prompts, scored by the recipe's reward. From the checkout, on a login node:
#
#   RUN_DIR=runs/my_run sbatch sbatch/evaluate.sh evaluation.num_prompts=64
#   RUN_DIR=runs/my_run OUT=results/best MODEL=/path/to/Qwen-Image sbatch sbatch/evaluate.sh --step best
#
#   RUN_DIR   the run, or the folder of an adapter (then recipe=… belongs to the arguments)
#   OUT       a folder for the table and the images; what is there already is not made again
#   MODEL     the checkpoint, where it is not the run's model.path, or in a container   PROMPTS   a table, the same
#
# Arguments are those of `omnirl-hpc evaluate`; the other knobs: sbatch/common.sh. One task for each GPU.
#SBATCH --job-name=evaluate
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=4
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=8
#SBATCH --time=02:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
set -euo pipefail
OMNIRL_ROOT=${OMNIRL_ROOT:-${SLURM_SUBMIT_DIR:-.}}
[[ -e $OMNIRL_ROOT/sbatch/common.sh ]] || { echo "OMNIRL_ROOT=$OMNIRL_ROOT is no checkout: submit from it, or set OMNIRL_ROOT" >&2; exit 2; }
# shellcheck source=sbatch/common.sh
source "$OMNIRL_ROOT/sbatch/common.sh"
[[ -e $RUN_DIR ]] || fail "RUN_DIR=$RUN_DIR does not exist: RUN_DIR=runs/my_run sbatch …"
OUT=${OUT:-$RUN_DIR/evaluation_by_hand}
mkdir -p -- "$OUT"
evaluate "$RUN_DIR" "$OUT" ${MODEL:+"$(setting model.path "$MODEL")"} ${PROMPTS:+"$(setting evaluation.prompts "$PROMPTS")"} "$@"
