#!/usr/bin/env bash
#SBATCH --job-name=sigmaens
#SBATCH --time=04:00:00
#SBATCH --cpus-per-task=4
#SBATCH --gres=gpu:1
#SBATCH --requeue
#SBATCH --open-mode=append
# A sweep as a SLURM job array, one cell of the pipeline a job. In bash, in the project's folder, where `make env` has run,
# code and DVC remote are committed, and `dvc push --run-cache` has sent the data:
#
#     cells=($(dvc stage list --name-only | grep -E '^(train|sweep_)'))
#     sbatch --array=1-${#cells[@]} examples/slurm_sweep.sh "${cells[@]}"
#
# and when all are done, `make paper REPRO_FLAGS=--pull` takes their outputs from the remote and runs what is left. What
# needs other cells comes in later arrays: finetune, then evaluate (sbatch --dependency=afterok:JOB).
#
# Each job works in a clone of its own below SWEEP_DIR, which must outlive the job: a job that was killed and starts again
# goes on there from its last epoch. The clone goes once its cell is in the remote.
set -euo pipefail

cell=${!SLURM_ARRAY_TASK_ID:?no cell of this number, only $# are given}
clone=${SWEEP_DIR:-$SLURM_SUBMIT_DIR.sweep}/$cell
export DVC_NO_ANALYTICS=true PATH="$SLURM_SUBMIT_DIR/.venv/bin:$PATH"

[[ -d $clone ]] || git clone --quiet --no-checkout "$SLURM_SUBMIT_DIR" "$clone"
cd "$clone"
git fetch --quiet origin HEAD
git reset --quiet --hard FETCH_HEAD
rm -f .dvc/tmp/rwlock  # of a job that was killed: nobody else works in this clone
dvc config core.remote >/dev/null || { echo "no DVC remote is committed in $SLURM_SUBMIT_DIR" >&2; exit 1; }
dvc repro --pull "$cell"
dvc push --run-cache "$cell"
rm -rf "$clone"
