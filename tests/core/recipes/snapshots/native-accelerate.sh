#!/bin/sh
# Paths are those of a run in its container.
export AXOLOTL_DO_NOT_TRACK=1
export DO_NOT_TRACK=1
export HF_HOME=/run/work/hf
export OMP_NUM_THREADS=4
export PET_LOCAL_ADDR=127.0.0.1
export PYTHONUNBUFFERED=1
export PYTORCH_ALLOC_CONF=expandable_segments:True
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
export TOKENIZERS_PARALLELISM=false
export TORCHINDUCTOR_CACHE_DIR=/run/work/inductor
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1
export TRITON_CACHE_DIR=/run/work/triton
export WANDB_MODE=offline
exec accelerate launch --multi_gpu --num_processes 8 --num_machines 1 --machine_rank 0 --main_process_port 29511 -m trainer.native /run/config/plan.json
