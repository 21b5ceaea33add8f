"""A stand-in for ComfyUI: the same interface as far as the picture trainer uses it, around a tiny flow model.

`comfy.sd` has the models and the loader of adapters, `comfy.samplers` the way through which they predict.
"""
