"""Which image adapters are submissions: the evaluation loads their names, and they change the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.domain.tasks import ImageModelType, TaskType
from core.submission import check as module
from core.submission.check import BaseModelRef, SubmissionReport, examine
from core.submission.faults import FaultKind
from core.submission.prepare import prepare
from tests.core.submission.folders import IMAGE_MODULES, bf16, image_adapter, safetensors, write

FLUX, SDXL = ImageModelType.FLUX, ImageModelType.SDXL
KREA2, Z_IMAGE = ImageModelType.KREA2, ImageModelType.Z_IMAGE
ENCODERS = ("lora_te1_", "lora_te2_", "lora_te3_")


def family_of(made: str) -> ImageModelType:
    return ImageModelType(made.split()[0])


def checked(folder: Path, weights: bytes, image_type: ImageModelType | None = None) -> SubmissionReport:
    prepared = prepare(write(folder, {"last.safetensors": weights}), BaseModelRef("o/m"), TaskType.IMAGE)
    return examine(prepared.items, prepared.kind, BaseModelRef("o/m", None, image_type))


def kinds(report: SubmissionReport) -> list[FaultKind]:
    return [fault.kind for fault in report.faults]


def is_up(name: str) -> bool:
    return "lora_B" in name or "lora_up" in name


@pytest.mark.parametrize("made", IMAGE_MODULES)
def test_what_engines_write_is_a_submission_of_its_family_and_of_no_other_layout(
    made: str, tmp_path: Path
) -> None:
    report = checked(tmp_path / "own", image_adapter(made), family_of(made))
    assert report.faults == ()
    assert report.remarks == ()
    assert checked(tmp_path / "any", image_adapter(made)).faults == ()
    assert checked(tmp_path / "any", image_adapter(made)).remarks == ()
    other = SDXL if family_of(made) in (Z_IMAGE, ImageModelType.IDEOGRAM4) else Z_IMAGE
    assert kinds(checked(tmp_path / "other", image_adapter(made), other)) == [FaultKind.LAYOUT]


@pytest.mark.parametrize("made", IMAGE_MODULES)
@pytest.mark.parametrize("known", [True, False], ids=["family known", "family unknown"])
def test_as_it_begins_no_adapter_is_a_submission(made: str, known: bool, tmp_path: Path) -> None:
    report = checked(tmp_path / "i", image_adapter(made, is_up), family_of(made) if known else None)
    assert kinds(report) == [FaultKind.ZERO_DELTA]
    assert "add zero" in str(report.faults[0])
    assert report.model_hash is None


def test_one_module_that_was_trained_is_enough_and_the_others_are_a_remark(tmp_path: Path) -> None:
    trained = "diffusion_model.blocks.0.attn.wq"
    weights = image_adapter("krea2 ai-toolkit", lambda name: is_up(name) and not name.startswith(trained))
    report = checked(tmp_path / "i", weights, KREA2)
    assert report.faults == ()
    assert "23 of 24 modules that add zero" in str(report.remarks[0])


def test_text_encoders_may_be_changed_too_but_not_alone(tmp_path: Path) -> None:
    for made, family in (("flux kohya", FLUX), ("sdxl kohya", SDXL)):
        weights = image_adapter(made, lambda name: is_up(name) and not name.startswith(ENCODERS))
        assert checked(tmp_path / made, weights, family).faults == ()
    only = {"lora_te1_x.lora_up.weight": bf16(4), "lora_te1_x.lora_down.weight": bf16(4)}
    for family in (Z_IMAGE, SDXL):
        report = checked(tmp_path / family.value, safetensors(only), family)
        assert kinds(report) == [FaultKind.LAYOUT]
        assert "text encoders alone" in str(report.faults[0])


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (("lora_down.weight",), FaultKind.LAYOUT),
        (("lora_B.weight", "alpha"), FaultKind.LAYOUT),
        (("lora_A.weight", "lora_up.weight"), FaultKind.LAYOUT),
        (("lora_A.weight", "lora_B.weight", "alpha"), None),
        (("lora_A.default.weight", "lora_B.default.weight"), None),
        (("lora.down.weight", "lora.up.weight"), None),
        (("lora_A", "lora_B"), None),
        (("lokr_w1", "lokr_w2", "alpha"), None),
        (("lokr_w1", "lokr_w2_a", "lokr_w2_b"), None),
        (("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"), None),
        (("diff",), None),
        (("lora_up.weight", "lora_down.weight", "dora_scale"), None),
    ],
)
def test_a_module_has_all_the_factors_of_its_kind(
    parts: tuple[str, ...], expected: FaultKind | None, tmp_path: Path
) -> None:
    weights = {f"diffusion_model.blocks.0.attn.wq.{part}": bf16(4) for part in parts}
    assert kinds(checked(tmp_path / "i", safetensors(weights), KREA2)) == ([expected] if expected else [])
    if expected is None:
        zero = next(part for part in parts if part != "dora_scale")
        weights[f"diffusion_model.blocks.0.attn.wq.{zero}"] = ("BF16", [4], bytes(8))
        assert kinds(checked(tmp_path / "z", safetensors(weights), KREA2)) == [FaultKind.ZERO_DELTA]


def test_one_name_that_is_not_loaded_fails_a_scored_family_and_is_a_remark_elsewhere(tmp_path: Path) -> None:
    strange = {"model.layers.0.q_proj.lora_A.weight": bf16(4), "model.layers.0.q_proj.lora_B.weight": bf16(4)}
    report = checked(tmp_path / "alone", safetensors(strange))
    assert kinds(report) == [FaultKind.LAYOUT]
    assert "model.layers.0.q_proj.lora_A.weight" in str(report.faults[0])
    known = {f"diffusion_model.blocks.0.attn.wq.lora_{one}.weight": bf16(4) for one in "AB"}
    weights = safetensors({**known, **strange, "emb": bf16(2)})
    report = checked(tmp_path / "beside", weights, KREA2)
    assert kinds(report) == [FaultKind.LAYOUT]
    assert "2 names that are unknown, the first model.layers.0.q_proj" in str(report.faults[0])
    report = checked(tmp_path / "elsewhere", weights)
    assert (report.faults, [fault.kind for fault in report.remarks]) == ((), [FaultKind.LAYOUT])


@pytest.mark.parametrize("at", [0, 4095, 4096, 4097, 3 << 20])
def test_a_single_number_anywhere_makes_a_tensor_no_zero_and_minus_zero_is_one(
    at: int, tmp_path: Path
) -> None:
    def weights(raw: bytes) -> bytes:
        names = [f"diffusion_model.blocks.0.attn.wq.lora_{one}.weight" for one in "AB"]
        return safetensors({names[0]: bf16(4), names[1]: ("BF16", [len(raw) // 2], raw)})

    raw = bytearray(b"\x00\x80" * (2 << 20))
    assert kinds(checked(tmp_path / "zero", weights(bytes(raw)), KREA2)) == [FaultKind.ZERO_DELTA]
    raw[at] |= 0x3C
    assert checked(tmp_path / "one", weights(bytes(raw)), KREA2).faults == ()


def test_a_healthy_file_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check comes before each submission, and adapters have gigabytes."""
    monkeypatch.setattr(module, "_BLOCK", 0)
    names = [f"diffusion_model.blocks.0.attn.wq.lora_{one}.weight" for one in "AB"]
    large = safetensors({name: bf16(1 << 20) for name in names})
    assert checked(tmp_path / "i", large, KREA2).faults == ()


def test_weights_that_are_no_numbers_are_found_first(tmp_path: Path) -> None:
    nan = ("BF16", [1], b"\xc0\x7f")
    weights = {f"diffusion_model.blocks.0.attn.wq.lora_{one}.weight": nan for one in "AB"}
    assert kinds(checked(tmp_path / "i", safetensors(weights), KREA2)) == [FaultKind.NOT_FINITE]
