#!/usr/bin/env bash
# A Slurm of one's own on this machine, to try god-miner on and to test it with: a controller and a few nodes on
# loopback, as any user, without systemd. The nodes' CPUs, memory and GPUs are pretended.
#
#   scripts/one_machine_slurm.sh up DIR [options]     start it, or start again what of it does not run
#   scripts/one_machine_slurm.sh status DIR           show its daemons, nodes and jobs
#   scripts/one_machine_slurm.sh down DIR             end its jobs and its daemons; DIR stays
#
#   --port N          controller's port, the nodes' follow it (16817)
#   --nodes N         how many nodes: n1, n2, ... (2)
#   --gpus N          GPUs of each node, 0 to 4 (4)
#   --gpu-type NAME   as Slurm is to call them (h100)
#   --cpus N          of each node (8)
#   --memory N        MiB of each node (16000)
#   --set NAME=VALUE  a line of slurm.conf, in the place of ours: MinJobAge=2, SlurmdTimeout=300 (may be repeated)
#
# Needs Debian's slurmctld, slurmd, slurm-client and munge, and no daemon of theirs: `apt-get install
# --no-install-recommends` with RUNLEVEL=1 starts none. Options count when DIR is new; commands then need
# `export SLURM_CONF=DIR/etc/slurm.conf`.
set -euo pipefail
export PATH=$PATH:/usr/sbin:/sbin

fail() {
    echo "$*" >&2
    exit 1
}

usage() {
    sed -n 's/^# \{0,1\}//; 2,19p' "$0" >&2
    exit 2
}

configure() {
    local port=16817 nodes=2 gpus=4 type=h100 cpus=8 memory=16000 given=() one number host user
    while [ $# -gt 1 ]; do
        case $1 in
            --port) port=$2 ;;
            --nodes) nodes=$2 ;;
            --gpus) gpus=$2 ;;
            --gpu-type) type=$2 ;;
            --cpus) cpus=$2 ;;
            --memory) memory=$2 ;;
            --set) given+=("$2") ;;
            *) usage ;;
        esac
        shift 2
    done
    [ $# -eq 0 ] || usage
    [ "$gpus" -le 4 ] || fail "--gpus is $gpus: there are devices to pretend 4"
    host=$(hostname -s)
    user=$(id -un)
    mkdir -p "$place"/{etc,state,log,run}
    (
        umask 077
        head -c 128 /dev/urandom >"$place/etc/munge.key"
    )
    {
        # A plain Slurm keeps to its own process table here: cgroups need root and a machine to oneself.
        cat <<CONF
ClusterName=one-machine
SlurmctldHost=$host(127.0.0.1)
SlurmctldPort=$port
SlurmUser=$user
SlurmdUser=$user
AuthType=auth/munge
AuthInfo=socket=$place/run/munge.sock
CredType=cred/munge
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmctldPidFile=$place/run/slurmctld.pid
SlurmdPidFile=$place/run/%n.pid
StateSaveLocation=$place/state
SlurmdSpoolDir=$place/spool-%n
SlurmctldLogFile=$place/log/slurmctld
SlurmdLogFile=$place/log/%n
SlurmctldTimeout=30
SlurmdTimeout=30
MinJobAge=300
KillWait=5
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
GresTypes=gpu
CONF
        for ((number = 1; number <= nodes; number++)); do
            echo "NodeName=n$number NodeHostname=$host NodeAddr=127.0.0.1 Port=$((port + number))" \
                "CPUs=$cpus RealMemory=$memory$([ "$gpus" -eq 0 ] || echo " Gres=gpu:$type:$gpus")"
        done
        echo "PartitionName=train Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
    } >"$place/etc/new.conf"
    for one in ${given[@]+"${given[@]}"}; do
        sed -i "/^${one%%=*}=/d" "$place/etc/new.conf"
        echo "$one" >>"$place/etc/new.conf"
    done
    # A GPU needs a character device, and any will do: a mere count is read as none, and the node is drained.
    local devices=(null zero full urandom)
    for one in "${devices[@]:0:gpus}"; do
        echo "Name=gpu Type=$type File=/dev/$one"
    done >"$place/etc/gres.conf"
    mv "$place/etc/new.conf" "$SLURM_CONF"
}

# The names of the nodes, one a line.
nodes() {
    sed -n 's/^NodeName=\([^ ]*\).*/\1/p' "$SLURM_CONF"
}

# Whether a daemon runs, by the number in its file: after a kill that may be somebody else's by now.
runs() {
    local pid
    pid=$(cat "$place/run/$1.pid" 2>/dev/null) && grep -qs "$place/" "/proc/$pid/cmdline"
}

up() {
    local name
    for name in munged slurmctld slurmd sinfo; do
        command -v $name >/dev/null ||
            fail "there is no $name: apt-get install --no-install-recommends slurmctld slurmd slurm-client munge"
    done
    [ -f "$SLURM_CONF" ] || configure "$@"
    # The number of a process that is gone, and that another may have now, keeps it from starting.
    runs munged || {
        rm -f "$place/run/munged.pid"
        munged --force --key-file="$place/etc/munge.key" --socket="$place/run/munge.sock" \
            --pid-file="$place/run/munged.pid" --log-file="$place/log/munged" --seed-file="$place/run/seed"
    }
    runs slurmctld || slurmctld -f "$SLURM_CONF"
    for name in $(nodes); do
        runs "$name" || slurmd -f "$SLURM_CONF" -N "$name"
    done
    for _ in $(seq 600); do
        sinfo -h -N -o %T 2>/dev/null | grep -qvE '^(idle|mixed|allocated|completing|draining|drained|down)$' || break
        sleep 0.05
    done
}

# The daemons, and what slurmd starts for each step of a job: all that has a file below DIR/log open.
daemons() {
    find /proc/[0-9]*/fd -lname "$place/log/*" 2>/dev/null | cut -d/ -f3 | sort -u
}

# What runs in jobs. A shell of the user's may have SLURM_CONF too.
in_jobs() {
    grep -lszx "SLURM_CONF=$SLURM_CONF" /proc/[0-9]*/environ 2>/dev/null |
        xargs -r grep -lsz "^SLURM_JOB_ID=" 2>/dev/null | cut -d/ -f3
}

down() {
    local all
    # Again: what was being started meanwhile, or was somebody's child.
    for _ in $(seq 50); do
        all=$({ daemons; in_jobs; } || true)
        [ -n "$all" ] || break
        kill -9 $all 2>/dev/null || true
    done
    rm -f "$place"/run/*.pid
}

status() {
    local name
    [ -f "$SLURM_CONF" ] || fail "there is no Slurm in $place: one_machine_slurm.sh up $place"
    for name in munged slurmctld $(nodes); do
        echo "$name: $(runs "$name" && echo runs || echo 'does not run')"
    done
    runs munged && runs slurmctld || return 1
    sinfo -N -o '%N %T %G %c %m %E'
    squeue
}

[ $# -ge 2 ] || usage
action=$1
place=$(mkdir -p "$2" && cd "$2" && pwd)
shift 2
export SLURM_CONF=$place/etc/slurm.conf
case $action in
    up) up "$@" ;;
    down) down ;;
    status) status ;;
    *) usage ;;
esac
