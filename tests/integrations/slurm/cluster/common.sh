# shellcheck shell=bash disable=SC2034 # what seems unused here is used by those who source this
# What `up`, `down` and `node` share. See README.md beside this file for how the cluster is built.
#
# A cluster is a state folder S, a bridge on this machine and a handful of "machines": ctl (slurmctld) and n1..nN
# (slurmd). A machine is a process tree in its own pid, net, uts, ipc and mount namespaces. Its first process is the
# namespace's init: kill it, and the kernel kills all others and forgets the machine's mounts. That is what makes
# power loss one signal, and leaves nothing to clean up but processes, links and files.

DEFAULT_STATE=/var/lib/paceline-slurm
MARK=PACELINE_SLURM_CLUSTER # each process of a cluster has MARK=S in its environment, so that `down` finds it
MAX_STATE_LENGTH=60         # Slurm puts Unix sockets below S, and their paths may have 107 characters
DEADLINE_S=${PACELINE_SLURM_DEADLINE_S:-30}

fail() {
  printf '%s: %s\n' "${0##*/}" "$1" >&2
  exit "${2:-1}"
}

# need_machine: what must be true before anything is touched. Each sentence says what to do.
need_machine() {
  [ "$(uname -s)" = Linux ] || fail "needs Linux (namespaces); this is $(uname -s)" 2
  [ "$(id -u)" = 0 ] || fail "needs root for namespaces and a bridge: run it with sudo" 2
  local tool missing=()
  for tool in "$@"; do
    command -v "$tool" >/dev/null || missing+=("$tool")
  done
  [ ${#missing[@]} = 0 ] || fail "not installed: ${missing[*]} - run: make slurm-install" 2
  [ ! -e "$S" ] || [ -d "$S" ] || fail "$S is not a folder" 2
}

# Only one up, down or node at a time works on a state folder; the kernel frees the lock if one is killed.
lock_state() {
  exec 9>>"$S/lock"
  flock -w "$DEADLINE_S" 9 || fail "another up, down or node is still working on $S"
}

# The shape is written when a cluster is made; later commands read it instead of asking again.
read_shape() {
  [ -s "$S/shape" ] || return 1
  read -r ID NODES CPUS GPUS ACCOUNTING <"$S/shape"
  name_things
}

name_things() {
  BRIDGE=pace$ID
  NET=198.$((18 + ID / 256)).$((ID % 256)) # one /24 of 198.18.0.0/15, the range set aside for test networks
}

machine_names() { # ctl n1 n2 ...
  local k
  echo ctl
  for ((k = 1; k <= NODES; k++)); do echo "n$k"; done
}

address_of() {
  case $1 in ctl) echo "$NET.253" ;; host) echo "$NET.254" ;; *) echo "$NET.${1#n}" ;; esac
}

# A machine keeps its network card over a power loss. With another one its neighbours, who remember the old card for
# half a minute, could not reach it: jobs that start meanwhile fail, and are requeued.
card_of() { printf '02:70:%02x:%02x:00:%02x\n' $((ID / 256)) $((ID % 256)) "$(address_of "$1" | cut -d. -f4)"; }

is_machine() { grep -qxF -- "$1" <<<"$(machine_names)"; } # no pipe: grep leaves at the first match, and the writer would fail

# Live processes of this cluster, as this machine numbers them. A zombie's environment is empty: it does not count.
processes() {
  grep -lzxFs "$MARK=$S" /proc/[0-9]*/environ | cut -d/ -f3 || true
}

# alive NAME: its process is there and is ours. A pid file of an earlier boot may name another process.
alive() {
  local pid
  pid=$(cat "$S/run/$1.pid" 2>/dev/null) && [ -n "$pid" ] && grep -qzxFs "$MARK=$S" "/proc/$pid/environ"
}

# await WHAT COMMAND...: poll until the command succeeds.
await() {
  local what=$1 end=$((SECONDS + DEADLINE_S))
  shift
  until "$@"; do
    [ $SECONDS -lt $end ] || give_up "$what"
    sleep 0.05
  done
}

give_up() {
  local hint=""
  if [ "$(cat /proc/sys/net/bridge/bridge-nf-call-iptables 2>/dev/null)" = 1 ]; then
    hint=" This machine sends bridged packets through its firewall (bridge-nf-call-iptables): allow $NET.0/24 there."
  fi
  fail "gave up after $DEADLINE_S s waiting for $1. The logs are in $S/log.$hint"
}

# start NAME COMMAND...: a process of the cluster, free of our terminal, our lock and our environment.
start() {
  local name=$1
  shift
  rm -f "$S/run/$name.pid"
  setsid env -i PATH="$PATH" LANG=C.UTF-8 "$MARK=$S" SLURM_CONF="$S/slurm.conf" "$@" \
    </dev/null >>"$S/log/$name.out" 2>&1 9>&- &
}

# boot NAME...: start these machines in parallel, and wait until every node takes jobs.
boot() {
  local name
  for name in "$@"; do
    # Slurm does not notice a node that is back within SlurmdTimeout. Set it down, so that its old jobs are requeued.
    if [ "$name" != ctl ] && alive ctl; then
      client scontrol update NodeName="$name" State=DOWN Reason=boot || true
    fi
    start "$name" unshare --mount --uts --ipc --net --pid --fork --kill-child \
      bash "$HERE/machine" "$name" "$(address_of "$name")" "$S" "$ACCOUNTING"
  done
  for name in "$@"; do
    await "$name to start" alive "$name"
    ip link del "$BRIDGE-$name" 2>/dev/null || true # the link of a killed machine may still exist
    ip link add "$BRIDGE-$name" master "$BRIDGE" up type veth \
      peer name eth0 address "$(card_of "$name")" netns "$(cat "$S/run/$name.pid")"
  done
  await "the nodes to take jobs" boot_done "$@"
}

boot_done() { # NAME...
  local name
  for name in "$@"; do
    alive "$name" || fail "$name ended right after its start: $(tail -n 3 "$S/log/$name.out"). The logs are in $S/log."
  done
  nodes_ready
}

client() { SLURM_CONF=$S/slurm.conf timeout 5 "$@"; }

# Whether every node that runs and has its link can take jobs, or already has some.
nodes_ready() {
  local name names=() states
  for name in $(machine_names); do
    alive "$name" || continue
    [ "$name" = ctl ] || ! plugged "$name" || names+=("$name")
  done
  alive ctl && plugged ctl && [ ${#names[@]} -gt 0 ] || return 0 # no controller, or no nodes
  states=$(client sinfo -hN -p main -n "$(IFS=,; echo "${names[*]}")" -o '%T' 2>/dev/null) || return 1
  [ "$(grep -cxE 'idle|mixed|allocated|completing|draining|drained' <<<"$states")" = ${#names[@]} ]
}

plugged() { (($(cat "/sys/class/net/$BRIDGE-$1/flags" 2>/dev/null || echo 0) & 1)); } # the link is not set down
