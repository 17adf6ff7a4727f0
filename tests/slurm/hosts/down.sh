#!/usr/bin/env bash
# Stop the cluster of up.sh: down.sh ROOT. Each pretend host is ended by the pid that was recorded for it; the kernel then ends every
# process of that host and removes its network. Logs and configuration stay in ROOT.
set -uo pipefail
R=$1
for file in "$R"/run/*.holder; do
  [ -s "$file" ] || continue
  holder=$(cat "$file")
  init=$(cat "${file%.holder}.pid" 2>/dev/null || true)
  # A pid may have been given to another process meanwhile: it is ours where the holder is still its parent.
  if [ -n "$init" ] && [ "$(ps -o ppid= -p "$init" 2>/dev/null | tr -d ' ')" = "$holder" ]; then
    kill -KILL "$init" 2>/dev/null || true
  fi
  rm -f "$file" "${file%.holder}.pid"
done
