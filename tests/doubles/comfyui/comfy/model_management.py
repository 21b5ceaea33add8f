"""The CPU, which needs no managing."""

import torch

#: Read by operations that have a fast form without gradients.
in_training = False


def get_torch_device() -> torch.device:
    return torch.device("cpu")


def unload_all_models() -> None:
    pass


def soft_empty_cache() -> None:
    pass
