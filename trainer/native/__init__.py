"""Our own trainer, close to the hardware: torch, transformers, PEFT and nothing between.

Read it in this order: `tokens` and `corpus` (rows on disk), `packing` and `order` (what is trained when),
`batches` (to the GPU in time), `losses` and `net` (the model and what it is asked), `optimizing` (how its
weights move), `ranks` (several GPUs), `step` (one step of all that), `judging` (what it scores), `saving`
(what survives), `loop` (steps, and what is ordered between them). `parts` puts a run together, with `speed`
and `fit` for this GPU; `__main__` is one process of it, under the eyes of `watch`. `measure` tells
which settings are fastest here. docs/native.md tells the rest.
"""
