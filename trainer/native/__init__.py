"""Our own trainer: torch, transformers, PEFT and nothing between.

Start with `train`: it is the training from top to bottom. What it uses: `model` (with its losses), `lora`,
`optimizer` (and one step), `distributed`, `batches` over `trainer.inputs.token_file`, `evaluation`,
`checkpoints`, `speed`. Programs of their own: `new_model`, `trace`. See docs/native.md."""
