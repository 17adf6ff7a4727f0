#!/usr/bin/env bash
# Are two runs of the same command equal to the bit? A chain of three jobs: a strict run, the same again, then `compare`.
# The last job's exit code is the answer: 0 equal, 1 different (its log names the first step, phase and tensor).
#
#   bash sbatch/repro.sh steps=5                                     the demo on CPU nodes; `sbatch sbatch/repro.sh` does the same
#   JOB=sbatch/flowgrpo_qwen_image.sh MODEL=… PROMPTS=… bash sbatch/repro.sh steps=5
#
#   JOB      the job script that is run twice          RUN_DIR   the folder for both runs
#   SECOND   overrides for the second run only         OPTIONS   for sbatch, for both runs (e.g. "--nodes=4")
#   WAIT=1   wait, and end with the answer
#SBATCH --job-name=repro
#SBATCH --ntasks=1
#SBATCH --time=00:15:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --open-mode=append
set -euo pipefail

root=${OMNIRL_ROOT:-${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/..}}
[[ -e $root/sbatch/common.sh ]] || { echo "OMNIRL_ROOT=$root is no checkout: submit from it, or set OMNIRL_ROOT" >&2; exit 2; }
export OMNIRL_ROOT=$root
if [[ ${1:-} == compare ]]; then
  # shellcheck source=sbatch/common.sh
  source "$root/sbatch/common.sh"
  omnirl "$@"
  exit
fi

JOB=${JOB:-$root/sbatch/flowgrpo_tiny.sh}
folder=${RUN_DIR:-runs/repro-$(date +%F-%H%M%S)}
if [[ $JOB == */flowgrpo_tiny.sh ]]; then # both runs with the model that the first one makes
  export MODEL=${MODEL:-$folder/model} PROMPTS=${PROMPTS:-$folder/prompts.parquet}
fi
# Inside a job, its own size must not become that of the jobs submitted here.
for name in "${!SLURM_@}"; do [[ $name == SLURM_CONF ]] || unset "$name"; done

read -ra options <<<"${OPTIONS:-}"
read -ra second <<<"${SECOND:-}"
submit() { sbatch --parsable --kill-on-invalid-dep=yes "$@"; }
a=$(RUN_DIR=$folder/first submit "${options[@]}" "$JOB" determinism=strict "$@")
b=$(RUN_DIR=$folder/second submit "${options[@]}" --dependency="afterok:$a" "$JOB" determinism=strict "$@" "${second[@]}")
echo "jobs $a and $b make $folder/first and $folder/second; the job after them compares"
RUN_DIR=$folder submit ${WAIT:+--wait} --dependency="afterok:$b" "$root/sbatch/repro.sh" compare "$folder/first" "$folder/second"
