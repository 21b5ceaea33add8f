from __future__ import annotations

import pytest

from core.domain.tasks import ImageModelType
from core.models.identify import facts_from_name, facts_from_row
from core.models.image_families import IMAGE_FAMILIES
from core.models.shapes import linear_shapes, shape_params
from core.models.table import MODEL_ROWS, ModelRow
from core.planning.candidate import shape_of
from tests.doubles.each import each

#: OPT 350M projects its embeddings from 512 to 1024, alone of all.
ODD = {"opt-331200000"}


@each("row", MODEL_ROWS)
def test_each_row_s_shape_adds_up_to_its_parameters(row: ModelRow) -> None:
    facts = facts_from_row(row, "any", row.family, row.params)
    allowed = 0.07 if f"{row.family}-{row.params}" in ODD else 0.015
    assert shape_params(facts).total == pytest.approx(row.params, rel=allowed)
    assert facts.params_active <= facts.params_total


def test_adapters_of_llama_are_the_size_that_was_counted_on_the_real_model() -> None:
    """2.62 M parameters per rank for 8B and 12.9 M for 70B, all linear layers."""

    def per_rank(name: str, modules: tuple[str, ...] = ()) -> int:
        return shape_of(facts_from_name(name), modules).adapted.params_per_rank

    assert per_rank("Llama-3.1-8B") == 2_621_440
    assert per_rank("Llama-3.1-70B") == pytest.approx(12.94e6, rel=0.001)
    assert per_rank("Llama-3.1-8B", ("q_proj", "v_proj")) == 32 * (8192 + 4096 + 1024)


def test_routed_experts_carry_no_adapter_but_shared_ones_do() -> None:
    facts = facts_from_name("deepseek-ai/DeepSeek-V2-Lite-15.7B")
    assert facts.architecture == "deepseek_v2"
    routed = [shape for shape in linear_shapes(facts) if shape.routed]
    assert sum(shape.params for shape in routed) > 0.8 * facts.params_total
    assert shape_of(facts).adapted.params_per_rank * 64 < 0.02 * facts.params_total
    assert any(shape.name == "shared_up_proj" and not shape.routed for shape in linear_shapes(facts))
    assert facts.params_active == pytest.approx(2.66e9, rel=0.05)


@pytest.mark.parametrize(("kind", "gib_at_512"), [(ImageModelType.SDXL, 3.40), (ImageModelType.FLUX, 4.56)])
def test_image_adapters_are_the_size_that_was_counted_on_the_real_modules(
    kind: ImageModelType, gib_at_512: float
) -> None:
    """bf16 at rank 512: SDXL with both text encoders, Flux without."""
    facts = IMAGE_FAMILIES[kind].facts
    text = facts.text_adapter_params_per_rank if kind is ImageModelType.SDXL else 0
    size = (facts.adapter_params_per_rank + text) * 512 * 2 / 2**30
    assert size == pytest.approx(gib_at_512, rel=0.01)
