#!/usr/bin/env bash
# Bring up a small but real Slurm on one machine: munge, slurmctld and one slurmd for each pretend host. No systemd, nothing under
# /etc is changed, nothing listens outside. Needs root. Takes about a second.
#
#   up.sh ROOT [OWNER]   all state lives in the folder ROOT; with a pid OWNER the cluster goes down when that process has ended
#   ROOT/bin/hpc CMD …   runs CMD on the login host (HPC_HOST=hpc01: on a node), in the same directory and environment
#
# A host is a set of namespaces with its own name, processes, network (one interface, hsn0), /tmp and /dev/shm; the rest of the file
# system is shared. So ports and /tmp do not clash between nodes, and killing a host's first process (its pid: ROOT/run/NAME.pid) is a
# node that crashes; boot.sh starts it again.
# SLURM_CI_SHARED: folders below /tmp that the nodes must see, separated by colons.
set -euo pipefail

NODES=2
CPUS=64    # what a node claims to have; the job scripts ask for whole GPU nodes
MEMORY=64000
GPUS=4     # devices that nobody can open: they exist so that Slurm hands them out
NET=198.18.77 # RFC 2544, only inside the namespaces made here

R=$(realpath "$1")
OWNER=${2:-}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

die() { echo "up.sh: $*" >&2; exit 1; }
nodes() { local i; for ((i = 1; i <= NODES; i++)); do printf 'hpc%02d\n' "$i"; done; }

[ "$(id -u)" = 0 ] || die "must be root"
for tool in slurmctld slurmd sbatch munged mungekey ip nsenter unshare pgrep; do
  command -v "$tool" >/dev/null || die "$tool is missing: run tests/slurm/install.sh"
done
[ ! -e "$R/run" ] || die "$R holds a cluster already: down.sh $R first"
mkdir -p "$R"/{etc,run/munge,run/cgroup,log,state,spool,bin,dev}
echo "${SLURM_CI_SHARED:-}:$R" >"$R/etc/shared"

# ---------------------------------------------------------------- configuration
{
  echo "127.0.0.1 localhost"
  echo "$NET.10 login01"
  i=10
  for n in $(nodes); do i=$((i + 1)); echo "$NET.$i $n"; mkdir -p "$R/spool/$n"; done
} >"$R/etc/hosts"

NODELIST="hpc[01-$(printf %02d "$NODES")]"
cat >"$R/etc/slurm.conf" <<CONF
ClusterName=ci
SlurmctldHost=login01($NET.10)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# Also how long a requeued job waits before it starts again: 120 s by default, 5 s at least.
AuthInfo=cred_expire=5
StateSaveLocation=$R/state
SlurmdSpoolDir=$R/spool/%n
SlurmctldPidFile=$R/run/slurmctld.pid
SlurmdPidFile=$R/run/slurmd-%n.pid
SlurmctldLogFile=$R/log/slurmctld.log
SlurmdLogFile=$R/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
# The CPUs and the memory that a node claims need not exist.
SlurmdParameters=config_overrides
# Short clocks, so that a test sees in seconds what a site shows in minutes.
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,sched_min_interval=100000,bf_interval=1,batch_sched_delay=0,requeue_delay=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=10
MinJobAge=3600
MessageTimeout=10
SlurmdTimeout=10
SlurmctldTimeout=15
BatchStartTimeout=10
ReturnToService=2
JobRequeue=1
EnforcePartLimits=ANY
DefMemPerCPU=100
NodeName=DEFAULT CPUs=$CPUS Boards=1 SocketsPerBoard=1 \\
  CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEMORY Gres=gpu:h100:$GPUS State=UNKNOWN
$(i=10; for n in $(nodes); do i=$((i + 1)); echo "NodeName=$n NodeAddr=$NET.$i"; done)
PartitionName=batch Nodes=$NODELIST Default=YES MaxTime=24:00:00 DefaultTime=10 State=UP PriorityTier=10 GraceTime=60
PartitionName=urgent Nodes=$NODELIST MaxTime=1:00:00 DefaultTime=5 State=UP PriorityTier=100 PreemptMode=OFF
CONF
for ((g = 0; g < GPUS; g++)); do mknod "$R/dev/nvidia$g" c 195 "$g"; done # slurmd wants character devices
echo "NodeName=$NODELIST Name=gpu Type=h100 File=$R/dev/nvidia[0-$((GPUS - 1))] Flags=nvidia_gpu_env" >"$R/etc/gres.conf"
echo "CgroupAutomount=no" >"$R/etc/cgroup.conf"
mungekey --create --keyfile "$R/etc/munge.key"
chmod 400 "$R/etc/munge.key"
chown root:root "$R/etc/munge.key"

# ---------------------------------------------------------------- hosts
cat >"$R/bin/hpc" <<HPC
#!/usr/bin/env bash
export SLURM_CONF='$R/etc/slurm.conf'
exec nsenter -t "\$(cat '$R/run/'"\${HPC_HOST:-login01}".pid)" -m -u -i -n -p --wd="\$PWD" -- "\$@"
HPC
chmod +x "$R"/bin/*
hpc() { "$R/bin/hpc" "$@"; }

wait_for() { # wait_for SECONDS COMMAND …
  local end=$((SECONDS + $1))
  shift
  until timeout 3 "$@" >/dev/null 2>&1; do
    [ $SECONDS -lt $end ] || return 1
    sleep 0.1
  done
}
all_idle() { [ "$(timeout 3 "$R/bin/hpc" sinfo -h -N -t idle -o %N | sort -u | wc -l)" -ge "$NODES" ]; }

trap '[ $? = 0 ] || "$HERE/down.sh" "$R"' EXIT
"$HERE/boot.sh" "$R" login01
wait_for 10 "$R/bin/hpc" mountpoint -q /run/munge || die "login01 is not ready: see $R/log/host-login01.log"
hpc munged --force --key-file="$R/etc/munge.key" --socket=/run/munge/munge.socket.2 \
  --pid-file="$R/run/munged.pid" --log-file="$R/log/munged.log" --seed-file="$R/run/munge.seed"
wait_for 10 test -S "$R/run/munge/munge.socket.2" || die "munged: see $R/log/munged.log"
hpc slurmctld
wait_for 20 "$R/bin/hpc" scontrol ping || die "slurmctld: see $R/log/slurmctld.log"
for n in $(nodes); do "$HERE/boot.sh" "$R" "$n"; done
end=$((SECONDS + 30))
until all_idle; do
  [ $SECONDS -lt $end ] || { hpc sinfo -R || true; die "nodes did not register: see $R/log/slurmd-*.log"; }
  sleep 0.1
done
if [ -n "$OWNER" ]; then
  setsid bash -c "while kill -0 $OWNER 2>/dev/null; do sleep 2; done; exec '$HERE/down.sh' '$R'" </dev/null >/dev/null 2>&1 &
fi
echo "ready: $(hpc sinfo -h -N -o '%N:%T:%G' | sort -u | tr '\n' ' ')"
