"""Train on what is measured: adapters of picture models, by the evaluation's own loss in its own stack.

`train.py` reads from top to bottom as the training. It needs torch, transformers and a checkout of ComfyUI.
"""
