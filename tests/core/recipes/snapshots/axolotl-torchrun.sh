#!/bin/sh
# Paths are those of a run in its container.
export AXOLOTL_DO_NOT_TRACK=1
export DO_NOT_TRACK=1
export HF_DATASETS_OFFLINE=1
export HF_HOME=/run/work/hf
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
export TORCHINDUCTOR_CACHE_DIR=/run/work/inductor
export TORCH_FR_BUFFER_SIZE=2000
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export TORCH_NCCL_DUMP_ON_TIMEOUT=1
export TRANSFORMERS_OFFLINE=1
export TRITON_CACHE_DIR=/run/work/triton
export WANDB_MODE=offline
exec torchrun --standalone --nproc-per-node 4 -m axolotl.cli.train /run/config/config.yml
