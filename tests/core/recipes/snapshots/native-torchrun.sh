#!/bin/sh
# Paths are those of a run in its container.
set -eu
RUN="${1:?run.sh RUN: the folder of a run, as god-miner train native --write-only makes it}"
export AXOLOTL_DO_NOT_TRACK=1
export DO_NOT_TRACK=1
export HF_DATASETS_DISABLE_PROGRESS_BARS=1
export HF_DATASETS_OFFLINE=1
export HF_HUB_DISABLE_PROGRESS_BARS=1
export HF_HUB_OFFLINE=1
export NCCL_DEBUG=WARN
export OMP_NUM_THREADS=4
export PET_LOCAL_ADDR=127.0.0.1
export PYTHONPATH=/opt/god-miner
export PYTHONSAFEPATH=1
export PYTHONUNBUFFERED=1
export PYTORCH_ALLOC_CONF=expandable_segments:True
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TOKENIZERS_PARALLELISM=false
export TORCH_FR_BUFFER_SIZE=2000
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TQDM_DISABLE=1
export TRANSFORMERS_OFFLINE=1
export WANDB_MODE=offline
export HF_HOME="$RUN/work/hf"
export TORCHINDUCTOR_CACHE_DIR="$RUN/work/inductor"
export TORCH_FR_DUMP_TEMP_FILE="$RUN/work/collectives_rank_"
export TRITON_CACHE_DIR="$RUN/work/triton"
GOD_MINER_LAUNCH_SPEC="$(python -m trainer.native.external_launch "$RUN/run.json")"
export GOD_MINER_LAUNCH_SPEC
torchrun --standalone --nproc-per-node 8 -m trainer.native || true
exec python -m trainer.native.external_launch "$RUN/run.json" --over
