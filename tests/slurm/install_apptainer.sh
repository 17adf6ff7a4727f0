#!/usr/bin/env bash
# What tests/slurm/test_containers.py needs beside install.sh, in a folder that is kept ($OMNIRL_TEST_CACHE): Apptainer, a folder with a
# Debian for containers/omnirl_cpu.def, and wheels of constraints/cpu.txt, so that the image is built without a network.
# Does nothing for what is there already. Needs root, debootstrap's mirror (MIRROR=… names another) and pip's index; some 5 minutes.
#
# Apptainer is this machine's own, or Debian's: stable releases have none, so it is installed into a tree of Debian sid (bin/apptainer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
cache=${OMNIRL_TEST_CACHE:-$HOME/.cache/omnirl_hpc_tests}
if [ -z "${PYTHON:-}" ]; then
  PYTHON=python3
  [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
die() { echo "install_apptainer.sh: $*" >&2; exit 1; }

[ "$(id -u)" = 0 ] || die "only root can make the trees"
# The wheels are for this Python, so the image must have the same.
version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
  3.11) suite=bookworm ;;
  3.13) suite=trixie ;;
  *) die "no Debian release has Python $version, which $PYTHON is; PYTHON=python3.11 or python3.13" ;;
esac
mkdir -p "$cache"

# tree NAME SUITE PACKAGES: whole or not at all. Device nodes cannot be copied in a user namespace, and Apptainer mounts its own /dev.
tree() {
  [ ! -d "$cache/$1" ] || return 0
  if ! command -v debootstrap >/dev/null; then
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends debootstrap >/dev/null
  fi
  echo "Debian $2 into $cache/$1 …"
  rm -rf "$cache/$1.part"
  debootstrap --variant=minbase --include="$3" "$2" "$cache/$1.part" ${MIRROR:+"$MIRROR"} >"$cache/$1.log" 2>&1 \
    || die "debootstrap failed; the end of $cache/$1.log says: $(tail -n 2 "$cache/$1.log")"
  find "$cache/$1.part/dev" -mindepth 1 -delete
  rm -rf "$cache/$1.part"/var/cache/apt/archives/*.deb "$cache/$1.part"/var/lib/apt/lists/*
  mv "$cache/$1.part" "$cache/$1"
}

command -v apptainer >/dev/null || tree apptainer sid apptainer,squashfuse,ca-certificates
tree "rootfs-$suite" "$suite" python3,python3-venv,ca-certificates

# With the build requirements of pyproject.toml: pip builds this package in the image, too.
wheels=$cache/wheels-$version-$(cat pyproject.toml constraints/cpu.txt | sha256sum | cut -c1-16)
if [ ! -d "$wheels" ]; then
  echo "wheels into $wheels …"
  rm -rf "$cache"/wheels-*
  # shellcheck disable=SC2086 # several words
  "$PYTHON" -m pip wheel -qq ${PIP_ARGS:-} -c constraints/cpu.txt -w "$wheels.part" '.[ocr]' hatchling \
    || die "pip could not make the wheels"
  rm -f "$wheels.part"/omnirl_hpc-*.whl
  mv "$wheels.part" "$wheels"
fi
ln -sfn "rootfs-$suite" "$cache/rootfs"
ln -sfn "$(basename "$wheels")" "$cache/wheels"

PATH=$PATH:$PWD/tests/slurm/bin OMNIRL_TEST_CACHE=$cache apptainer exec "$cache/rootfs" true \
  || die "Apptainer cannot start a container on this machine"
