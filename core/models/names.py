"""Read a model's name: family, architecture, size."""

from __future__ import annotations

import re
from typing import TypeVar

from core.models.facts import Family

#: No model outside this range has been published: such a count means nothing.
LEAST_PARAMS, MOST_PARAMS = 10**6, 5 * 10**12
T = TypeVar("T")


def _table(*rows: tuple[str, T]) -> tuple[tuple[re.Pattern[str], T], ...]:
    """Compile the patterns: every offer's name is matched against all of them."""
    return tuple((re.compile(part), value) for part, value in rows)


#: Patterns for families, most specific first: a distilled Qwen is a Qwen, whoever distilled it.
_FAMILY_NAMES = _table(
    (r"mixtral|8x7b|8x22b", Family.MIXTRAL),
    (r"gpt-?oss", Family.GPT_OSS),
    (r"code-?llama", Family.CODELLAMA),
    (r"qwen|qwq", Family.QWEN),
    (r"smollm", Family.SMOLLM),
    (r"(?<![a-z])lfm-?\d", Family.LFM),
    (r"llama|minicpm-?5|nanbeige-?4|vicuna|alpaca|nous-hermes", Family.LLAMA),
    (r"mistral|ministral|zephyr|nemo(?!tron)|codestral|devstral", Family.MISTRAL),
    (r"gemma", Family.GEMMA),
    (r"deepseek", Family.DEEPSEEK),
    (r"(?<![a-z])phi", Family.PHI),
    (r"falcon", Family.FALCON),
    (r"pythia|gpt-?neo|gpt-?j", Family.PYTHIA),
    (r"gpt-?2", Family.GPT2),
    (r"\bopt\b", Family.OPT),
    (r"bloom", Family.BLOOM),
    (r"starcoder", Family.STARCODER),
    (r"stablelm|stable-code|stable-lm", Family.STABLELM),
    (r"olmo", Family.OLMO),
    (r"granite", Family.GRANITE),
    (r"cohere|command|\baya\b|c4ai", Family.COHERE),
    (r"internlm", Family.INTERNLM),
    (r"glm", Family.GLM),
    (r"\byi\b", Family.YI),
)
#: Architectures that names distinguish within a family.
_VARIANTS = _table(
    (r"qwen3.*a\d+b", "qwen3_moe"),
    (r"qwen3", "qwen3"),
    (r"qwen", "qwen2"),
    (r"gemma-?3", "gemma3"),
    (r"gemma-?2(?!b)", "gemma2"),
    (r"gemma", "gemma"),
    (r"phi-?[34]", "phi3"),
    (r"phi", "phi"),
    (r"gpt-?neo(?!x)", "gpt_neo"),
    (r"olmo-?2", "olmo2"),
    (r"falcon-?h1", "falcon_h1"),
)
#: Names that state another size than the model has.
_ROUNDED_SIZES = _table(
    (r"llama-?3\.2-?1b", 1.236e9),
    (r"gemma-?2-2b", 2.614e9),
    (r"gemma-?2b", 2.506e9),
    (r"gemma-?7b", 8.538e9),
    (r"olmo-?2.*-1b", 1.485e9),
    (r"olmo-?1b", 1.177e9),
    (r"granite.*-2b", 2.534e9),
    (r"granite-?4\.1.*-3b", 3.403e9),
    (r"lfm-?2\.5.*-1\.2b", 1.17e9),
    (r"lfm-?2\.5.*-2\.6b", 2.697e9),
    (r"falcon-?h1.*-1\.5b-deep", 1.5549e9),
    (r"falcon-?h1.*-1\.5b", 1.5548e9),
    (r"falcon-?h1.*-3b", 3.149e9),
    (r"minicpm-?5.*-1b", 1.081e9),
    (r"minicpm-?5.*-2b", 2.52e9),
    (r"nanbeige-?4.*-3b", 3.933e9),
    (r"kanana-?2-3b", 3.509e9),
)
#: Well-known names that do not state their size.
_UNSTATED_SIZES = _table(
    (r"tinyllama", 1.1e9),
    (r"distilgpt-?2", 0.082e9),
    (r"gpt-?2-?xl", 1.558e9),
    (r"gpt-?2-?large", 0.774e9),
    (r"gpt-?2-?medium", 0.355e9),
    (r"gpt-?2", 0.124e9),
    (r"phi-?1", 1.418e9),
    (r"phi-?2", 2.78e9),
    (r"phi-?(3|3\.5|4)-?mini", 3.82e9),
    (r"phi-?3-?medium|phi-?4", 14.66e9),
    (r"mistral-?nemo", 12.25e9),
    (r"mistral-?small", 23.57e9),
    (r"mistral-?large", 122.6e9),
    (r"deepseek.*(r1|v3)", 671e9),
)
#: 7b, 1.5B, 135M, 8x7B, 1b7 (BLOOM's way), not 4bit, a3b or v0.1.
_SIZE = re.compile(r"(?<![a-z0-9.])(?:(\d{1,3})x)?(\d{1,4}(?:\.\d{1,3})?)([bm])(\d)?(?![a-z0-9]|\.\d)")
_INNER = re.compile(r"(?<=\d)_(?=\d)")


def family_from_name(model_id: str) -> Family:
    """Match the repository's own name first: its owner may be named after another family."""
    low = model_id.lower().replace("_", "-")
    for text in (low.rpartition("/")[2], low):
        for part, family in _FAMILY_NAMES:
            if part.search(text):
                return family
    return Family.UNKNOWN


def params_from_name(model_id: str) -> int | None:
    """The largest size that the name states: "72B-distilled-7B" planned as 7B might not fit, a 7B planned as
    72B only wastes GPUs."""
    low = _plain(model_id)
    sizes = (_named_size(match) for match in _SIZE.finditer(low))
    sane = [size for size in sizes if LEAST_PARAMS <= size <= MOST_PARAMS]
    table = _ROUNDED_SIZES if len(sane) == 1 else () if sane else _UNSTATED_SIZES
    known = next((round(size) for part, size in table if part.search(low)), None)
    return known or max(sane, default=None)


def _plain(model_id: str) -> str:
    """The repository's own name; `stablelm-2-1_6b` means 1.6b."""
    low = model_id.lower().rpartition("/")[2]
    return _INNER.sub(".", low).replace("_", "-")


def _named_size(match: re.Match[str]) -> int:
    experts, number, letter, tail = match.groups()
    size = float(f"{number}.{tail}" if tail else number) * (1e9 if letter == "b" else 1e6)
    # Experts share the attention: 8x7B is 46.7B, not 56B.
    return round(size * (int(experts) * 0.83 if experts else 1))


def architecture_from_name(model_id: str) -> str | None:
    """The architecture within the family, where the name states it."""
    low = model_id.lower().replace("_", "-")
    return next((name for part, name in _VARIANTS if part.search(low)), None)


def usable_count(params_count: int | None) -> int | None:
    """The count, unless no model can have it. Offers have stated 0."""
    ok = params_count is not None and LEAST_PARAMS <= params_count <= MOST_PARAMS
    return params_count if ok else None
