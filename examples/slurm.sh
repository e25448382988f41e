#!/bin/bash
# Train one method of a profile on two nodes of four GPUs each, then write its results as `dvc repro` does:
#
#     sbatch examples/slurm.sh STAGE PROFILE METHOD      e.g.  sbatch examples/slurm.sh train_vision imagenet sigma
#                                                        or    sbatch examples/slurm.sh finetune cifar10 finetune
#
# Submit it from the project's folder, which all nodes must see; jobs of this script may share it, and take turns at DVC. Sweeps
# are cells for slurm_sweep.sh. A job that was killed, or ran into its time limit, goes on
# after its last whole epoch when it is submitted again, on as many nodes as you like. Where nodes cannot reach the
# internet, run `dvc repro data@PROFILE` before.
#SBATCH --job-name=sigmaens
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1     # torchrun, which starts a process for each GPU of its node
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32      # 8 for each GPU, which decode images
#SBATCH --time=24:00:00
#SBATCH --requeue               # after a node failed
#SBATCH --output=slurm-%j.txt
#SBATCH --open-mode=append      # to it when it starts again
set -euo pipefail

stage=${1:?a stage of dvc.yaml, for example train_vision} profile=${2:?a profile} method=${3:?a method}
cell=$stage@$profile-$method
[[ $stage != finetune ]] || cell=finetune@$profile
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1

# DVC refuses to start while another one works in this folder, or was killed there.
in_turn() {
    mkdir -p .dvc/tmp
    flock .dvc/tmp/slurm.lock bash -c 'rm -f .dvc/tmp/rwlock; exec dvc "$@"' -- "$@"
}

in_turn repro clean "data@$profile"
in_turn repro --dry --single-item "$cell" > /dev/null   # is there such a stage?
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

# Every node runs the same line; the processes find each other through the first node.
srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" torchrun \
    --nnodes="$SLURM_JOB_NUM_NODES" \
    --nproc-per-node=gpu \
    --rdzv-id="$SLURM_JOB_ID" \
    --rdzv-backend=c10d \
    --rdzv-endpoint="${nodes[0]}:$((20000 + SLURM_JOB_ID % 10000))" \
    -m sigmaens.training "$profile" "$method"

# The stage's notebook finds the networks trained: it predicts, and writes weights, history and itself.
in_turn repro --single-item "$cell"
