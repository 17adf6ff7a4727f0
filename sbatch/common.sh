# shellcheck shell=bash
# What the job scripts in this folder share. Sourced by a batch shell, it settles the environment of the ranks and defines
#
#   omnirl COMMAND …   one command of omnirl-hpc in this shell (in the container, where there is one)
#   evaluate …         `omnirl-hpc evaluate` with one rank for each task of the job
#   train OVERRIDE …   the run: one rank for each task of the job; stops before the time limit, requeues, ends with the run's code
#
# Knobs, all by environment (`RECIPE=… sbatch …`); what is not set is as printed at the start of a job's log:
#
#   RECIPE        a file of configs/recipe/           RUN_DIR       results; the same folder again: the run goes on
#   MODEL         a folder in diffusers' layout       PROMPTS       a parquet file (omnirl-hpc prompts)
#   LAUNCHER      srun | torchrun | pmix | mpirun     BINDS         more folders for the container, with commas
#   CONTAINER     an image for apptainer              OMNIRL_ROOT   the checkout, where jobs are not submitted from it
#   PYTHON        outside of a container
#   MAX_REQUEUES  after so many the job stays away    MAX_IDLE_STARTS  the same for starts in a row that made no step
set -euo pipefail

fail() {
  echo "${SLURM_JOB_NAME:-${0##*/}}: $*" >&2
  exit 2
}

[[ -n ${SLURM_JOB_ID:-} ]] || fail "this is a job script: start it with sbatch"

# However this shell ends, the log says so, if it can still be written to.
say_end() {
  local code=$?
  echo "$(date +%T) the job ended with exit code $code" || true
}
trap say_end EXIT

# `sbatch --export=NONE` and `--export=A=1` mean srun as well, by these variables: ranks would get nothing that is exported here.
not_passed_on=""
[[ ${SLURM_EXPORT_ENV:-ALL} == *ALL* ]] || not_passed_on=" (sbatch --export=$SLURM_EXPORT_ENV passes on what it names; --export=ALL,… all)"
unset SLURM_EXPORT_ENV SRUN_EXPORT_ENV

# A warning that comes before the ranks are there would end this shell; `train` passes it on.
warned=0
trap 'warned=1' USR1

# For Slurm's commands: the number of an array's task can be the array's own, which means all of its tasks.
job=$SLURM_JOB_ID
[[ -z ${SLURM_ARRAY_TASK_ID:-} ]] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID
restart=${SLURM_RESTART_COUNT:-0}
tasks=${SLURM_NTASKS:-1}
nodes=$SLURM_JOB_NUM_NODES

RUN_DIR=${RUN_DIR:-runs/$SLURM_JOB_NAME-$SLURM_JOB_ID}
LAUNCHER=${LAUNCHER:-srun}
MAX_REQUEUES=${MAX_REQUEUES:-50}
MAX_IDLE_STARTS=${MAX_IDLE_STARTS:-5}
CONTAINER=${CONTAINER:-}
BINDS=${BINDS:-}
for name in MAX_REQUEUES MAX_IDLE_STARTS; do
  [[ ${!name} =~ ^[0-9]{1,9}$ ]] || fail "$name=${!name} must be a whole number"
  printf -v "$name" %d "$((10#${!name}))" # 08 is no octal number
done
# Programs take a name that begins with - for an option, and Hydra's ??? is a value that is missing.
for name in RUN_DIR MODEL PROMPTS OUT; do
  case ${!name:-} in -* | '???') printf -v "$name" %s "./${!name}" ;; esac
done

# The job runs the checkout's code, wherever it was submitted and whatever is installed.
if [[ -n ${OMNIRL_ROOT:-} ]]; then
  OMNIRL_ROOT=$(realpath -- "$OMNIRL_ROOT")
  export PYTHONPATH=$OMNIRL_ROOT${PYTHONPATH:+:$PYTHONPATH}
fi
if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ ! -x ${OMNIRL_ROOT:-.}/.venv/bin/python ]] || PYTHON=${OMNIRL_ROOT:-.}/.venv/bin/python
fi
[[ -n $CONTAINER ]] || command -v -- "$PYTHON" >/dev/null || fail "PYTHON=$PYTHON does not exist on $(hostname)"

# Rendezvous: the job's first node, and a port that other jobs on the node, and this job before a requeue, do not use. Where something
# else listens there, the next one.
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
if [[ -z ${MASTER_PORT:-} ]]; then
  MASTER_PORT=$((20000 + (SLURM_JOB_ID * 16 + restart) % 10000))
  while timeout 5 bash -c ": </dev/tcp/$MASTER_ADDR/$MASTER_PORT" 2>/dev/null; do MASTER_PORT=$((MASTER_PORT + 1)); done
fi
export MASTER_ADDR MASTER_PORT

# Since 22.05 srun does not take --cpus-per-task over from sbatch: without this each rank would get one core.
[[ -z ${SLURM_CPUS_PER_TASK:-} ]] || export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONUNBUFFERED=1
export TTY_COMPATIBLE=0 # mpirun gives rank 0 a terminal; this is a log, and wants lines instead of a moving bar

# When the job's time is up, for `stop_before`: newer Slurm says it, and a container has no scontrol to ask.
if [[ -z ${SLURM_JOB_END_TIME:-} ]]; then
  job_end=$(squeue --noheader --jobs="$job" --format=%e 2>/dev/null || true)
  [[ $job_end != 20* ]] || SLURM_JOB_END_TIME=$(date --date="$job_end" +%s)
  [[ -z ${SLURM_JOB_END_TIME:-} ]] || export SLURM_JOB_END_TIME
fi

# Compute nodes have no internet: a library that asks a hub must fail at once and say so.
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
export PYTHONUTF8=1 # prompts are not ASCII, and a batch job's locale often is C

# A rank that crashes must not spend the minutes until it ends on writing its memory to the shared file system.
ulimit -c 0

python=("$PYTHON")
if [[ -n $CONTAINER ]]; then
  runtime=$(command -v apptainer || command -v singularity) || fail "CONTAINER=$CONTAINER needs apptainer or singularity (module load?)"
  [[ -e $CONTAINER ]] || fail "CONTAINER=$CONTAINER does not exist"
fi

# setting KEY VALUE: the override that gives KEY this very value. Outside of quotes Hydra reads much punctuation and accents as syntax;
# within them it reads quotes and ${, and the backslashes before them and before the end. The same in Python: config/quoting.py.
setting() {
  local value
  value=$(printf '%s"' "$2" | LC_ALL=C sed -zE 's/(\\*)\$\{/\1\1\\${/g; s/(\\*)"/\1\1\\"/g') # the end as a quote
  printf '%s="%s"' "$1" "${value%\\\"}"
}

# Fills `python` with the command that starts Python in the container. Called late: it binds folders that must exist.
enter_container() {
  [[ -n $CONTAINER ]] || return 0
  local binds="" folder
  for folder in . "${OMNIRL_ROOT:-.}" "$RUN_DIR" "${MODEL:-}" "${OUT:-}" "$(dirname -- "${PROMPTS:-.}")"; do
    [[ -e $folder ]] || continue
    folder=$(realpath -- "$folder")
    folder=${folder//,/\\,} folder=${folder//:/\\:} # what separates folders, and a folder from its place inside
    [[ ,$binds, == *,"$folder",* ]] || binds+=${binds:+,}$folder
  done
  python=("$runtime" exec --bind "$binds${BINDS:+,$BINDS}")
  [[ ! -e /dev/nvidiactl ]] || python+=(--nv)
  [[ ! -e /dev/kfd ]] || python+=(--rocm)
  python+=("$CONTAINER" python)
}

omnirl() {
  mkdir -p -- "$RUN_DIR"
  enter_container
  "${python[@]}" -m omnirl_hpc "$@"
}

# Fills `launch` with the command that starts omnirl-hpc's command "$@" on all ranks.
choose_launcher() {
  local program=(-m omnirl_hpc "$@") per_node=${SLURM_NTASKS_PER_NODE:-$((tasks / nodes))}
  # --kill-on-bad-exit: the others would wait for a dead rank until their collectives time out.
  local step=(srun --kill-on-bad-exit=1)
  case $LAUNCHER in
    srun) launch=("${step[@]}" "${python[@]}" "${program[@]}") ;;
    torchrun)
      ((nodes * per_node == tasks)) || fail "LAUNCHER=torchrun starts as many ranks on each node, and $tasks tasks on $nodes nodes are" \
        "not $per_node on each: ask for --nodes=… and --ntasks-per-node=… alone, or use another LAUNCHER"
      # One agent for each node, with the CPUs of all its ranks. The static rendezvous: ranks are numbered by node in every start,
      # and no agent has to find out whether a name is its own. Slurm sends signals to every process of a step: the agents leave
      # those to the ranks (USR1 would kill an agent, TERM would make it kill its ranks while they save).
      # shellcheck disable=SC2016 # the variables are the task's
      launch=(env "SRUN_CPUS_PER_TASK=$((${SLURM_CPUS_PER_TASK:-1} * per_node))"
        "${step[@]}" --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1
        bash -c 'trap "" USR1 TERM; PET_NODE_RANK=$SLURM_NODEID exec "$@"' agent
        "${python[@]}" -m torch.distributed.run --nnodes="$nodes" --nproc-per-node="$per_node" --max-restarts=0 --rdzv-id="$SLURM_JOB_ID.$restart"
        --master-addr="$MASTER_ADDR" --master-port="$MASTER_PORT" "--signals-to-handle=SIGINT,SIGHUP,SIGQUIT" "${program[@]}")
      ;;
    pmix) launch=("${step[@]}" --mpi=pmix "${python[@]}" "${program[@]}") ;;
    mpirun)
      # Open MPI binds each rank to one core unless told otherwise: threads of data loading and rewards would share it.
      export OMPI_MCA_hwloc_base_binding_policy=none PRTE_MCA_hwloc_default_binding_policy=none
      launch=(mpirun -n "$tasks" "${python[@]}" "${program[@]}")
      ;;
    *) fail "LAUNCHER=$LAUNCHER is not known; it must be one of: srun, torchrun, pmix, mpirun" ;;
  esac
}

evaluate() {
  print_knobs "$@"
  enter_container
  choose_launcher evaluate "$@"
  "${launch[@]}"
}

print_knobs() {
  local name
  echo "job $SLURM_JOB_ID, start $((restart + 1)), $(date '+%F %T'), $nodes node(s) $SLURM_JOB_NODELIST, $tasks ranks"
  for name in RECIPE MODEL PROMPTS RUN_DIR LAUNCHER CONTAINER BINDS PYTHON MAX_REQUEUES MAX_IDLE_STARTS MASTER_ADDR MASTER_PORT; do
    printf '  %-17s%s\n' "$name" "${!name:--}"
  done
  printf '  %-17s%s\n' overrides "${*:--}"
}

train() {
  [[ -n ${RECIPE:-} ]] || fail "RECIPE is not set$not_passed_on"
  [[ -n ${MODEL:-} ]] || fail "MODEL is not set: MODEL=/path/to/checkpoint sbatch …$not_passed_on"
  [[ -n ${PROMPTS:-} ]] || fail "PROMPTS is not set: PROMPTS=/path/to/table.parquet sbatch … (see omnirl-hpc prompts)$not_passed_on"
  print_knobs "$@"
  mkdir -p -- "$RUN_DIR" || fail "RUN_DIR=$RUN_DIR cannot be made"
  enter_container
  choose_launcher train "$(setting recipe "$RECIPE")" "$(setting run_dir "$RUN_DIR")" "$(setting model.path "$MODEL")" \
    "$(setting data.prompts "$PROMPTS")" "$@"
  refuse_a_warning_that_comes_at_once

  # The ranks look for the first file, and leave one of the others when they have saved.
  local start=$SLURM_JOB_ID.$restart
  local stop_file=$RUN_DIR/STOP.$start requeue_marker=$RUN_DIR/REQUEUE.$start term_marker=$RUN_DIR/TERM.$start
  local signalled=0 code=0
  rm -f -- "$RUN_DIR"/{ARMED,STOP,REQUEUE,TERM}."$SLURM_JOB_ID".* # of a start that was killed, or a job that had this number before
  # It becomes the stop file by another name, which a disk without a free inode still allows.
  local armed_file=$RUN_DIR/ARMED.$start
  # What each start of this job found.
  local starts_file=$RUN_DIR/STARTS.$SLURM_JOB_ID
  ((restart)) || rm -f -- "$starts_file"
  { : >"$armed_file" && newest_checkpoint >>"$starts_file"; } || fail "RUN_DIR=$RUN_DIR cannot be written to"

  # From here on only the run's end ends this shell: not a full disk under its log, and no file that cannot be made or removed.
  set +e
  # The warning before the time limit or a preemption. A file reaches the ranks through any launcher and container.
  trap 'signalled=1; echo "$(date +%T) USR1: the system wants the nodes back; the run saves and ends"; tell_ranks' USR1
  ((!warned)) || tell_ranks
  # scancel: Slurm has told the ranks, too. This shell only waits for them.
  trap 'signalled=1; echo "$(date +%T) TERM: waiting for the ranks to save"' TERM

  # In the background, because a shell runs its traps only between commands; `wait` returns early when one has run.
  "${launch[@]}" &
  local process=$!
  while true; do
    signalled=0 code=0
    wait "$process" || code=$?
    ((signalled)) || break
  done
  # Bash 5.2 does, within a millisecond of a signal, and says -1.
  ((code >= 0)) || { code=1; echo "the exit code of the ranks is lost: they ended as a signal came"; }

  local again=0
  if [[ -e $requeue_marker ]]; then
    again=1
  elif [[ -e $term_marker ]] || ((code)); then # a preemption, if Slurm says so; its TERM kills a rank that is just starting
    ! preempted || again=1
  fi
  rm -f -- "$armed_file" "$stop_file" "$requeue_marker" "$term_marker"
  ((!again)) || requeue
  rm -f -- "$starts_file"
  exit "$code"
}

tell_ranks() {
  [[ -e $stop_file ]] || mv -f -- "$armed_file" "$stop_file" || echo "the ranks cannot be told: $stop_file cannot be made"
}

# The name of the run's newest checkpoint.
newest_checkpoint() {
  echo "$(cat -- "$RUN_DIR/checkpoints/latest" 2>/dev/null || echo step_000000)"
}

# A job whose warning is due when it starts would be requeued again and again. Slurm does not say when it will warn: the script does,
# unless sbatch's command line replaces it, so what is due is waited for. Slurm looks every 30 s.
refuse_a_warning_that_comes_at_once() {
  local header before left second
  [[ -r $0 ]] || return 0
  header=$(sed -nE 's/^#SBATCH +--signal[= ]([^ #]+).*/\1/p' "$0" | tail -n 1)
  before=${SBATCH_SIGNAL:-$header}
  [[ ${SLURM_JOB_END_TIME:-} =~ ^[0-9]+$ && $before =~ @([0-9]+)$ ]] || return 0
  before=${BASH_REMATCH[1]} left=$((SLURM_JOB_END_TIME - $(date +%s)))
  ((before >= left)) || return 0
  echo "$(date +%T) the job ends in $left s, and should be warned $before s before: waiting a minute for that"
  for ((second = 0; second < 60 && !warned; second++)); do sleep 1; done
  ((!warned)) || preempted \
    || fail "the warning comes $before s before the end (--signal) of a job of $left s (--time), which leaves no time to train: a longer" \
      "--time, or a later warning (--signal=B:USR1@$((left / 4)))"
}

# Whether Slurm wants the nodes of this running job for another one. Where that does not begin with USR1 to this shell, it begins with
# TERM to the ranks, as a user's `scancel --signal=TERM` does; this shell gets nothing in either case.
preempted() {
  local shown
  shown=$(scontrol show job --oneliner "$job") || { echo "Slurm does not say whether this is a preemption: no requeue"; return 1; }
  [[ $shown == *" JobState=RUNNING "* && $shown == *" PreemptTime=2"* ]]
}

# Does not return: the job ends here, and starts again under the same number.
requeue() {
  local why="" idle
  idle=$(grep -cFx -- "$(newest_checkpoint)" "$starts_file") # starts that found what there still is
  if ((!MAX_REQUEUES)); then
    why="not requeued (MAX_REQUEUES=0)"
  elif ((restart >= MAX_REQUEUES)); then
    why="requeued $restart times already (MAX_REQUEUES=$MAX_REQUEUES)"
  elif ((idle >= MAX_IDLE_STARTS)); then
    why="no step in $idle starts (MAX_IDLE_STARTS=$MAX_IDLE_STARTS): they get too little time (--time, --signal, stop_before)"
  fi
  if [[ -n $why ]]; then
    rm -f -- "$starts_file"
    echo "$why: the run is saved in $RUN_DIR, and goes on when submitted again"
    exit 1
  fi
  echo "$(date +%T) requeue"
  trap 'trap - EXIT; exit 0' TERM # by which Slurm ends this shell
  scontrol requeue "$job" \
    || fail "Slurm did not requeue the job: the run is saved in RUN_DIR=$RUN_DIR, and goes on when it is submitted again with it"
  sleep 120
  fail "Slurm promised to requeue the job and did not"
}
