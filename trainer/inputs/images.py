"""Pictures and captions as the image engines read them: folders of sd-scripts, or one folder for ai-toolkit.

sd-scripts reads how often a picture comes per epoch out of the folder's name, `{repeats}_{words}`, and
takes the words for a caption where a picture has none; ai-toolkit walks any folder. Unpacking, names and
all that can be wrong with a zip is `core.data.pictures`. Captions may be left out of part of the pictures:
validators score without a caption three times as much as with one.
"""

from __future__ import annotations

import hashlib
import random
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from core.data.archives import BadArchive
from core.data.facts import DatasetFacts, image_dataset_facts
from core.data.pictures import PictureZipContents, unpack_pictures
from core.domain.tasks import ImageModelType
from core.runs.run_files import RunSpec
from trainer.errors import BadData

#: What sd-scripts calls the pictures where the task has no trigger word.
WORDS = "lora style"
_DONE = "done"


@dataclass(frozen=True)
class PreparedImages:
    #: Holds the folder of pictures, for sd-scripts' `train_data_dir`.
    parent: Path
    #: The pictures themselves, for ai-toolkit's `folder_path`.
    folder: Path
    facts: DatasetFacts
    #: What an operator may want to know about the zip.
    notes: tuple[str, ...]


def prepare_images(
    spec: RunSpec, folder: Path, *, repeats: int = 1, dropout: float = 0.0, seed: int = 42
) -> PreparedImages:
    """Unpack the task's zip once; `dropout` is the share of pictures that lose their caption for good.

    Engines that drop captions at random do that better (`caption_dropout` in the profile); this is for where
    text encoders are cached, which rules it out. `BadData` for a zip without a picture to train on.
    """
    if not Path(spec.data_path).is_file():
        raise BadData(f"{spec.data_path} is no file: the task's pictures are not there")
    wanted = f"{Path(spec.data_path).stat().st_size} {dropout} {seed} {spec.trigger_word}"
    parent = folder / hashlib.sha256(wanted.encode()).hexdigest()[:16]
    pictures = parent / "img" / folder_name(repeats, spec.trigger_word)
    unfinished = folder / f".{parent.name}.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(parent, ignore_errors=True)
    try:
        contents = unpack_pictures(Path(spec.data_path), unfinished / pictures.relative_to(parent))
    except (BadArchive, OSError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise BadData(f"{Path(spec.data_path).name}: {error}") from error
    dropped = _drop_captions(unfinished / pictures.relative_to(parent), contents, dropout, seed)
    unfinished.rename(parent)
    notes = contents.notes() + (
        [f"{dropped} captions left out (caption_dropout {dropout:g})"] if dropped else []
    )
    facts = image_dataset_facts(len(contents.pairs), spec.image_type or ImageModelType.SDXL)
    return PreparedImages(
        parent / "img", pictures, facts.model_copy(update={"image_repeats": repeats}), tuple(notes)
    )


def folder_name(repeats: int, trigger: str | None) -> str:
    """`10_lora style`: the number before the first underscore is what counts."""
    words = re.sub(r"[^\w .-]+", " ", trigger or WORDS).strip(" .") or WORDS
    return f"{max(repeats, 1)}_{words[:80]}"


def _drop_captions(folder: Path, contents: PictureZipContents, share: float, seed: int) -> int:
    """Empty a share of the captions; not remove them, or sd-scripts would take the folder's words."""
    captioned = [pair.caption for pair in contents.pairs if pair.caption is not None]
    chosen = random.Random(seed).sample(captioned, round(share * len(captioned)))  # noqa: S311 - no secret
    for name in chosen:
        # Nothing at all ends sd-scripts; a line break is an empty caption.
        (folder / name).write_text("\n", encoding="utf-8")
    return len(chosen)
