"""Chat templates by the names that tasks use.

`chatml`, which nearly all of them name, is ours; `tokenizer_default` is the model's own; the others are those
of the installed Axolotl, which evaluation takes them from as well.
"""

from __future__ import annotations

import importlib

from trainer.errors import BadData, BadModel
from trainer.inputs.tokens import Tokenizer

CHATML = (
    "{% if add_generation_prompt is not defined %}{% set add_generation_prompt = false %}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATML_NAME = "chatml"
OWN = "tokenizer_default"
OWN_OR = "tokenizer_default_fallback_"


def template_of(name: str, tokenizer: Tokenizer) -> str:
    """The template's text. A fallback has none of its own: evaluation knows no template of such a name."""
    if name == OWN or name.startswith(OWN_OR):
        own = tokenizer.chat_template
        if isinstance(own, dict):
            own = own.get("default")
        if isinstance(own, str) and own:
            return own
        if name == OWN:
            raise BadModel("the task names the tokenizer's own chat template, and the tokenizer has none")
        name = name.removeprefix(OWN_OR)
    if name == CHATML_NAME:
        return CHATML
    try:
        engine = importlib.import_module("axolotl.utils.chat_templates")
    except ImportError as error:
        raise BadData(f"{name[:100]!r} is Axolotl's chat template, which is not installed here") from error
    try:
        return str(engine.get_chat_template(name))
    except ValueError as error:
        raise BadData(f"{name[:100]!r} is no chat template that evaluation knows") from error
