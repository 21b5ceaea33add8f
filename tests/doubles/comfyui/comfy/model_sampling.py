"""How a prediction becomes a picture."""

from torch import Tensor


class CONST:
    noise_scale = 1.0

    def calculate_denoised(self, sigma: Tensor, output: Tensor, given: Tensor) -> Tensor:
        return given - output * sigma.view(-1, *[1] * (given.ndim - 1))


class EPS(CONST):
    pass
