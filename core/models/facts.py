"""Facts about a base model: family, parameters, shape, and how certain each of them is."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from core.domain.choices import Attention
from core.domain.records import Confidence, Record, weakest_confidence
from core.domain.tasks import ImageModelType


class Family(StrEnum):
    """A model family, as operators and policies name it. `ModelFacts.architecture` is more exact."""

    LLAMA = "llama"
    CODELLAMA = "codellama"
    MISTRAL = "mistral"
    MIXTRAL = "mixtral"
    QWEN = "qwen"
    GEMMA = "gemma"
    PHI = "phi"
    DEEPSEEK = "deepseek"
    FALCON = "falcon"
    PYTHIA = "pythia"
    GPT2 = "gpt2"
    LFM = "lfm"
    OPT = "opt"
    BLOOM = "bloom"
    STARCODER = "starcoder"
    STABLELM = "stablelm"
    OLMO = "olmo"
    GRANITE = "granite"
    COHERE = "cohere"
    INTERNLM = "internlm"
    GLM = "glm"
    SMOLLM = "smollm"
    YI = "yi"
    GPT_OSS = "gpt-oss"
    SDXL = "sdxl"
    FLUX = "flux"
    Z_IMAGE = "z-image"
    QWEN_IMAGE = "qwen-image"
    IDEOGRAM = "ideogram"
    KREA = "krea"
    UNKNOWN = "unknown"


#: Architectures of transformers 5 without flash attention (GPT-OSS has it only as a kernel of the hub), and
#: those without torch's own attention as well.
_NO_FLASH = frozenset({"llama4", "llama4_text", "deepseek_v32", "glm_moe_dsa", "doge", "blt", "axk2"})
_EAGER_ONLY = frozenset(
    {"bloom", "mpt", "codegen", "openai-gpt", "gpt_neox_japanese", "gpt_oss", "granite_swa", "granitemoe_swa"}
    | {"mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm", "xlnet", "xlm", "xglm", "cpmant", "deepseek_v4"}
    | {"big_bird", "roformer", "rembert", "reformer", "megatron-bert", "mimo_v2_flash"}
)
#: Architectures that carry a state (linear attention, a state space, a convolution) from token to token, and
#: with it from one packed row into the next.
_CARRIES_STATE = frozenset(
    {
        "qwen3_5",
        "qwen3_5_text",
        "qwen3_5_moe",
        "qwen3_5_moe_text",
        "qwen3_next",
        "qwen4_exp",
        "qwen4_exp_text",
    }
    | {"lfm2", "lfm2_moe", "falcon_h1", "granitemoehybrid", "nemotron_h", "olmo_hybrid", "bamba", "jamba"}
    | {"zamba", "zamba2", "zaya", "minimax", "inkling", "inkling_text", "recurrent_gemma", "bailing_hybrid"}
)
#: Those whose attention does not see where a packed row begins: in flash attention (Ministral 3), or in
#: torch's own (OPT), which takes its place where flash attention is missing.
_SEES_NO_ROWS = frozenset(
    {"ministral3", "mistral4", "gpt_bigcode", "persimmon", "fuyu", "moshi", "ctrl"}
    | {"opt", "biogpt", "afmoe", "falcon"}
)
#: Architectures with a head that is more than a matrix and a factor: it has a bias, or is scaled otherwise.
_OTHER_HEAD = frozenset({"phi", "gptj", "codegen", "ctrl", "hyperclovax", "muse_glimmer"})
#: Layers that PEFT refuses an adapter: Mamba's fused kernel takes their weights and passes the adapter by.
_NO_ADAPTER = dict.fromkeys(
    ("falcon_h1", "nemotron_h", "mamba", "mamba2", "falcon_mamba"), frozenset({"out_proj", "conv1d"})
)
#: The widest head that flash attention supports.
_FLASH_HEAD = 256


class MoeFacts(Record):
    """A mixture of experts, as far as memory and time need it."""

    experts: int = Field(ge=1)
    experts_per_token: int = Field(ge=1)
    #: Width of one routed expert's MLP; `ModelFacts.intermediate` is that of the dense layers.
    expert_intermediate: int = Field(ge=1)
    shared_experts: int = Field(default=0, ge=0)
    #: Layers with an ordinary MLP instead of experts.
    dense_layers: int = Field(default=0, ge=0)


class MixerFacts(Record):
    """A token mixer in the place of attention or beside it: a gated short convolution, or Mamba-2."""

    #: Layers that have it, and layers with attention; all of Falcon-H1's have both.
    layers: int = Field(ge=1)
    attention_layers: int = Field(ge=0)
    #: Its width; Mamba-2's heads, their states, groups of heads, and tokens of a chunk. Without heads it is a
    #: convolution.
    inner: int = Field(ge=1)
    heads: int = Field(default=0, ge=0)
    state: int = Field(default=0, ge=0)
    groups: int = Field(default=1, ge=1)
    chunk: int = Field(default=0, ge=0)

    @property
    def projected(self) -> int:
        """Outputs of its first projection: two gates and the input, or gate, input, B, C and steps."""
        if not self.heads:
            return 3 * self.inner
        return 2 * self.inner + 2 * self.groups * self.state + self.heads


class ImageFacts(Record):
    """A diffusion model: the part that is trained, and the frozen parts that take memory beside it."""

    image_type: ImageModelType
    #: Of the U-Net or transformer that is trained (or carries the adapter).
    backbone_params: int = Field(ge=0)
    text_encoder_params: int = Field(ge=0)
    vae_params: int = Field(ge=0)
    #: Tokens (or latent positions) that attention sees of one 1024×1024 picture with its prompt.
    tokens_at_1024: int = Field(ge=1)
    #: Adapter parameters per unit of rank: of the backbone, and of the text encoders when they are trained.
    adapter_params_per_rank: int = Field(ge=0)
    text_adapter_params_per_rank: int = Field(ge=0)


class ModelFacts(Record):
    """One base model. For image models the transformer fields describe the diffusion backbone."""

    model_id: str
    family: Family
    #: `model_type` in config.json ("llama", "qwen3_moe"); for image models the image type.
    architecture: str
    params_total: int = Field(ge=0)
    #: Parameters that one token passes through; equal to the total unless it is a mixture of experts.
    params_active: int = Field(ge=0)
    layers: int = Field(ge=1)
    hidden: int = Field(ge=1)
    intermediate: int = Field(ge=1)
    heads: int = Field(ge=1)
    kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    vocab: int = Field(ge=1)
    max_position: int = Field(ge=1)
    tied_embeddings: bool
    #: True: three MLP matrices (gate, up, down), as in Llama; False: two, as in GPT-2 and Falcon.
    gated_mlp: bool = True
    sliding_window: int | None = None
    #: Multi-head latent attention (DeepSeek V2/V3): its ranks shape the projections.
    q_lora_rank: int | None = None
    kv_lora_rank: int | None = None
    moe: MoeFacts | None = None
    mixer: MixerFacts | None = None
    image: ImageFacts | None = None
    #: As stored in the repository: "bfloat16", "float16", "float32".
    dtype: str = "bfloat16"
    #: By field; a field not listed has the `confidence` of the whole.
    sources: dict[str, Confidence] = Field(default_factory=dict)

    @property
    def confidence(self) -> Confidence:
        """The weakest confidence of the facts that decide: size and shape."""
        return weakest_confidence([self.sources[name] for name in DECIDING if name in self.sources])

    @property
    def attention(self) -> Attention:
        """The fastest kind of kernel that it can be trained with, if the GPU supports it."""
        if self.architecture in _EAGER_ONLY:
            return Attention.EAGER
        no_flash = self.architecture in _NO_FLASH or (not self.is_image and self.head_dim > _FLASH_HEAD)
        return Attention.SDPA if no_flash else Attention.FLASH_2

    @property
    def packing_problem(self) -> str:
        """Why rows may not share a sequence; empty: they may. `tests/trainer/native/test_model_packing.py`
        compares the losses of packed rows with those of each row alone."""
        if self.attention is not Attention.FLASH_2:
            return f"{self.architecture} has no flash attention"
        if self.architecture in _CARRIES_STATE:
            return f"{self.architecture} carries its state from one row into the next"
        if self.architecture in _SEES_NO_ROWS:
            return f"{self.architecture}'s attention does not see where a row begins"
        return ""

    @property
    def native_problem(self) -> str:
        """Why the native trainer does not train it; empty: it does."""
        return (
            f"it leaves out a part of {self.architecture}'s head" if self.architecture in _OTHER_HEAD else ""
        )

    @property
    def no_adapter(self) -> frozenset[str]:
        """Names of linear layers that PEFT refuses."""
        return _NO_ADAPTER.get(self.architecture, frozenset())

    @property
    def is_image(self) -> bool:
        return self.image is not None

    @property
    def embedding_params(self) -> int:
        """Parameters of the embedding table, and of the output head where it is a separate matrix."""
        if self.is_image:
            return 0
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def stored_bytes(self) -> int:
        """The bytes of the repository's weights, which are downloaded and read from disk."""
        per_param = 4 if self.dtype == "float32" else 2
        extra = self.image.text_encoder_params + self.image.vae_params if self.image else 0
        return (self.params_total + extra) * per_param


#: The fields whose confidence is the model's confidence.
DECIDING = ("family", "params_total", "layers", "hidden", "intermediate", "vocab")
