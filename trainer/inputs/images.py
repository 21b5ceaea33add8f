"""Pictures and captions as the image engines read them: folders of sd-scripts, or one folder for ai-toolkit.

sd-scripts reads how often a picture comes per epoch out of the folder's name, `{repeats}_{words}`, and
takes the words for a caption where a picture has none; ai-toolkit walks any folder. Unpacking, names and
all that can be wrong with a zip is `core.data.pictures`.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from core.data.archives import BadArchive
from core.data.facts import DatasetFacts, image_dataset_facts
from core.data.pictures import unpack_pictures
from core.domain.tasks import ImageModelType
from core.runs.run_files import RunSpec
from trainer.errors import BadData

#: What sd-scripts calls the pictures where the task has no trigger word.
WORDS = "lora style"


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
    spec: RunSpec, folder: Path, *, repeats: int = 1, verbatim: bool = False
) -> PreparedImages:
    """Unpack the task's zip, with captions as they are or as engines read them; `BadData` for one without a
    picture to train on."""
    source = Path(spec.data_path)
    if not source.is_file():
        raise BadData(f"{source} is not a file: the task's pictures are missing")
    wanted = f"{source.stat().st_size} {spec.trigger_word} {verbatim}"
    parent = folder / hashlib.sha256(wanted.encode()).hexdigest()[:16]
    pictures = parent / "img" / folder_name(repeats, spec.trigger_word)
    unfinished = folder / f".{parent.name}.new"
    shutil.rmtree(unfinished, ignore_errors=True)
    shutil.rmtree(parent, ignore_errors=True)
    try:
        contents = unpack_pictures(source, unfinished / pictures.relative_to(parent), verbatim=verbatim)
    except (BadArchive, OSError) as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise BadData(f"{source.name}: {error}") from error
    unfinished.rename(parent)
    facts = image_dataset_facts(len(contents.pairs), spec.image_type or ImageModelType.SDXL)
    facts = facts.model_copy(update={"image_repeats": repeats})
    return PreparedImages(parent / "img", pictures, facts, tuple(contents.notes()))


def folder_name(repeats: int, trigger: str | None) -> str:
    """`10_lora style`: the number before the first underscore is what counts."""
    words = re.sub(r"[^\w .-]+", " ", trigger or WORDS).strip(" .") or WORDS
    return f"{max(repeats, 1)}_{words[:80]}"
