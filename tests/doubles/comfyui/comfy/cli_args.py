"""What ComfyUI's command line would have said."""

from types import SimpleNamespace

args = SimpleNamespace(cpu=False, use_pytorch_cross_attention=False)
