"""Published shapes of well-known base models: the reference for models known only by name or size."""

from __future__ import annotations

from typing import NamedTuple

from core.domain.units import parse_params
from core.models.facts import Family, MixerFacts, MoeFacts


class ModelRow(NamedTuple):
    """One published model. `params` counts tied embeddings once."""

    family: Family
    architecture: str
    params: int
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_position: int
    tied: bool
    gated: bool
    moe: MoeFacts | None
    #: (q_lora_rank or 0, kv_lora_rank) of multi-head latent attention.
    latent: tuple[int, int] | None
    mixer: MixerFacts | None


#: From the models' config.json files; a test recounts the parameters of each row.
#: family, architecture, parameters, layers, width, MLP, heads/kv heads, head width, vocabulary, context, then
#: tied (embeddings), plain (no MLP gate), moe=experts,per token,width,shared,dense layers, latent=q,kv ranks,
#: conv=layers with attention, mamba=width,heads,state,chunk. Of LFM2.5, Falcon-H1, MiniCPM5, Nanbeige and
#: Granite 4.1 some widths follow from the published number of parameters: their configs were not to be had.
_TABLE = """
llama     llama          1.1B  22  2048  5632    32/4  64  32000   2048
llama     llama        1.081B  24  1536  4608    16/2 128 130560 131072
llama     llama        1.236B  16  2048  8192    32/8  64 128256 131072 tied
llama     llama        3.213B  28  3072  8192    24/8 128 128256 131072 tied
llama     llama        3.933B  32  2560 10496    20/4 128 166144 131072
llama     llama        6.738B  32  4096 11008   32/32 128  32000   4096
llama     llama         8.03B  32  4096 14336    32/8 128 128256 131072
llama     llama       13.016B  40  5120 13824   40/40 128  32000   4096
llama     llama       32.529B  60  6656 17920   52/52 128  32000   2048
llama     llama       70.554B  80  8192 28672    64/8 128 128256 131072
llama     llama       405.85B 126 16384 53248   128/8 128 128256 131072
codellama llama        6.739B  32  4096 11008   32/32 128  32016  16384
codellama llama       13.016B  40  5120 13824   40/40 128  32016  16384
codellama llama       33.744B  48  8192 22016    64/8 128  32000  16384
codellama llama       68.977B  80  8192 28672    64/8 128  32016  16384
mistral   mistral      7.242B  32  4096 14336    32/8 128  32000  32768
mistral   mistral       8.02B  36  4096 12288    32/8 128 131072  32768
mistral   mistral     12.248B  40  5120 14336    32/8 128 131072 131072
mistral   mistral     22.247B  56  6144 16384    48/8 128  32768  32768
mistral   mistral     23.572B  40  5120 32768    32/8 128 131072  32768
mistral   mistral     122.61B  88 12288 28672    96/8 128  32768 131072
mixtral   mixtral     46.703B  32  4096 14336    32/8 128  32000  32768 moe=8,2,14336,0,0
mixtral   mixtral     140.62B  56  6144 16384    48/8 128  32768  65536 moe=8,2,16384,0,0
qwen      qwen2          494M  24   896  4864    14/2  64 151936  32768 tied
qwen      qwen2        1.544B  28  1536  8960    12/2 128 151936  32768 tied
qwen      qwen2        3.086B  36  2048 11008    16/2 128 151936  32768 tied
qwen      qwen2        7.616B  28  3584 18944    28/4 128 152064  32768
qwen      qwen2        14.77B  48  5120 13824    40/8 128 152064  32768
qwen      qwen2       32.764B  64  5120 27648    40/8 128 152064  32768
qwen      qwen2       72.706B  80  8192 29568    64/8 128 152064  32768
qwen      qwen3          596M  28  1024  3072    16/8 128 151936  40960 tied
qwen      qwen3        1.721B  28  2048  6144    16/8 128 151936  40960 tied
qwen      qwen3        4.022B  36  2560  9728    32/8 128 151936  40960 tied
qwen      qwen3        8.191B  36  4096 12288    32/8 128 151936  40960
qwen      qwen3       14.768B  40  5120 17408    40/8 128 151936  40960
qwen      qwen3       32.762B  64  5120 25600    64/8 128 151936  40960
qwen      qwen3_moe   30.532B  48  2048  6144    32/4 128 151936  40960 moe=128,8,768,0,0
qwen      qwen3_moe   235.09B  94  4096 12288    64/4 128 151936  40960 moe=128,8,1536,0,0
gemma     gemma3_text    268M  18   640  2048     4/1 256 262144  32768 tied
gemma     gemma3_text      1B  26  1152  6912     4/1 256 262144  32768 tied
gemma     gemma        2.506B  18  2048 16384     8/1 256 256000   8192 tied
gemma     gemma2       2.614B  26  2304  9216     8/4 256 256000   8192 tied
gemma     gemma3        3.88B  34  2560 10240     8/4 256 262208 131072 tied
gemma     gemma        8.538B  28  3072 24576   16/16 256 256000   8192 tied
gemma     gemma2       9.242B  42  3584 14336    16/8 256 256000   8192 tied
gemma     gemma3      11.766B  48  3840 15360    16/8 256 262208 131072 tied
gemma     gemma3      27.009B  62  5376 21504   32/16 128 262208 131072 tied
gemma     gemma2      27.227B  46  4608 36864   32/16 128 256000   8192 tied
phi       phi          1.418B  24  2048  8192   32/32  64  51200   2048 plain
phi       phi           2.78B  32  2560 10240   32/32  80  51200   2048 plain
phi       phi3         3.821B  32  3072  8192   32/32  96  32064 131072
phi       phi3         3.836B  32  3072  8192    24/8 128 200064 131072 tied
phi       phi3         13.96B  40  5120 17920   40/10 128  32064 131072
phi       phi3         14.66B  40  5120 17920   40/10 128 100352  16384
deepseek  llama        1.346B  24  2048  5504   16/16 128  32256  16384
deepseek  llama         6.74B  32  4096 11008   32/32 128  32256  16384
deepseek  llama         6.91B  30  4096 11008   32/32 128 102400   4096
deepseek  llama       33.343B  62  7168 19200    56/8 128  32256  16384
deepseek  deepseek_v2 15.706B  27  2048 10944   16/16 128 102400 163840 moe=64,6,1408,2,1 latent=0,512
deepseek  deepseek_v3 671.03B  61  7168 18432 128/128 128 129280 163840 moe=256,8,2048,1,3 latent=1536,512
falcon    falcon       7.217B  32  4544 18176    71/1  64  65024   2048 plain
falcon    falcon        41.3B  60  8192 32768   128/8  64  65024   2048 tied plain
pythia    gpt_neox      70.4M   6   512  2048     8/8  64  50304   2048 plain
pythia    gpt_neox     162.3M  12   768  3072   12/12  64  50304   2048 plain
pythia    gpt_neox     405.3M  24  1024  4096   16/16  64  50304   2048 plain
pythia    gpt_neox    1.0118B  16  2048  8192     8/8 256  50304   2048 plain
pythia    gpt_neox    1.4146B  24  2048  8192   16/16 128  50304   2048 plain
pythia    gpt_neox    2.7752B  32  2560 10240   32/32  80  50304   2048 plain
pythia    gpt_neox    6.8573B  32  4096 16384   32/32 128  50432   2048 plain
pythia    gpt_neox    11.846B  36  5120 20480   40/40 128  50688   2048 plain
pythia    gpt_neo      125.2M  12   768  3072   12/12  64  50257   2048 tied plain
pythia    gpt_neo     1.3156B  24  2048  8192   16/16 128  50257   2048 tied plain
pythia    gpt_neo     2.6513B  32  2560 10240   20/20 128  50257   2048 tied plain
gpt2      gpt2          81.9M   6   768  3072   12/12  64  50257   1024 tied plain
gpt2      gpt2         124.4M  12   768  3072   12/12  64  50257   1024 tied plain
gpt2      gpt2         354.8M  24  1024  4096   16/16  64  50257   1024 tied plain
gpt2      gpt2           774M  36  1280  5120   20/20  64  50257   1024 tied plain
gpt2      gpt2        1.5576B  48  1600  6400   25/25  64  50257   1024 tied plain
falcon    falcon_h1    521.4M  36  1024  2048     8/2  64  32784  16384 mamba=1536,24,128,128
falcon    falcon_h1   1.5548B  24  2048  4608     8/2 128  65537 131072 mamba=3072,48,256,128
falcon    falcon_h1   1.5549B  66  1280  3072     6/2 128  65537 131072 mamba=1536,24,256,128
falcon    falcon_h1    3.149B  32  2560  6144    10/2 128  65537 131072 mamba=4096,32,256,128
lfm       lfm2         229.6M  14  1024  2560    16/8  64  65536 128000 tied conv=6
lfm       lfm2         354.5M  16  1024  4608    16/8  64  65536 128000 tied conv=6
lfm       lfm2        1.1703B  16  2048  8192    32/8  64  65536 128000 tied conv=6
lfm       lfm2         2.697B  30  2048 10752    32/8  64 128000 128000 tied conv=8
opt       opt          125.2M  12   768  3072   12/12  64  50272   2048 tied plain
opt       opt          331.2M  24  1024  4096   16/16  64  50272   2048 tied plain
opt       opt         1.3158B  24  2048  8192   32/32  64  50272   2048 tied plain
opt       opt         2.6516B  32  2560 10240   32/32  80  50272   2048 tied plain
opt       opt         6.6585B  32  4096 16384   32/32 128  50272   2048 tied plain
opt       opt         12.853B  40  5120 20480   40/40 128  50272   2048 tied plain
bloom     bloom        559.2M  24  1024  4096   16/16  64 250880   2048 tied plain
bloom     bloom       1.0653B  24  1536  6144   16/16  96 250880   2048 tied plain
bloom     bloom       1.7224B  24  2048  8192   16/16 128 250880   2048 tied plain
bloom     bloom       3.0026B  30  2560 10240   32/32  80 250880   2048 tied plain
bloom     bloom        7.069B  30  4096 16384   32/32 128 250880   2048 tied plain
starcoder starcoder2    3.03B  30  3072 12288    24/2 128  49152  16384 tied plain
starcoder starcoder2   7.174B  32  4608 18432    36/4 128  49152  16384 tied plain
starcoder starcoder2  15.958B  40  6144 24576    48/4 128  49152  16384 plain
stablelm  stablelm     1.645B  24  2048  5632   32/32  64 100352   4096
stablelm  stablelm     2.795B  32  2560  6912   32/32  80  50304   4096
stablelm  stablelm    12.143B  40  5120 13824    32/8 160 100352   4096
olmo      olmo         1.177B  16  2048  8192   16/16 128  50304   2048 tied
olmo      olmo2        1.485B  16  2048  8192   16/16 128 100352   4096
olmo      olmo         6.888B  32  4096 11008   32/32 128  50304   2048
olmo      olmo2        7.299B  32  4096 11008   32/32 128 100352   4096
olmo      olmo2       13.716B  40  5120 13824   40/40 128 100352   4096
olmo      olmo2       32.234B  64  5120 27648    40/8 128 100352   4096
granite   granite      2.534B  40  2048  8192    32/8  64  49155   4096 tied
granite   granite      3.403B  40  2560  8192    40/8  64 100352 131072 tied
granite   granite      8.171B  40  4096 12800    32/8 128  49155   4096 tied
cohere    cohere2      8.028B  32  4096 14336    32/8 128 256000 132096 tied
cohere    cohere      34.981B  40  8192 22528   64/64 128 256000 131072 tied
internlm  internlm2    1.889B  24  2048  8192    16/8 128  92544  32768
internlm  internlm2    7.738B  32  4096 14336    32/8 128  92544  32768
internlm  internlm2   19.861B  48  6144 16384    48/8 128  92544  32768
glm       glm4           9.4B  40  4096 13696    32/2 128 151552  32768
glm       glm4        32.566B  61  6144 23040    48/2 128 151552  32768
smollm    llama        134.5M  30   576  1536     9/3  64  49152   8192 tied
smollm    llama        361.8M  32   960  2560    15/5  64  49152   8192 tied
smollm    llama       1.7114B  24  2048  8192   32/32  64  49152   8192 tied
smollm    smollm3     3.0751B  36  2048 11008    16/4 128 128256  65536 tied
yi        llama        6.061B  32  4096 11008    32/4 128  64000   4096
yi        llama        8.829B  48  4096 11008    32/4 128  64000   4096
yi        llama       34.389B  60  7168 20480    56/8 128  64000   4096
gpt-oss   gpt_oss      20.91B  24  2880  2880    64/8  64 201088 131072 moe=32,4,2880,0,0
gpt-oss   gpt_oss      116.8B  36  2880  2880    64/8  64 201088 131072 moe=128,4,2880,0,0
"""


def _row(line: str) -> ModelRow:
    family, architecture, params, layers, hidden, width, heads, head_dim, vocab, context, *flags = (
        line.split()
    )
    extra = dict(flag.partition("=")[::2] for flag in flags)
    queries, keys = heads.split("/")
    return ModelRow(
        family=Family(family),
        architecture=architecture,
        params=parse_params(params),
        layers=int(layers),
        hidden=int(hidden),
        intermediate=int(width),
        heads=int(queries),
        kv_heads=int(keys),
        head_dim=int(head_dim),
        vocab=int(vocab),
        max_position=int(context),
        tied="tied" in extra,
        gated="plain" not in extra,
        moe=_moe(extra.get("moe")),
        latent=_latent(extra.get("latent")),
        mixer=_mixer(extra, int(layers), int(hidden)),
    )


def _moe(text: str | None) -> MoeFacts | None:
    if text is None:
        return None
    experts, chosen, width, shared, dense = (int(part) for part in text.split(","))
    return MoeFacts(
        experts=experts,
        experts_per_token=chosen,
        expert_intermediate=width,
        shared_experts=shared,
        dense_layers=dense,
    )


def _latent(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    queries, keys = text.split(",")
    return int(queries), int(keys)


def _mixer(flags: dict[str, str], layers: int, hidden: int) -> MixerFacts | None:
    if "conv" in flags:
        attention = int(flags["conv"])
        return MixerFacts(layers=layers - attention, attention_layers=attention, inner=hidden)
    if "mamba" not in flags:
        return None
    inner, heads, state, chunk = (int(part) for part in flags["mamba"].split(","))
    return MixerFacts(
        layers=layers, attention_layers=layers, inner=inner, heads=heads, state=state, chunk=chunk
    )


MODEL_ROWS: tuple[ModelRow, ...] = tuple(_row(line) for line in _TABLE.strip().splitlines())
