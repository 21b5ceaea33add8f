"""A stand-in for ai-toolkit in an image: a checkout whose trainings write real files, and whose base and LoRA
can be scored. The base leaves noise as it is; a LoRA takes it away.
"""

from __future__ import annotations

from tests.trainer.runner.engines import COMMON, TOOLKIT

CONFIG = """
import yaml


def get_config(path):
    with open(path) as file:
        return yaml.safe_load(file)
"""
CONFIG_MODULES = """
class Values:
    def __init__(self, **given):
        self.__dict__.update(given)


class TrainConfig(Values):
    dtype = "bf16"


class ModelConfig(Values):
    pass


class NetworkConfig(Values):
    type = "lora"
    linear = conv = conv_alpha = None
    transformer_only = True

    def __init__(self, **given):
        self.network_kwargs = {}
        super().__init__(**given)
"""
GET_MODEL = """
import torch


class Vae:
    def requires_grad_(self, wanted):
        return self


class Model:
    is_flux, is_transformer, assistant_lora = False, True, None
    torch_dtype = vae_torch_dtype = torch.float32

    def __init__(self, device, model_config, dtype, noise_scheduler):
        self.device_torch = self.vae_device_torch = torch.device(device)
        self.path = model_config.name_or_path

    @staticmethod
    def get_train_scheduler():
        return None

    def load_model(self):
        open(self.path, "rb").close()
        self.unet, self.vae = torch.nn.Linear(1, 1), Vae()

    def get_model_to_train(self):
        return self.unet

    def encode_prompt(self, text):
        return text

    def encode_images(self, pictures):
        return torch.nn.functional.avg_pool2d(torch.stack(pictures), 8)

    def decode_latents(self, latents, device, dtype):
        return torch.nn.functional.interpolate(latents, scale_factor=8)

    def predict_noise(self, latents, timestep, **more):
        network = self.unet.network
        return latents / (timestep / 1000) if network.is_active and network.learned else latents * 0


def get_model_class(model_config):
    return Model
"""
LORA = """
class LoRASpecialNetwork:
    is_active, learned = False, False

    def __init__(self, **given):
        self.unet = given["unet"]

    def apply_to(self, text_encoder, unet, *which):
        self.unet.network = self

    def ignore(self, *given, **more):
        pass

    force_to = _update_torch_multiplier = requires_grad_ = eval = ignore

    def get_all_modules(self):
        return [self]

    def reset_weights(self):
        self.learned = False

    def load_weights(self, weights):
        self.learned = any(bool(one.any()) for name, one in weights.items() if "lora_B" in name)
"""
#: By their paths in a checkout.
FILES = {
    "run.py": COMMON + TOOLKIT,
    "toolkit/__init__.py": "",
    "toolkit/config.py": CONFIG,
    "toolkit/config_modules.py": CONFIG_MODULES,
    "toolkit/lora_special.py": LORA,
    "toolkit/unloader.py": "def unload_text_encoder(base):\n    pass\n",
    "toolkit/util/__init__.py": "",
    "toolkit/util/get_model.py": GET_MODEL,
}
