# shellcheck shell=bash
# What the sbatch files share; they read it from the root of the clone, in which they are submitted.
# Each variable may be set before sbatch: NPROC=4 sbatch docker/slurm/one.sbatch ...

# Processes of a node: one for each of its GPUs, one on a node without.
NPROC=${NPROC:-${SLURM_GPUS_ON_NODE:-1}}
# An image for Apptainer that everything runs in.
SIF=${SIF-}
# Directories besides the clone and TMPDIR that the container sees: BIND=/scratch,/data
BIND=${BIND-}
# Without an image: the virtual environment that ./install.sh has made; VENV= for the megaenc that is in PATH already.
VENV=${VENV-.venv}
# Where the processes of several nodes meet: the job's first node,
MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
# at a port that goes with the job's number, below those that Linux gives out by itself.
MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}
# How often processes that died are started again inside the job.
MAX_RESTARTS=${MAX_RESTARTS:-3}
# With sbatch --no-kill: as many nodes are enough to go on, should others fail.
MIN_NODES=${MIN_NODES:-${SLURM_JOB_NUM_NODES:-1}}
((1 <= MIN_NODES && MIN_NODES <= ${SLURM_JOB_NUM_NODES:-1})) || {
  echo "error: MIN_NODES: found $MIN_NODES, expected 1 to ${SLURM_JOB_NUM_NODES:-1}, the nodes of the job (sbatch --nodes)" >&2
  exit 2
}
# Seconds that a save may take once the job is told that its time is nearly over; sbatch's --signal leaves a minute more.
SAVE_SECONDS=${SAVE_SECONDS:-540}

# torchrun's --shutdown-timeout, as a variable: torch 2.11 does not know the flag and leaves 30 seconds whatever is said.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=$SAVE_SECONDS
# Without it torchrun (PyTorch 2.13) goes on after a loss with the addresses of processes that are gone: docs/faults.md
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
# No module is imported from the directory that the job was submitted in.
export PYTHONSAFEPATH=1
# Several processes share the cores out by themselves, and torchrun remarks on the variable where it is not set; one has them all.
if ((NPROC > 1)); then export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}; fi

# `on_each_node` starts a command on every node, `here` on this one; `code` is where the examples are.
here=() code=.
if [ -n "$SIF" ]; then
  [ -e "$SIF" ] || {
    echo "error: SIF=$SIF: no such image; docs/clusters.md says how to build one, SIF=FILE names another" >&2
    exit 2
  }
  case ${TMPDIR:-/tmp} in
    /tmp | /tmp/*) ;; # which Apptainer lends by itself
    *) BIND=$TMPDIR${BIND:+,$BIND} ;;
  esac
  accelerator=()
  if [ -e /dev/kfd ]; then
    accelerator=(--rocm)
  elif [ -e /dev/nvidiactl ]; then
    accelerator=(--nv)
  fi
  # `run` reads the image's own docker/*_env.sh; read here too, it could not tell what was taken out (NAME=) from what was never set.
  here=(apptainer run "${accelerator[@]}" --bind "$PWD${BIND:+,$BIND}" --pwd "$PWD" "$SIF") code=/opt/megaenc
else
  if [ -n "$VENV" ]; then
    [ -x "$VENV/bin/torchrun" ] || {
      echo "error: VENV=$VENV has no torchrun: ./install.sh makes .venv, VENV=DIR names another, VENV= takes what is in PATH" >&2
      exit 2
    }
    PATH=$(realpath -s "$VENV")/bin:$PATH
  fi
  if [ -e /dev/kfd ]; then
    . docker/rocm_env.sh
  else
    . docker/cuda_env.sh
  fi
fi
# A task is a whole torchrun, whose processes share the cores out.
# shellcheck disable=SC2034 # the files use it
if ((MIN_NODES < SLURM_JOB_NUM_NODES)); then
  on_each_node=(srun --no-kill --kill-on-bad-exit=0 --cpu-bind=none "${here[@]}")
else
  on_each_node=(srun --kill-on-bad-exit=1 --cpu-bind=none "${here[@]}")
fi
# What the torchruns of several nodes need to find each other.
# shellcheck disable=SC2034
meeting=(--nnodes "$MIN_NODES:$SLURM_JOB_NUM_NODES" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT" --rdzv-id "$SLURM_JOB_ID")

# Without flags: the tiny preset on the demo corpus, in steps of two packs of each process.
if (($# == 0)); then set -- --micro-batch-size 2 --global-batch-size $((2 * NPROC * SLURM_JOB_NUM_NODES)); fi
# A requeued job keeps its number, so it goes on in the same directory.
case " $* " in
  *" --save "* | *" --save="*) ;;
  *) set -- "$@" --save "runs/$SLURM_JOB_NAME-$SLURM_JOB_ID" ;;
esac

# torchrun ends with 1 whatever its processes end with. What they ended with on purpose they leave in its directory of logs.
notes=$PWD/.jobs/$SLURM_JOB_ID
rm -rf "$notes"
mkdir -p "$notes" || exit 2

# The exit code of a launch that ended with $1.
exit_code() {
  local code=$1 note
  # srun fails if a node has, whatever becomes of the others.
  if ((MIN_NODES < SLURM_JOB_NUM_NODES)) && grep -qsx 0 "$notes"/*/attempt_*/megaenc_exit_code; then code=0; fi
  note=$(cat "$notes"/*/attempt_*/megaenc_exit_code 2>/dev/null | head -n 1)
  rm -rf "$notes"
  if ((code == 0)); then echo 0; else echo "${note:-$code}"; fi
}

# End the job where its time is so short that it would be told to save before it trains, and be requeued for ever.
enough_time() {
  local end least=$((SAVE_SECONDS + 300)) left
  end=$(squeue --noheader --jobs "$SLURM_JOB_ID" --format %e 2>/dev/null)
  end=$(date -d "${end:-unknown}" +%s 2>/dev/null) || return 0 # not known, or no limit
  left=$((end - $(date +%s)))
  ((left >= least)) || {
    echo "error: --time: found $left seconds, expected at least $least, SAVE_SECONDS and five minutes; a short job:" \
      "SAVE_SECONDS=60 sbatch --signal=B:USR1@90 --time 10 ..." >&2
    exit 2
  }
}

# Run a launcher, pass on what Slurm says, and end the job: requeued where the run was stopped and saved (75), else with the
# exit code of the run.
run() {
  local launched code ended=
  enough_time
  echo "$(date '+%F %T') job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)): $SLURM_JOB_NUM_NODES x $NPROC processes, $SLURM_JOB_NODELIST"
  "$@" &
  launched=$!
  # That time is nearly over (--signal=B:) is said to this script alone. An end (scancel, requeue, preemption) is said to every
  # process of the job; then the script waits, for Slurm kills what is left when it is gone.
  trap 'echo "$(date "+%F %T") job $SLURM_JOB_ID: time is nearly over, asking for a save"; kill -USR1 "$launched"' USR1
  trap 'ended=yes' TERM
  while kill -0 "$launched" 2>/dev/null; do wait "$launched"; done
  wait "$launched"
  code=$(exit_code $?)
  echo "$(date '+%F %T') job $SLURM_JOB_ID: ended with $code"
  # What is being ended is requeued by Slurm, or not to be requeued at all.
  if ((code == 75)) && [ -z "$ended" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
  exit "$code"
}
