"""A node that changes the shift of a model's levels."""

from typing import Any


class ModelSamplingAuraFlow:
    def patch_aura(self, model: Any, shift: float) -> tuple[Any]:
        shifted = model.clone()
        shifted.object_patches["model_sampling"] = shift
        return (shifted,)
