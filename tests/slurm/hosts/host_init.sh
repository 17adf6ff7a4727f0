#!/usr/bin/env bash
# The first process of one pretend host of up.sh: host_init NAME login|compute. It makes the host's file system, waits for its
# network, starts slurmd on a compute node, and adopts orphans. When it is killed, the kernel ends the whole host.
set -euo pipefail
name=$1 role=$2 R=$SLURM_CI_ROOT
hostname "$name"
mount --make-rprivate /
mount --bind "$R/etc/hosts" /etc/hosts
mkdir -p /run/munge
mount --bind "$R/run/munge" /run/munge # one munged serves all hosts, at the path where clients look for it
mount -t tmpfs -o size=2g,mode=1777 shm-"$name" /dev/shm
if [ "$role" = compute ]; then
  # A node's own /tmp, which still shows the shared folders that happen to lie below /tmp.
  mount -t tmpfs stash /mnt
  IFS=: read -ra shared <<<"$SLURM_CI_SHARED"
  kept=()
  for folder in "${shared[@]}"; do
    case $folder in /tmp/*)
      mkdir -p "/mnt/${#kept[@]}"
      mount --bind "$folder" "/mnt/${#kept[@]}"
      kept+=("$folder")
      ;;
    esac
  done
  mount -t tmpfs -o size=2g,mode=1777 tmp-"$name" /tmp
  for i in "${!kept[@]}"; do
    mkdir -p "${kept[$i]}"
    mount --bind "/mnt/$i" "${kept[$i]}"
  done
  umount -l /mnt
fi
# A sysfs that shows this host's network. slurmd 22.05 does not start without this machine's /sys/fs/cgroup in it, or at least
# something mounted there, although no plugin here uses it.
mount --rbind /sys/fs/cgroup "$R/run/cgroup" 2>/dev/null || true
mount -t sysfs sysfs /sys
if mountpoint -q "$R/run/cgroup"; then mount --rbind "$R/run/cgroup" /sys/fs/cgroup; else mount -t tmpfs cgroup /sys/fs/cgroup; fi
ip link set lo up
for _ in $(seq 200); do
  if ip -o addr show hsn0 2>/dev/null | grep -q 'inet '; then break; fi
  sleep 0.05
done
export SLURM_CONF=$R/etc/slurm.conf
cd /
trap 'exit 0' TERM
if [ "$role" = compute ]; then
  ulimit -n "$(ulimit -Hn)"
  slurmd -D -N "$name" >>"$R/log/slurmd-$name.out" 2>&1 &
fi
while :; do
  sleep 3600 &
  wait $! || true
done
