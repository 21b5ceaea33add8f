"""Our own trainer, close to the hardware: torch, transformers, PEFT and nothing between.

Read it in this order: `tokens` (rows on disk), `packing` and `order` (what is trained when), `batches` (to
the GPU in time), `losses` and `net` (the model and what it is asked), `optimizing` and `schedules` (how it
learns), `ranks` (several GPUs), `saving` (what survives), `loop` (all of it together).
"""
