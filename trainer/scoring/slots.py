"""The keys and values of completions that are sampled together, and attention to them.

Each completion has a slot of a buffer that is allocated once, and writes its own next place in it: the rows
need not be of one length, a finished one gives its slot away, and nothing is copied from token to token.
transformers' own cache appends by copying everything.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

#: Masks of four dimensions are understood by these; the others build their own from one of two.
SDPA, EAGER = "sdpa", "eager"
_FLASH = "flash_attention_"
#: What some models want of attention beside the mask.
_ODD = ("softcap", "s_aux", "position_bias")


class Slots:
    """The places of the buffers that the coming pass reads and writes; one record for all layers."""

    def __init__(self, rows: int, places: int, device: torch.device) -> None:
        self.rows, self.places, self.device = rows, places, device
        #: Rows in use, always the first ones, and the places that the longest of them has, the new one's too.
        self.used, self.width = 0, 0
        self._columns = torch.arange(places, device=device)
        self._lengths = torch.empty(0, dtype=torch.long, device=device)
        self._written: dict[int, torch.Tensor] = {}

    def point(self, used: int, width: int, lengths: torch.Tensor) -> torch.Tensor:
        """Prepare the coming pass: each row's token comes behind its `lengths`. Return the mask of what each
        row has, its new place included."""
        self.used, self.width, self._lengths = used, width, lengths
        self._written.clear()
        return self._columns[:width] <= lengths[:, None]

    def written(self, heads: int) -> torch.Tensor:
        """Return the place of the new token in a buffer of all heads' places one after the other."""
        if heads not in self._written:
            heads_of_rows = torch.arange(self.used * heads, device=self.device)
            self._written[heads] = heads_of_rows * self.places + self._lengths.repeat_interleave(heads)
        return self._written[heads]


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's buffers, `[row, head, place, width of a head]`."""

    is_sliding = False

    def __init__(self, slots: Slots) -> None:
        super().__init__()
        self._slots = slots

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        # Zeros, not whatever was there: a masked value counts for nothing only if it is a number.
        self.keys, self.values = (self._buffer(states) for states in (key_states, value_states))
        self.is_initialized = True

    def _buffer(self, states: torch.Tensor) -> torch.Tensor:
        heads, width = states.shape[1], states.shape[3]
        return states.new_zeros((self._slots.rows, heads, self._slots.places, width))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One new token of each row in use."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        return self._written(self.keys, key_states), self._written(self.values, value_states)

    def _written(self, buffer: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        _, heads, _, width = buffer.shape
        buffer.view(-1, width).index_copy_(0, self._slots.written(heads), states.reshape(-1, width))
        return buffer[: self._slots.used, :, : self._slots.width]

    def fill(self, first: int, layer: DynamicLayer, times: int) -> None:
        """The rows from `first` on: those of another cache, each so many times."""
        if not self.is_initialized:
            self.lazy_initialization(layer.keys, layer.values)
        for buffer, states in ((self.keys, layer.keys), (self.values, layer.values)):
            rows = states.repeat_interleave(times, dim=0)
            buffer[first : first + len(rows), :, : rows.shape[2]] = rows

    def move(self, places: torch.Tensor, to: torch.Tensor) -> None:
        """Copy rows to slots that are free."""
        if self.is_initialized:
            for buffer in (self.keys, self.values):
                buffer[to, :, : self._slots.width] = buffer[places, :, : self._slots.width]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._slots.width, 0

    def get_seq_length(self) -> int:
        return max(self._slots.width - 1, 0)

    def get_max_length(self) -> int:
        return -1


def slot_cache(model: Any, slots: Slots) -> Cache:
    return Cache(layers=[SlotLayer(slots) for _ in DynamicCache(config=model.config).layers])


def keeps_all(model: Any, places: int) -> bool:
    """Return True if every layer keeps the keys and values of this many tokens and nothing else: none with a
    state or a smaller window."""
    config = model.config.get_text_config(decoder=True)
    shared = getattr(config, "num_kv_shared_layers", None)
    if getattr(model.config, "is_encoder_decoder", False) or getattr(model, "_is_stateful", False) or shared:
        return False
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, TypeError):
        return False
    return bool(layers) and all(_keeps(layer, places) for layer in layers)


def _keeps(layer: Any, places: int) -> bool:
    if type(layer) is DynamicSlidingWindowLayer:
        return bool(layer.sliding_window > places)
    return type(layer) is DynamicLayer


def attention_of(model: Any) -> str:
    return str(model.config.get_text_config(decoder=True)._attn_implementation)


def takes_wide_masks(attention: str) -> bool:
    """Return True if `grouped_attention` stands in for it."""
    return attention == SDPA or attention.startswith(_FLASH)


@contextlib.contextmanager
def grouped_attention(attention: str) -> Iterator[None]:
    """Attention of single tokens without a copy of keys and values for each query head.

    The query heads that share keys are the rows of one small matrix. transformers repeats keys and values
    for each of them where there is a mask, for every token: 14 ms a layer in place of 0.7 (64 rows, 2 heads
    of 64 for each of 2, on one core).
    """
    if not takes_wide_masks(attention):
        yield
        return
    functions = ALL_ATTENTION_FUNCTIONS
    plain, kept = functions[attention], dict(functions._local_mapping)

    def attend(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **named: Any,
    ) -> Any:
        if query.shape[2] != 1 or attention_mask is None or any(named.get(key) is not None for key in _ODD):
            return plain(module, query, key, value, attention_mask, **named)
        rows, heads, _, width = query.shape
        grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], width)
        found = torch.nn.functional.scaled_dot_product_attention(
            grouped, key, value, attn_mask=attention_mask, scale=named.get("scaling")
        )
        return found.reshape(rows, 1, heads, value.shape[3]), None

    functions[attention] = attend
    try:
        yield
    finally:
        functions._local_mapping = kept
