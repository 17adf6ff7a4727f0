#!/usr/bin/env bash
# A small run as a job on CPU nodes: a tiny random Qwen-Image, made here, learns to make images that compress well. Minutes.
# The same shape as flowgrpo_qwen_image.sh: try launchers, requeue and a new centre with it first.
#
#   sbatch sbatch/flowgrpo_tiny.sh
#SBATCH --job-name=flowgrpo_tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=1
#SBATCH --time=00:30:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH --signal=B:USR1@120
set -euo pipefail
RECIPE=${RECIPE:-flowgrpo_tiny}
OMNIRL_ROOT=${OMNIRL_ROOT:-${SLURM_SUBMIT_DIR:-.}}
[[ -e $OMNIRL_ROOT/sbatch/common.sh ]] || { echo "OMNIRL_ROOT=$OMNIRL_ROOT is no checkout: submit from it, or set OMNIRL_ROOT" >&2; exit 2; }
# shellcheck source=sbatch/common.sh
source "$OMNIRL_ROOT/sbatch/common.sh"
if [[ -z ${MODEL:-} ]]; then
  MODEL=$RUN_DIR/model
  [[ -e $MODEL/model_index.json ]] || rm -rf -- "$MODEL" # half a model, of a start that was interrupted
fi
PROMPTS=${PROMPTS:-$RUN_DIR/prompts.parquet}
[[ -e $MODEL/model_index.json ]] || omnirl tiny-model "$MODEL"
[[ -e $PROMPTS ]] || omnirl prompts "$PROMPTS" --kind ocr --count 64 --seed 0
train data.prompts_per_step=8 "$@" # the recipe is for 2 ranks; 4 need twice the prompts
