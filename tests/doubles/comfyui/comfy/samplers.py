"""The way of every prediction."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from comfy.sd import ModelPatcher, merged


class CFGGuider:
    def __init__(self, model_patcher: ModelPatcher) -> None:
        self._patcher = model_patcher
        self._positive: Any = None
        self.cfg = 2.0

    def set_conds(self, positive: list[list[Any]], negative: list[list[Any]]) -> None:
        self._positive = positive

    def set_cfg(self, cfg: float) -> None:
        self.cfg = cfg

    def __call__(self, x: Tensor, timestep: Tensor, model_options: object = None, seed: int = 0) -> Tensor:
        return self._model.apply_model(x, timestep, self._positive[0][0])

    def sample(
        self,
        noise: Tensor,
        latent_image: Tensor,
        sampler: Any,
        sigmas: Tensor,
        disable_pbar: bool = False,
        seed: int = 0,
    ) -> Tensor:
        if self.cfg != 1.0:
            raise ValueError("the evaluation predicts without guidance")
        self._model = merged(self._patcher)
        extra = {"model_options": self._patcher.model_options, "seed": seed}
        latent = self._model.process_latent_in(latent_image)
        sampler.sample(self, sigmas, extra, None, noise, latent, None, disable_pbar)
        return latent_image
