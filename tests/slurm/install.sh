#!/usr/bin/env bash
# What the tests marked `slurm` need beside Python, on Debian or Ubuntu: Slurm and munge, without accounting (no database), Open MPI.
# Does nothing where they are installed. The packages' services stay off: tests start their own cluster (hosts/up.sh).
set -euo pipefail
missing() {
  local tool
  for tool in slurmctld slurmd sbatch munged mungekey mpirun ip nsenter unshare pgrep; do
    command -v "$tool" >/dev/null || { echo "$tool"; return; }
  done
  compgen -G '/usr/lib/*/pmix2/lib/libpmix.so' >/dev/null || echo libpmix.so # the name under which Slurm's plugin loads it
}
[ -n "$(missing)" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "install.sh: $(missing) is missing, and only root can install it" >&2; exit 1; }
command -v apt-get >/dev/null || { echo "install.sh: $(missing) is missing, and there is no apt-get to install it" >&2; exit 1; }
export DEBIAN_FRONTEND=noninteractive
# Where packages start services at once, this stops them: a second slurmd or munged could be in the way.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod +x "$policy"
  trap 'rm -f "$policy"' EXIT
fi
apt-get update -qq
packages=(slurm-wlm slurm-client munge openmpi-bin libpmix-dev iproute2 procps util-linux)
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
[ -z "$(missing)" ] || { echo "install.sh: $(missing) is still missing" >&2; exit 1; }
