#!/usr/bin/env bash
# Start one host of up.sh's cluster, also again after it was killed: boot.sh ROOT NAME
set -euo pipefail
R=$1 name=$2
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
role=compute
[ "$name" != login01 ] || role=login
address=$(awk -v name="$name" '$2 == name { print $1 }' "$R/etc/hosts")
SLURM_CI_SHARED=$(cat "$R/etc/shared")
export SLURM_CI_ROOT=$R SLURM_CI_SHARED

setsid unshare --fork --kill-child --pid --mount-proc --uts --mount --net --ipc "$HERE/host_init.sh" "$name" "$role" \
  </dev/null >>"$R/log/host-$name.log" 2>&1 &
holder=$!
pid=
for _ in $(seq 200); do
  pid=$(pgrep -P "$holder" | head -n 1 || true)
  [ -z "$pid" ] || break
  sleep 0.02
done
[ -n "$pid" ] || { echo "boot.sh: host $name did not start: see $R/log/host-$name.log" >&2; exit 1; }
echo "$pid" >"$R/run/$name.pid"
echo "$holder" >"$R/run/$name.holder"
if [ "$role" = login ]; then
  nsenter -t "$pid" -n sh -c "ip link add hsn0 type bridge && ip link set hsn0 up && ip addr add $address/24 dev hsn0"
else
  login=$(cat "$R/run/login01.pid")
  nsenter -t "$login" -n sh -c "ip link add p-$name type veth peer name hsn0 netns $pid && ip link set p-$name master hsn0 up"
  nsenter -t "$pid" -n sh -c "ip link set hsn0 up && ip addr add $address/24 dev hsn0"
fi
